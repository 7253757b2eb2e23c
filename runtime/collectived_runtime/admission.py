"""Admission: who may call a server of this job.

A caller on a Unix socket may do what its user may: everything, where that is the daemon's own user or root; use
workers, where it is let in (`guests/peers.py`). Everybody else shows the job's *secret*, as `authorization: Bearer
<secret>` in the metadata of every call, or a token, which is good for less (`credentials.py`).
Whether a daemon lives is no secret: the health service answers everybody, for those who ask it (kubelets, load
balancers) cannot show one.
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio

from collectived_runtime.credentials import Right
from collectived_runtime.guests.callers import Callers, shown
from collectived_runtime.limits.logins import WINDOW_SECONDS, address_of_peer
from collectived_runtime.limits.pace import Pace, Rate
from collectived_runtime.limits.refusals import Limit, Refusals

_KEY = "authorization"
_SCHEME = "Bearer "
_OPEN = "/grpc.health.v1.Health/"
_STRANGERS = Rate(20, 40)  # refusals of one address; those beyond are told late
# The calls that change nothing: all that a viewing token is good for.
VIEWING = frozenset(
    {
        "/collectived.v1.Coordinator/Status",
        "/collectived.v1.Coordinator/Trace",
        "/collectived.v1.Worker/Status",
        "/collectived.v1.Worker/Trace",
    }
)
# What a client token is good for beside these, and what guests of another user may do.
USING = frozenset(
    f"/collectived.v1.Worker/{method}" for method in ("OpenSession", "Join", "Prepare", "Submit", "Abort", "Leave")
)
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
MAKERS = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context = grpc.aio.ServicerContext[Any, Any]


def kind_of(handler: Handler) -> str:
    """Which of the four kinds of method a handler is of: the name of its attribute that is set."""
    return next(kind for kind in _KINDS if getattr(handler, kind))


def is_local(address: str) -> bool:
    """Whether an address to dial, or the peer of a call, is a Unix socket."""
    return address.startswith("unix:")


def client_metadata(address: str, secret: str) -> tuple[tuple[str, str], ...]:
    """What a client of this job sends along with every call to `address`; nothing on a Unix socket."""
    return () if is_local(address) or not secret else ((_KEY, f"{_SCHEME}{secret}"),)


def check_exposed(addresses: Iterable[str], secret: str, insecure: bool, mutual: bool = False) -> None:
    """Refuses to serve other hosts where nobody could be told from the job's own.

    Args:
        addresses: `unix:/path` or `host:port`, where a server is to listen.
        mutual: whether callers prove by certificates who they are.

    Raises:
        ValueError: one of them can be reached from elsewhere, and there is neither that nor a secret.
    """
    exposed = [address for address in addresses if not is_local(address) and not _is_loopback(address)]
    if exposed and not (secret or insecure or mutual):
        raise ValueError(
            f"{', '.join(exposed)} can be reached from other hosts, and this job has no secret: give one in "
            "COLLECTIVED_SECRET or as the first line of standard input with --attached, have callers show certificates "
            "(--tls-cert, --tls-key and --tls-ca), listen at 127.0.0.1, or say --insecure to let everybody in"
        )


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


class Admission(grpc.aio.ServerInterceptor):
    """Refuses callers that may not do what their call does."""

    def __init__(self, callers: Callers, refusals: Refusals | None = None) -> None:
        self._callers = callers
        self._refusals = refusals or Refusals()
        self._strangers = Pace(_STRANGERS)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        credential = shown(handler_call_details.invocation_metadata)
        needed = Right.LOOK if method in VIEWING else Right.USE if method in USING else Right.ALL
        gate = self._callers.gate
        if handler is None or method.startswith(_OPEN) or (gate.right(credential) >= needed and not gate.logins):
            return handler
        # Only the call itself knows from where it comes.
        return guarded(handler, partial(self._admit, credential, needed))

    async def _admit(self, credential: str, needed: Right, context: Context) -> None:
        gate = self._callers.gate
        address = address_of_peer(context.peer())  # '' where it is none, as at a Unix socket
        if gate.logins.shut_out(address):
            self._refusals.limit(Limit.LOGINS)
            await asyncio.sleep(self._strangers.delay(address, time.monotonic()))
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"too many wrong credentials came from this address: wait {WINDOW_SECONDS:g} s, or raise "
                "max_login_failures of the daemon",
            )
        caller = self._callers.of(context)
        if caller.right >= needed:
            return
        gate.turned_away("grpc", credential, address)
        await asyncio.sleep(self._strangers.delay(address, time.monotonic()))
        if caller.right is Right.LOOK:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                "a viewing token is good for looking only (Status, Trace, health), and this call does more: it needs "
                "the job's secret as metadata 'authorization: Bearer <secret>'",
            )
        if caller.right is Right.USE:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                "this call is for the daemon's own user, root, or whoever shows the job's secret as metadata "
                "'authorization: Bearer <secret>': guests may open sessions, join groups and look",
            )
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, caller.refusal)


def guarded(handler: Handler, admit: Callable[[Context], Awaitable[None]]) -> Handler:
    """The same, where `admit` returns first instead of raising. Before that no message of the caller is read.

    To that end the method takes a stream of messages, of which it reads the first where it needs one: for callers this
    is the same.
    """
    kind = kind_of(handler)
    behavior = getattr(handler, kind)
    one = kind.startswith("unary_")

    async def given(requests: Any, context: Context) -> Any:
        await admit(context)
        if not one:
            return requests
        async for request in requests:
            return request
        if context.cancelled() or context.done():  # the caller hung up instead: there is nobody to tell
            raise asyncio.CancelledError
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call came without its message")

    async def answers(requests: Any, context: Context) -> Any:
        return await behavior(await given(requests, context), context)

    async def streams(requests: Any, context: Context) -> Any:
        async for response in behavior(await given(requests, context), context):
            yield response

    kind = kind.replace("unary_", "stream_", 1) if one else kind
    made = streams if inspect.isasyncgenfunction(behavior) else answers
    found: Handler = MAKERS[kind](made, handler.request_deserializer, handler.response_serializer)
    return found
