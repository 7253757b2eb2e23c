"""Well-formed requests only: bytes that are no message of their method are refused before anything acts on them.

gRPC itself answers such bytes as if the service had a defect, and logs a traceback for each, with which a stranger
could fill disks.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from collectived_runtime.grpc_server.authentication import HANDLER_FACTORIES, Context, Handler, get_method_kind
from collectived_runtime.limits.rejections import MessageSource, RejectionCounters


class _UndecodableMessage:
    """Stands where a message should."""


_UNDECODABLE = _UndecodableMessage()


class ValidationInterceptor(grpc.aio.ServerInterceptor):
    """Refuses what cannot be read with INVALID_ARGUMENT, in streams of requests too, and counts it."""

    def __init__(self, refusals: RejectionCounters) -> None:
        self._rejections = refusals

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        return None if handler is None else _wrap_handler(handler, handler_call_details.method, self._rejections)


def _wrap_handler(handler: Handler, method: str, refusals: RejectionCounters) -> Handler:
    kind = get_method_kind(handler)
    behavior = getattr(handler, kind)
    streamed = kind.startswith("stream_")

    async def refuse(context: Context) -> None:
        refusals.count_malformed(MessageSource.GRPC)
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT, f"the request of {method} is no message of the protocol it belongs to"
        )

    async def readable(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async with contextlib.aclosing(aiter(requests)) as messages:  # type: ignore[type-var]
            async for request in messages:
                if request is _UNDECODABLE:
                    await refuse(context)
                yield request

    async def answers(request: Any, context: Context) -> Any:
        if request is _UNDECODABLE:
            await refuse(context)
        return await behavior(readable(request, context) if streamed else request, context)

    async def streams(request: Any, context: Context) -> Any:
        if request is _UNDECODABLE:
            await refuse(context)
        async for response in behavior(readable(request, context) if streamed else request, context):
            yield response

    checked = streams if inspect.isasyncgenfunction(behavior) else answers
    made: Handler = HANDLER_FACTORIES[kind](
        checked, _wrap_deserializer(handler.request_deserializer), handler.response_serializer
    )
    return made


def _wrap_deserializer(read: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if read is None:
        return None

    def tolerant(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return _UNDECODABLE

    return tolerant
