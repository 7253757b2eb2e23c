"""How the stream of a worker ends that says nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from collectived_proto.v1 import common_pb2, coordinator_pb2
from collectived_runtime.coordinator.core.coordinator import Coordinator
from collectived_runtime.coordinator.service import CoordinatorService


class SlowCall:
    """A call whose writes take until they are let through, as for a worker that does not read yet."""

    def __init__(self) -> None:
        self.begun, self.through = asyncio.Event(), asyncio.Event()
        self.written: list[str | None] = []

    async def write(self, message: coordinator_pb2.CoordinatorMessage) -> None:
        self.begun.set()
        await self.through.wait()
        self.written.append(message.WhichOneof("message"))


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_a_worker_that_ends_its_stream_at_once_is_sent_what_is_being_written(says_goodbye: bool) -> None:
    """A write that is cancelled may leave gRPC with a call that never ends."""

    async def story() -> None:
        call: Any = SlowCall()
        protocol = common_pb2.Protocol(lowest=1, highest=1, release="test")

        async def requests() -> AsyncIterator[coordinator_pb2.WorkerMessage]:
            yield coordinator_pb2.WorkerMessage(hello=coordinator_pb2.Hello(task=0, protocol=protocol, incarnation="i"))
            await call.begun.wait()
            if says_goodbye:
                yield coordinator_pb2.WorkerMessage(goodbye=coordinator_pb2.Goodbye())

        service = CoordinatorService(Coordinator(1_000_000, 5.0, 1.0), "job", "unix:/nowhere")
        attached = asyncio.create_task(service.Attach(requests(), call))
        await call.begun.wait()
        for _ in range(100):  # turns of the loop, in which the end is heard
            await asyncio.sleep(0)
        call.through.set()
        await asyncio.wait_for(attached, 20)
        assert call.written == ["welcome"]
        service.stop()

    asyncio.run(story())
