"""Calls that end by an abort, and leave nothing.

gRPC keeps the exception of an abort in the state of its call. Its traceback names frames that name the call: a circle
that only the collector of garbage breaks, and a flood of refusals would keep its requests until that comes by.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from collectived_runtime.grpc_server.authentication import HANDLER_FACTORIES, Context, Handler, get_method_kind


class AbortInterceptor(grpc.aio.ServerInterceptor):
    """Lets go of what an aborted call was about. The first of a server's interceptors."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = get_method_kind(handler)
        behavior = getattr(handler, kind)

        # Both return instead of raising: gRPC knows that the call was aborted, and raises the same exception itself.
        async def answers(request: Any, context: Context) -> Any:
            try:
                return await behavior(request, context)
            except grpc.aio.AbortError as aborted:
                _forget_frames(aborted)

        async def streams(request: Any, context: Context) -> Any:
            try:
                async for response in behavior(request, context):
                    yield response
            except grpc.aio.AbortError as aborted:
                _forget_frames(aborted)

        ended = streams if inspect.isasyncgenfunction(behavior) else answers
        made: Handler = HANDLER_FACTORIES[kind](ended, handler.request_deserializer, handler.response_serializer)
        return made


def _forget_frames(aborted: grpc.aio.AbortError) -> None:
    aborted.__traceback__ = aborted.__context__ = None
