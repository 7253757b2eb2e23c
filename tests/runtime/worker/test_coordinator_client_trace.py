"""A worker passes the coordinator's trace on, as far as that comes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from collectived_proto.v1 import trace_pb2 as pb
from collectived_runtime.engine.record.flight_recorder import FlightRecorder
from collectived_runtime.worker import coordinator_client, server
from collectived_runtime.worker.coordinator_client import CoordinatorClient

TIME = pb.TraceReply(time=pb.TraceTime(unix=1.0))
PART = pb.TraceReply(worker=pb.WorkerTrace(task=7, last=True))


class Stopping:
    """A call to a coordinator that gives `replies` and stops there."""

    def __init__(self, *replies: pb.TraceReply) -> None:
        self.replies = list(replies)
        self.cancelled = False

    async def read(self) -> pb.TraceReply:
        if not self.replies:
            await asyncio.Event().wait()
        return self.replies.pop(0)

    def cancel(self) -> None:
        self.cancelled = True


async def passed_on(call: Stopping) -> list[pb.TraceReply]:
    away: Any = SimpleNamespace(_usable_stub=SimpleNamespace(Trace=lambda request, metadata: call), _metadata=())
    away.request_trace = lambda request, patience: CoordinatorClient.request_trace(away, request, patience)
    away.address = "h:1"
    identity = SimpleNamespace(task=0, host="h", incarnation="i")
    groups = SimpleNamespace(group_loops=(), recorder=FlightRecorder())
    worker: Any = SimpleNamespace(coordinator_client=away, identity=identity, groups=groups, name="worker 0")
    return [reply async for reply in server._Worker._trace(worker, pb.TraceRequest())]


@pytest.mark.parametrize("begun", [[TIME, PART], [TIME], []])
def test_a_coordinator_that_stops_leaves_what_it_has_told(
    begun: list[pb.TraceReply], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_client, "TRACE_PART_SECONDS", 0.05)
    monkeypatch.setattr(server, "STATUS_SECONDS", 0.05)
    call = Stopping(*begun)
    told = asyncio.run(asyncio.wait_for(passed_on(call), 20))
    assert told[-1].last and "the coordinator at h:1 does not answer" in told[-1].warnings[0]
    assert [reply.worker.task for reply in told if reply.HasField("worker")] == ([7] if PART in begun else [0])
    assert call.cancelled
