"""Well-formed requests only: bytes that are no message of their method are refused before anything acts on them.

gRPC itself answers such bytes as if the service had a defect, and logs a traceback for each, with which a stranger
could fill disks.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from collectived_runtime.admission import MAKERS, Context, Handler, kind_of
from collectived_runtime.limits.refusals import Refusals, Where


class _Unreadable:
    """Stands where a message should."""


_UNREADABLE = _Unreadable()


class WellFormed(grpc.aio.ServerInterceptor):
    """Refuses what cannot be read with INVALID_ARGUMENT, in streams of requests too, and counts it."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        return None if handler is None else _checked(handler, handler_call_details.method, self._refusals)


def _checked(handler: Handler, method: str, refusals: Refusals) -> Handler:
    kind = kind_of(handler)
    behavior = getattr(handler, kind)
    streamed = kind.startswith("stream_")

    async def refuse(context: Context) -> None:
        refusals.bad(Where.GRPC)
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT, f"the request of {method} is no message of the protocol it belongs to"
        )

    async def readable(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for request in requests:
            if request is _UNREADABLE:
                await refuse(context)
            yield request

    async def answers(request: Any, context: Context) -> Any:
        if request is _UNREADABLE:
            await refuse(context)
        return await behavior(readable(request, context) if streamed else request, context)

    async def streams(request: Any, context: Context) -> Any:
        if request is _UNREADABLE:
            await refuse(context)
        async for response in behavior(readable(request, context) if streamed else request, context):
            yield response

    checked = streams if inspect.isasyncgenfunction(behavior) else answers
    made: Handler = MAKERS[kind](checked, _tolerant(handler.request_deserializer), handler.response_serializer)
    return made


def _tolerant(read: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if read is None:
        return None

    def tolerant(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return _UNREADABLE

    return tolerant
