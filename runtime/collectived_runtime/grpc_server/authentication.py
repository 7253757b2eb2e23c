"""Admission of callers to a server of this job.

A caller on a Unix socket may do what its user may: everything, where that is the daemon's own user or root; use
workers, where it is let in (`auth/peers.py`). Any other caller shows the job's *secret*, as `authorization: Bearer
<secret>` in the metadata of every call, or a token, which is good for less (`credentials.py`).
Whether a daemon lives is no secret: the health service answers every caller, for its callers (kubelets, load
balancers) cannot show one.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import ipaddress
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio

from collectived_runtime.auth.callers import CallerIdentifier, get_authorization
from collectived_runtime.auth.credentials import AccessLevel
from collectived_runtime.auth.peers import is_unix_address
from collectived_runtime.limits.login_throttle import WINDOW_SECONDS, parse_peer_address
from collectived_runtime.limits.rate_limit import Rate, RateLimiter
from collectived_runtime.limits.rejections import Limit, RejectionCounters

_METADATA_KEY = "authorization"
_SCHEME = "Bearer "
_PUBLIC_PREFIX = "/grpc.health.v1.Health/"
_REPEATED_FAILURE_COST = 100.0  # which is as late as there is
_AUTH_FAILURE_RATE = Rate(20, 40)  # refusals of one address or user; further ones are delayed
# The calls that change nothing: all that a viewing token is good for.
VIEW_METHODS = frozenset(
    {
        "/collectived.v1.Coordinator/Status",
        "/collectived.v1.Coordinator/Trace",
        "/collectived.v1.Worker/Status",
        "/collectived.v1.Worker/Trace",
    }
)
# The calls that a client token, or a guest of another user, may make beside these.
USE_METHODS = frozenset(
    f"/collectived.v1.Worker/{method}"
    for method in ("OpenSession", "Join", "Prepare", "Submit", "Cancel", "Abort", "Leave", "TellStack")
)
_METHOD_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
HANDLER_FACTORIES = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context = grpc.aio.ServicerContext[Any, Any]


def get_method_kind(handler: Handler) -> str:
    """Which of the four kinds of method a handler is of: the name of its attribute that is set."""
    return next(kind for kind in _METHOD_KINDS if getattr(handler, kind))


def client_metadata(address: str, secret: str) -> tuple[tuple[str, str], ...]:
    """The metadata of every call of this job's clients to `address`; none on a Unix socket."""
    return () if is_unix_address(address) or not secret else ((_METADATA_KEY, f"{_SCHEME}{secret}"),)


def check_exposed(addresses: Iterable[str], secret: str, insecure: bool, mutual: bool = False) -> None:
    """Refuse to serve other hosts where strangers could not be told apart from the job's own clients.

    Args:
        addresses: `unix:/path` or `host:port`, where a server is to listen.
        mutual: whether callers show certificates.

    Raises:
        ValueError: one of them can be reached from elsewhere, and there is neither that nor a secret.
    """
    exposed = [address for address in addresses if not is_unix_address(address) and not _is_loopback(address)]
    if exposed and not (secret or insecure or mutual):
        raise ValueError(
            f"{', '.join(exposed)} can be reached from other hosts, and this job has no secret: give one in "
            "COLLECTIVED_SECRET or as the first line of standard input with --attached, have callers show certificates "
            "(--tls-cert, --tls-key and --tls-ca), listen at 127.0.0.1, or say --insecure to let every caller in"
        )


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses callers that may not do what their call does."""

    def __init__(self, callers: CallerIdentifier, refusals: RejectionCounters | None = None) -> None:
        self._callers = callers
        self._rejections = refusals or RejectionCounters()
        self._auth_failure_limiter = RateLimiter(_AUTH_FAILURE_RATE)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        credential = get_authorization(handler_call_details.invocation_metadata)
        needed = (
            AccessLevel.VIEW
            if method in VIEW_METHODS
            else AccessLevel.USE
            if method in USE_METHODS
            else AccessLevel.ALL
        )
        gate = self._callers.authenticator
        if handler is None or method.startswith(_PUBLIC_PREFIX) or gate.get_access_level(credential) >= needed:
            return handler
        # Only the call itself knows from where it comes.
        return guard_handler(handler, partial(self._authorize, credential, needed))

    async def _authorize(self, credential: str, needed: AccessLevel, context: Context) -> None:
        gate = self._callers.authenticator
        address = parse_peer_address(context.peer())  # '' where it is none, as at a Unix socket
        key = self._callers.get_throttle_key(context)
        caller = self._callers.identify(context)
        if caller.access >= needed:
            return
        if credential and caller.access is AccessLevel.NONE and gate.login_throttle.has_failed_too_often(address):
            self._rejections.count_limit(Limit.LOGINS)
            await asyncio.sleep(self._auth_failure_limiter.reserve(key, time.monotonic(), _REPEATED_FAILURE_COST))
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "this is none of the job's credentials, and too many wrong ones came from this address: for "
                f"{WINDOW_SECONDS:g} s wrong ones are answered late (`max_login_failures` raises the limit); "
                "the job's secret is accepted at any time",
            )
        gate.count_rejection("grpc", credential, address)
        await asyncio.sleep(self._auth_failure_limiter.reserve(key, time.monotonic()))
        if caller.access is AccessLevel.VIEW:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                "a viewing token is good for looking only (Status, Trace, health), and this call does more: it needs "
                "the job's secret as metadata 'authorization: Bearer <secret>'",
            )
        if caller.access is AccessLevel.USE:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                "only the daemon's own user, root, and callers with the job's secret as metadata "
                "'authorization: Bearer <secret>' may make this call: others may open sessions, join groups and look",
            )
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, caller.rejection_message)


def guard_handler(handler: Handler, admit: Callable[[Context], Awaitable[None]]) -> Handler:
    """The same, where `admit` returns first instead of raising. Before that no message of the caller is read.

    To that end the method takes a stream of messages, of which it reads the first where it needs one: for callers this
    is the same.
    """
    kind = get_method_kind(handler)
    behavior = getattr(handler, kind)
    one = kind.startswith("unary_")

    async def given(requests: Any, context: Context) -> Any:
        await admit(context)
        if not one:
            return requests
        async with contextlib.aclosing(aiter(requests)) as messages:  # open it would be a circle that keeps the request
            async for request in messages:
                return request
        if context.cancelled() or context.done():  # the caller hung up instead: there is no caller to answer
            raise asyncio.CancelledError
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call came without its message")

    async def answers(requests: Any, context: Context) -> Any:
        return await behavior(await given(requests, context), context)

    async def streams(requests: Any, context: Context) -> Any:
        async for response in behavior(await given(requests, context), context):
            yield response

    kind = kind.replace("unary_", "stream_", 1) if one else kind
    made = streams if inspect.isasyncgenfunction(behavior) else answers
    found: Handler = HANDLER_FACTORIES[kind](made, handler.request_deserializer, handler.response_serializer)
    return found
