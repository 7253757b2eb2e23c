"""An aborted call leaves nothing that waits for the collector of garbage."""

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

from collectived_runtime.grpc_server.aborts import AbortInterceptor

ROUNDS = 5


class Payload:
    """What a request becomes."""


class Refusing(grpc.GenericRpcHandler):
    """Keeps weak references to what its two methods were given, and refuses it."""

    def __init__(self) -> None:
        self.given: list[weakref.ref[Payload]] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if handler_call_details.method == "/refuse/unary":
            return grpc.unary_unary_rpc_method_handler(self._unary, lambda _: Payload())
        return grpc.unary_stream_rpc_method_handler(self._stream, lambda _: Payload())

    async def _unary(self, request: Payload, context: Any) -> bytes:
        self.given.append(weakref.ref(request))
        try:
            raise ValueError("the reason")
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise AssertionError("abort raises")

    async def _stream(self, request: Payload, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await self._unary(request, context)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("method", ["unary", "stream"])
@pytest.mark.usefixtures("no_collector")
def test_the_request_of_a_refused_call_is_freed_at_once_and_its_caller_hears_why(tmp_path: Path, method: str) -> None:
    async def scenario() -> None:
        refusing = Refusing()
        server = grpc.aio.server(handlers=[refusing], interceptors=[AbortInterceptor()])
        address = f"unix:{tmp_path}/s.sock"
        server.add_insecure_port(address)
        await server.start()
        async with grpc.aio.insecure_channel(address) as opened:
            channel: Any = opened
            for _ in range(ROUNDS):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    if method == "unary":
                        await channel.unary_unary("/refuse/unary")(b"x")
                    else:
                        assert [answer async for answer in channel.unary_stream("/refuse/stream")(b"x")] == []
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert refused.value.details() == "the reason"
                del refused
        await server.stop(0)
        assert len(refusing.given) == ROUNDS
        while any(given() is not None for given in refusing.given):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), 30))
