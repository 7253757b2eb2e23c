"""A call that was answered leaves nothing that waits for the collector of garbage, whoever looked at it on its way."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from collectived_runtime.grpc_server.authentication import guard_handler
from collectived_runtime.grpc_server.validation import ValidationInterceptor
from collectived_runtime.limits.rejections import RejectionCounters

ROUNDS = 5
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Payload:
    """What a request becomes."""


class Answering(grpc.GenericRpcHandler):
    """A method of each kind, named after it, that reads one request, keeps a weak reference to it, and answers."""

    def __init__(self) -> None:
        self.given: list[weakref.ref[Payload]] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        kind = handler_call_details.method.rpartition("/")[2]
        behavior = self._stream if kind.endswith("stream") else self._one
        return getattr(grpc, f"{kind}_rpc_method_handler")(behavior, lambda _: Payload())

    async def _one(self, requests: Any, context: Any) -> bytes:
        request = requests if isinstance(requests, Payload) else await anext(aiter(requests))
        self.given.append(weakref.ref(request))
        return b"answer"

    async def _stream(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        yield await self._one(requests, context)


class Guard(grpc.aio.ServerInterceptor):
    """Admits everybody, as those do that look at a call before they read its request."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return guard_handler(await continuation(handler_call_details), self._admit)

    async def _admit(self, context: Any) -> None:
        await asyncio.sleep(0)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_collector")
def test_the_request_of_an_answered_call_is_freed_at_once(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        answering = Answering()
        interceptors = [Guard(), ValidationInterceptor(RejectionCounters())]
        server = grpc.aio.server(handlers=[answering], interceptors=interceptors)
        address = f"unix:{tmp_path}/s.sock"
        server.add_insecure_port(address)
        await server.start()
        receivers = _count_receivers()
        async with grpc.aio.insecure_channel(address) as opened:
            channel: Any = opened
            for _ in range(ROUNDS):
                call = getattr(channel, kind)(f"/answer/{kind}")(iter([b"x", b"y"]) if kind[:6] == "stream" else b"x")
                answers = [answer async for answer in call] if kind.endswith("_stream") else [await call]
                assert answers == [b"answer"]
                del call
            while any(given() is not None for given in answering.given) or _count_receivers() > receivers:
                await asyncio.sleep(0.01)
        await server.stop(0)
        assert len(answering.given) == ROUNDS

    asyncio.run(asyncio.wait_for(scenario(), 30))


def _count_receivers() -> int:
    """How many streams of requests gRPC has open; each knows its call, and that its request."""
    return sum(type(one).__name__ == "_MessageReceiver" for one in gc.get_objects())
