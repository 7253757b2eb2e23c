"""Who may call: on a Unix socket whom the daemon serves, over TCP those who know the secret; or who may only look."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from collectived_proto.v1 import coordinator_pb2, worker_pb2
from collectived_proto.viewing_token import viewing_token
from collectived_runtime.auth.callers import CallerIdentifier
from collectived_runtime.auth.credentials import TokenAuthenticator
from collectived_runtime.auth.peers import resolve_allowed_users
from collectived_runtime.auth.unix_proxy import PeerCredentialProxy
from collectived_runtime.grpc_server.authentication import (
    VIEW_METHODS,
    AuthInterceptor,
    check_exposed,
    client_metadata,
)
from collectived_runtime.process import bind

SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Echo(grpc.GenericRpcHandler):
    """One method of each shape; the names of its methods are those of the shapes. Answers with what it was sent, and so
    it does as whatever a viewing token is good for."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        shape = "unary_unary" if method in VIEW_METHODS else method.rpartition("/")[2]
        maker = getattr(grpc, f"{shape}_rpc_method_handler", None)
        return maker(getattr(self, shape)) if maker else None

    async def unary_unary(self, request: bytes, context: Any) -> bytes:
        return request

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        # The other way to answer with a stream: by writing.
        async for request in requests:
            await context.write(request)


async def called(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...], method: str) -> bytes:
    call: Any = channel.unary_unary(method)
    answer: bytes = await call(b"hello", metadata=metadata)
    return answer


def call_once(address: str, shape: str, metadata: tuple[tuple[str, str], ...]) -> bytes | tuple[Any, str]:
    """What comes, or a code and what it says; blocking, for grpc.aio's clients say INTERNAL where a call ends under a
    write."""
    argument = iter([b"hello"]) if shape.startswith("stream") else b"hello"
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            answer = getattr(channel, shape)(f"/echo/{shape}")(argument, metadata=metadata, timeout=20)
            return b"".join(answer) if shape.endswith("stream") else bytes(answer)
        except grpc.RpcError as error:
            return error.code(), error.details() or ""


def with_server(gate: TokenAuthenticator, unix: Path, story: Callable[[str, str], Awaitable[None]]) -> None:
    """Runs a story that is given both addresses of a server."""

    async def run() -> None:
        porter = PeerCredentialProxy(resolve_allowed_users((), ()), 100)
        server = grpc.aio.server(interceptors=[AuthInterceptor(CallerIdentifier(gate, porter))])
        server.add_generic_rpc_handlers((Echo(),))
        local = bind(server, f"unix:{unix}", porter)
        remote = bind(server, "127.0.0.1:0", porter)
        await server.start()
        await porter.start()
        try:
            await story(local, remote)
        finally:
            await server.stop(0)
            porter.close()

    asyncio.run(run())


def outcome(gate: TokenAuthenticator, unix: Path, shape: str, where: str, secret: str) -> bytes | tuple[Any, str]:
    found: list[bytes | tuple[Any, str]] = []

    async def story(local: str, remote: str) -> None:
        address = local if where == "unix" else remote
        metadata = (("authorization", f"Bearer {secret}"),) if secret else ()
        found.append(await asyncio.to_thread(call_once, address, shape, metadata))

    with_server(gate, unix, story)
    return found[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_unix_socket_needs_no_secret(shape: str, tmp_path: Path) -> None:
    assert outcome(TokenAuthenticator("s3cret"), tmp_path / "a", shape, "unix", "") == b"hello"


@pytest.mark.parametrize("shape", SHAPES)
def test_tcp_passes_with_the_secret(shape: str, tmp_path: Path) -> None:
    assert outcome(TokenAuthenticator("s3cret"), tmp_path / "a", shape, "tcp", "s3cret") == b"hello"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("secret", ["", "s3cre", "s3cret2", "S3CRET"])
def test_tcp_is_refused_without_the_secret(shape: str, secret: str, tmp_path: Path) -> None:
    refused = outcome(TokenAuthenticator("s3cret"), tmp_path / "a", shape, "tcp", secret)
    assert isinstance(refused, tuple)
    assert refused[0] is grpc.StatusCode.UNAUTHENTICATED
    assert refused[1].startswith("this address needs the job's secret")
    assert "s3cret" not in refused[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_read_of_who_is_refused(shape: str, tmp_path: Path) -> None:
    async def story(local: str, remote: str) -> None:
        async def never() -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

        async with grpc.aio.insecure_channel(remote) as channel:
            messages: Any = never()
            call: Any = channel.stream_stream(f"/echo/{shape}")(messages, timeout=20)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    with_server(TokenAuthenticator("s3cret"), tmp_path / "a", story)


@pytest.mark.parametrize("shape", ["unary_unary", "unary_stream"])
def test_a_call_without_its_message_is_told_so(shape: str, tmp_path: Path) -> None:
    async def story(local: str, remote: str) -> None:
        async def nothing() -> AsyncIterator[bytes]:
            return
            yield b""

        async with grpc.aio.insecure_channel(local) as channel:
            messages: Any = nothing()
            call: Any = channel.stream_stream(f"/echo/{shape}")(messages, timeout=20)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    with_server(TokenAuthenticator("s3cret"), tmp_path / "a", story)


def test_health_needs_no_secret(tmp_path: Path) -> None:
    answers: list[bytes] = []

    async def story(local: str, remote: str) -> None:
        async with grpc.aio.insecure_channel(remote) as channel:
            answers.append(await called(channel, (), "/grpc.health.v1.Health/unary_unary"))
            with pytest.raises(grpc.aio.AioRpcError):
                await called(channel, (), "/grpc.health.v1.Healthy/unary_unary")

    with_server(TokenAuthenticator("s3cret"), tmp_path / "a", story)
    assert answers == [b"hello"]


def test_where_there_is_no_secret_nobody_knows_it(tmp_path: Path) -> None:
    refused = outcome(TokenAuthenticator(), tmp_path / "a", "unary_unary", "tcp", "")
    assert isinstance(refused, tuple) and refused[0] is grpc.StatusCode.UNAUTHENTICATED


def test_insecure_lets_everybody_in(tmp_path: Path) -> None:
    assert outcome(TokenAuthenticator("s3cret", insecure=True), tmp_path / "a", "stream_stream", "tcp", "") == b"hello"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_viewing_token_does_not_open_what_does_more_than_look(shape: str, tmp_path: Path) -> None:
    gate = TokenAuthenticator("s3cret", token="0123456789abcdef")
    for token in (viewing_token("s3cret"), "0123456789abcdef"):
        refused = outcome(gate, tmp_path / "a", shape, "tcp", token)
        assert isinstance(refused, tuple) and refused[0] is grpc.StatusCode.PERMISSION_DENIED
        assert refused[1].startswith("a viewing token is good for looking only") and token not in refused[1]
        assert outcome(gate, tmp_path / "a", shape, "unix", token) == b"hello"
    assert gate.reject_counts == {("grpc", "viewing"): 2}


def test_a_viewing_token_opens_what_looks_and_nothing_else_does(tmp_path: Path) -> None:
    gate = TokenAuthenticator("s3cret")

    async def story(local: str, remote: str) -> None:
        async with grpc.aio.insecure_channel(remote) as channel:
            for method in VIEW_METHODS:
                metadata = client_metadata(remote, viewing_token("s3cret"))
                assert await called(channel, metadata, method) == b"hello"
                for other in ((), client_metadata(remote, "wrong")):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await called(channel, other, method)
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    with_server(gate, tmp_path / "a", story)
    assert gate.reject_counts == {("grpc", "nothing"): len(VIEW_METHODS), ("grpc", "wrong"): len(VIEW_METHODS)}


def test_of_all_calls_only_these_look() -> None:
    services = [
        service
        for file in (coordinator_pb2, worker_pb2, health_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
    ]
    there = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    changing = there - VIEW_METHODS
    assert {"/collectived.v1.Worker/Submit", "/collectived.v1.Coordinator/Attach"} <= changing
    assert {path.rpartition("/")[2] for path in VIEW_METHODS} == {"Status", "Trace"}
    assert {path for path in there if path.endswith("/Status")} <= VIEW_METHODS


def test_an_unknown_method_is_unimplemented(tmp_path: Path) -> None:
    async def story(local: str, remote: str) -> None:
        async with grpc.aio.insecure_channel(local) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await called(channel, (), "/echo/nothing")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    with_server(TokenAuthenticator("s3cret"), tmp_path / "a", story)


def test_client_metadata() -> None:
    assert client_metadata("unix:/run/x", "s3cret") == ()
    assert client_metadata("host:7450", "s3cret") == (("authorization", "Bearer s3cret"),)
    assert client_metadata("host:7450", "") == ()


@pytest.mark.parametrize("address", ["0.0.0.0:7450", "[::]:7450", ":7450", "10.0.0.1:0", "head.example:7450"])
def test_an_address_for_other_hosts_needs_a_secret_or_the_word_that_it_does_not(address: str) -> None:
    with pytest.raises(ValueError, match="can be reached from other hosts, and this job has no secret"):
        check_exposed(["unix:/c.sock", address], "", insecure=False)
    check_exposed([address], "a secret", insecure=False)
    check_exposed([address], "", insecure=True)


def test_addresses_of_this_host_alone_need_none() -> None:
    check_exposed(["unix:/c.sock", "127.0.0.1:0", "[::1]:7450", "localhost:7450", "127.3.2.1:1"], "", insecure=False)
