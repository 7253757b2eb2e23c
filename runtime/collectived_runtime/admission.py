"""Admission: who may call a server of this job.

A caller on a Unix socket has passed the mode of the socket's directory; one over mutual TLS has proved that a
certificate of the job's authority is its own. Everybody else shows the job's *secret*, as
`authorization: Bearer <secret>` in the metadata of every call, or a *viewing token*, which is good for looking only.
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

from collectived_runtime.credentials import Gate, Right
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
    """Refuses callers that have not shown what their call needs.

    Args:
        mutual: over TCP nobody gets as far as a call who has not shown a certificate, which is as good as the secret.
    """

    def __init__(self, gate: Gate, refusals: Refusals | None = None, mutual: bool = False) -> None:
        self._gate = gate
        self._refusals = refusals or Refusals()
        self._strangers = Pace(_STRANGERS)
        self._mutual = mutual

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        shown = _shown(handler_call_details.invocation_metadata)
        right = self._gate.right(shown)
        needed = Right.LOOK if method in VIEWING else Right.ALL
        welcome = right >= needed
        if handler is None or method.startswith(_OPEN) or (welcome and not self._gate.logins):
            return handler
        # Only the call itself knows from where it comes.
        return guarded(handler, partial(self._admit, shown, right, welcome))

    async def _admit(self, shown: str, right: Right, welcome: bool, context: Context) -> None:
        if is_local(context.peer()) or self._mutual and _has_shown_a_certificate(context):
            return
        address = address_of_peer(context.peer())
        if self._gate.logins.shut_out(address):
            self._refusals.limit(Limit.LOGINS)
            await asyncio.sleep(self._strangers.delay(address, time.monotonic()))
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"too many wrong credentials came from this address: wait {WINDOW_SECONDS:g} s, or raise "
                "max_login_failures of the daemon",
            )
        if welcome:
            return
        self._gate.turned_away("grpc", shown, address)
        await asyncio.sleep(self._strangers.delay(address, time.monotonic()))
        if right:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                "a viewing token is good for looking only (Status, Trace, health), and this call does more: it needs "
                "the job's secret as metadata 'authorization: Bearer <secret>'",
            )
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            "this address needs the job's secret as metadata 'authorization: Bearer <secret>', and the call brought "
            "none or another: use the worker's Unix socket, or the secret of the job's file",
        )


def _has_shown_a_certificate(context: Context) -> bool:
    """gRPC has checked it against our authority by then, and whoever shows none gets no connection."""
    return bool(context.auth_context().get("x509_pem_cert"))


def _shown(metadata: Any) -> str:
    values = [value for key, value in metadata or () if key == _KEY]
    return values[0] if values and isinstance(values[0], str) else ""


def guarded(handler: Handler, admit: Callable[[Context], Awaitable[None]]) -> Handler:
    """The same, where `admit` returns first instead of raising."""
    kind = kind_of(handler)
    behavior = getattr(handler, kind)

    async def answers(request: Any, context: Context) -> Any:
        await admit(context)
        return await behavior(request, context)

    async def streams(request: Any, context: Context) -> Any:
        await admit(context)
        async for response in behavior(request, context):
            yield response

    guarded = streams if inspect.isasyncgenfunction(behavior) else answers
    made: Handler = MAKERS[kind](guarded, handler.request_deserializer, handler.response_serializer)
    return made
