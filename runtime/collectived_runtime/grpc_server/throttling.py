"""Pacing: calls that come more often than any client needs wait for their turn, before anything is done for them.

Callers over TCP are counted by address, callers at a Unix socket by user. Calls that belong to a session have the
pace of that session instead (`worker/service.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from functools import partial

import grpc
import grpc.aio

from collectived_runtime.auth.callers import CallerIdentifier
from collectived_runtime.grpc_server.authentication import Context, Handler, guard_handler
from collectived_runtime.limits.rate_limit import Rate, RateLimiter
from collectived_runtime.limits.rejections import RejectionCounters

RATES: Mapping[str, Rate] = {
    "/collectived.v1.Worker/Status": Rate(60, 100),
    "/collectived.v1.Worker/Trace": Rate(20, 40),
    "/collectived.v1.Worker/Drain": Rate(20, 40),
    "/collectived.v1.Coordinator/Status": Rate(60, 100),
    "/collectived.v1.Coordinator/Trace": Rate(20, 40),
    "/collectived.v1.Coordinator/Drain": Rate(20, 40),
    "/grpc.health.v1.Health/Check": Rate(100, 200),
    "/grpc.health.v1.Health/Watch": Rate(100, 200),
}
REFUSAL_RATE = Rate(50, 100)  # answers that are refusals


OPEN_SESSION_RATE = Rate(50, 128)  # sessions
MALFORMED_COST = 4  # sessions that a user cannot open for each of its clients that has talked nonsense
MAX_MALFORMED_CHARGED = 100
_OPEN_SESSION = "/collectived.v1.Worker/OpenSession"


class Throttle:
    """Holds callers back until their turn comes."""

    def __init__(self, rate: Rate) -> None:
        self._limiter = RateLimiter(rate)

    async def wait(self, caller: Hashable, cost: float = 1.0) -> None:
        delay = self._limiter.reserve(caller, time.monotonic(), cost)
        if delay:
            await asyncio.sleep(delay)

    def forget(self, caller: Hashable) -> None:
        self._limiter.forget(caller)


class ThrottleInterceptor(grpc.aio.ServerInterceptor):
    """Paces methods that every caller may call, and calls of unknown methods."""

    def __init__(
        self, callers: CallerIdentifier, refusals: RejectionCounters, rates: Mapping[str, Rate] = RATES
    ) -> None:
        self._callers = callers
        self._rejections = refusals
        self._method_throttles = {method: Throttle(rate) for method, rate in rates.items()}
        self._open_session_throttle, self._unknown_method_throttle = Throttle(OPEN_SESSION_RATE), Throttle(REFUSAL_RATE)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(self._reject_unknown_method)
        if handler_call_details.method == _OPEN_SESSION:
            return guard_handler(handler, self._throttle_open_session)
        throttle = self._method_throttles.get(handler_call_details.method)
        return handler if throttle is None else guard_handler(handler, partial(self._throttle_call, throttle))

    async def _throttle_open_session(self, context: Context) -> None:
        """A client that was disconnected for malformed messages comes again at once.

        That delays its user, and no other.
        """
        caller = self._callers.get_throttle_key(context)
        heard = min(MAX_MALFORMED_CHARGED, self._rejections.take_malformed(caller))
        await self._open_session_throttle.wait(caller, 1.0 + MALFORMED_COST * heard)

    async def _throttle_call(self, throttle: Throttle, context: Context) -> None:
        await throttle.wait(self._callers.get_throttle_key(context))

    async def _reject_unknown_method(self, requests: object, context: Context) -> None:
        await self._unknown_method_throttle.wait(self._callers.get_throttle_key(context))
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method here")
