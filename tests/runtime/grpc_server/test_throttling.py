"""Pacing by caller: what one user has brought upon itself costs no other user time."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from collectived_runtime.auth.callers import CallerIdentifier
from collectived_runtime.auth.credentials import TokenAuthenticator
from collectived_runtime.auth.peers import resolve_allowed_users
from collectived_runtime.auth.unix_proxy import PeerCredentialProxy
from collectived_runtime.grpc_server.throttling import ThrottleInterceptor
from collectived_runtime.limits.rejections import MessageSource, RejectionCounters
from collectived_runtime.process import bind

OPEN_SESSION = "/collectived.v1.Worker/OpenSession"


class Echo(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def echo(request: bytes, context: Any) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(echo)


async def call(folder: Path, refusals: RejectionCounters, timeout: float) -> grpc.StatusCode:
    """What a call that opens a session comes to."""
    proxy = PeerCredentialProxy(resolve_allowed_users((), ()), 100)
    callers = CallerIdentifier(TokenAuthenticator(), proxy)
    server = grpc.aio.server(interceptors=[ThrottleInterceptor(callers, refusals)])
    server.add_generic_rpc_handlers((Echo(),))
    address = bind(server, f"unix:{folder}/s", proxy)
    await server.start()
    await proxy.start()
    try:
        async with grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            method: Any = channel.unary_unary(OPEN_SESSION)
            await method(b"", timeout=timeout)
        return grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        await server.stop(0)
        proxy.close()


@pytest.mark.parametrize(
    ("uid", "timeout", "code"),
    [(os.getuid() + 1, 4.0, grpc.StatusCode.OK), (os.getuid(), 1.0, grpc.StatusCode.DEADLINE_EXCEEDED)],
)
def test_nonsense_makes_the_user_wait_who_has_sent_it_and_nobody_else(
    tmp_path: Path, uid: int, timeout: float, code: grpc.StatusCode
) -> None:
    refusals = RejectionCounters()
    for _ in range(100):
        refusals.count_malformed(MessageSource.SOCKET, uid)
    assert asyncio.run(call(tmp_path, refusals, timeout)) is code
