"""Pacing: calls that come more often than anybody needs wait for their turn, before anything is done for them.

Who calls over TCP is told by address; all callers on a Unix socket are one. Calls that belong to a session have the
pace of that session instead (`worker/service.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from functools import partial

import grpc
import grpc.aio

from collectived_runtime.admission import Context, Handler, guarded
from collectived_runtime.limits.logins import address_of_peer
from collectived_runtime.limits.pace import Pace, Rate
from collectived_runtime.limits.refusals import Refusals, Where

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
REFUSED = Rate(50, 100)  # answers that are refusals


OPENING = Rate(50, 128)  # sessions
NONSENSE = 4  # sessions that cannot be opened on the host for each client there that has talked nonsense
MOST_NONSENSE = 100
_OPEN = "/collectived.v1.Worker/OpenSession"


class Turns:
    """Holds callers back until their turn comes."""

    def __init__(self, rate: Rate) -> None:
        self._pace = Pace(rate)

    async def wait(self, caller: Hashable, cost: float = 1.0) -> None:
        delay = self._pace.delay(caller, time.monotonic(), cost)
        if delay:
            await asyncio.sleep(delay)

    def forget(self, caller: Hashable) -> None:
        self._pace.forget(caller)


def caller_of(context: Context) -> str:
    """Whoever calls, as far as can be told: an address; '' for all who come over a Unix socket."""
    return address_of_peer(context.peer())


class Pacing(grpc.aio.ServerInterceptor):
    """Paces methods that anybody may call, and calls of methods that there are not."""

    def __init__(self, refusals: Refusals, rates: Mapping[str, Rate] = RATES) -> None:
        self._refusals = refusals
        self._turns = {method: Turns(rate) for method, rate in rates.items()}
        self._opening, self._unknown = Turns(OPENING), Turns(REFUSED)
        self._nonsense = 0  # of local clients, that has been charged

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(partial(_unknown, self._unknown))
        if handler_call_details.method == _OPEN:
            return guarded(handler, self._open)
        turns = self._turns.get(handler_call_details.method)
        return handler if turns is None else guarded(handler, partial(_turn, turns))

    async def _open(self, context: Context) -> None:
        """Who is shown out for nonsense comes again at once: that costs time, of those who come the same way."""
        caller, cost = caller_of(context), 1.0
        if not caller:
            heard = sum(self._refusals.malformed[where] for where in (Where.DOOR, Where.SESSION, Where.DOORBELL))
            cost += NONSENSE * min(MOST_NONSENSE, heard - self._nonsense)
            self._nonsense = heard
        await self._opening.wait(caller, cost)


async def _turn(turns: Turns, context: Context) -> None:
    await turns.wait(caller_of(context))


async def _unknown(turns: Turns, requests: object, context: Context) -> None:
    await turns.wait(caller_of(context))
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method here")
