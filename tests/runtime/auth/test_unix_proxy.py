"""The proxy: who makes a call at a Unix socket is known, and nobody comes in beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from collectived_proto.ipc.job_files import MAX_SOCKET_PATH
from collectived_runtime.auth import unix_proxy as porter_module
from collectived_runtime.auth.peers import AllowedUsers, UnixPeer
from collectived_runtime.auth.unix_proxy import PeerCredentialProxy
from collectived_runtime.process import bind
from collectived_runtime.startup_error import StartupError

Ask = Callable[[Any], Awaitable[bytes]]
PATIENCE = 20.0


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as path:
        yield Path(path)


class Scene:
    """A gRPC server behind a proxy: `who` answers as `ask` does, `echo` with what it was sent, `wait` never."""

    def __init__(
        self,
        path: Path,
        ask: Callable[[PeerCredentialProxy, str], bytes],
        invited: AllowedUsers | None = None,
        most: int = 100,
    ) -> None:
        self.path, self.ask = path, ask
        self.porter = PeerCredentialProxy(invited or AllowedUsers(os.getuid()), most)
        self.server = grpc.aio.server()
        self.waiting, self.hung_up = False, asyncio.Event()

    async def __aenter__(self) -> Scene:
        async def who(request: bytes, context: Any) -> bytes:
            return self.ask(self.porter, context.peer())

        async def echo(requests: Any, context: Any) -> Any:
            async for request in requests:
                yield request

        async def wait(request: bytes, context: Any) -> bytes:
            self.waiting = True
            try:
                await asyncio.Event().wait()
            finally:
                self.hung_up.set()
            return b""

        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "wait": grpc.unary_unary_rpc_method_handler(wait),
            "who": grpc.unary_unary_rpc_method_handler(who),
            "echo": grpc.stream_stream_rpc_method_handler(echo),
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", methods),))
        bind(self.server, f"unix:{self.path}", self.porter)
        await self.server.start()
        await self.porter.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)
        self.porter.close()

    @contextlib.asynccontextmanager
    async def channel(self) -> Any:
        alone = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"unix:{self.path}", options=alone) as channel:
            yield channel


def told(porter: PeerCredentialProxy, name: str) -> bytes:
    found = porter.find_peer(name)
    return b"nobody" if found is None else f"{found[0].pid} {found[0].uid}".encode()


def play(story: Awaitable[None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(story, PATIENCE)

    asyncio.run(limited())


async def until(fact: Callable[[], bool]) -> None:
    while not fact():
        await asyncio.sleep(0)


def test_who_calls_is_known_while_they_are_connected_and_forgotten_then(folder: Path) -> None:
    async def story() -> None:
        async with Scene(folder / "s", told) as scene:
            async with scene.channel() as channel:
                assert await channel.unary_unary("/t/who")(b"") == f"{os.getpid()} {os.getuid()}".encode()
            await until(lambda: not scene.porter._peers_by_name and not scene.porter._clients)

    play(story())


def test_what_is_carried_arrives_whole_in_both_directions(folder: Path) -> None:
    sent = [os.urandom(1 << 20) for _ in range(24)]

    async def story() -> None:
        async with Scene(folder / "s", told) as scene, scene.channel() as channel:
            call = channel.stream_stream("/t/echo")(iter(sent))
            assert [part async for part in call] == sent

    play(story())


def test_the_servers_own_socket_has_no_name_and_its_folder_is_gone(folder: Path) -> None:
    async def story() -> None:
        async with Scene(folder / "s", told):
            assert [entry.name for entry in folder.iterdir()] == ["s"]

    play(story())


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_path_may_be_as_long_as_the_kernel_allows_and_not_longer(folder: Path, beyond: int) -> None:
    path = folder / ("s" * (MAX_SOCKET_PATH - len(str(folder)) - 1 + beyond))

    async def story() -> None:
        async with Scene(path, told) as scene, scene.channel() as channel:
            assert (await channel.unary_unary("/t/who")(b"")).startswith(str(os.getpid()).encode())

    if not beyond:
        play(story())
        return
    with pytest.raises(StartupError, match=f"the path is longer than {MAX_SOCKET_PATH} bytes.*another path"):
        play(story())
    assert not path.parent.joinpath("s").exists()


def test_a_caller_that_says_nothing_is_shown_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(porter_module, "FIRST_BYTE_SECONDS", 0.05)

    async def story() -> None:
        async with Scene(folder / "s", told) as scene:
            reader, writer = await asyncio.open_unix_connection(str(folder / "s"))
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            assert not scene.porter._peers_by_name

    play(story())


def test_the_server_hears_nothing_of_who_only_knocks(folder: Path) -> None:
    async def story() -> None:
        async with Scene(folder / "s", told) as scene:
            for _ in range(20):
                with socket.socket(socket.AF_UNIX) as knocking:
                    knocking.connect(str(folder / "s"))
            async with scene.channel() as channel:
                await channel.unary_unary("/t/who")(b"")
                assert len(scene.porter._peers_by_name) == 1

    play(story())


def test_whoever_hangs_up_ends_their_call(folder: Path) -> None:
    async def story() -> None:
        async with Scene(folder / "s", told) as scene:
            async with scene.channel() as channel:
                await channel.unary_unary("/t/who")(b"")
                call = channel.unary_unary("/t/wait")(b"")
                await until(lambda: scene.waiting)
                guest = next(iter(scene.porter._clients))
                guest.transport.abort()
                with pytest.raises(grpc.aio.AioRpcError):
                    await call
            await scene.hung_up.wait()

    play(story())


def test_a_file_that_a_killed_daemon_left_is_taken_over_and_one_in_use_is_not(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "s"))

    async def story() -> None:
        async with Scene(folder / "s", told):
            assert stat.S_IMODE((folder / "s").stat().st_mode) == 0o600
            with pytest.raises(StartupError, match="in use by another process"):
                async with Scene(folder / "s", told):
                    pass

    play(story())


@pytest.mark.parametrize("with_tokens", [True, False])
def test_where_guests_are_named_others_may_connect_only_if_they_may_bring_a_token(
    folder: Path, with_tokens: bool
) -> None:
    folder.chmod(0o711)

    async def story() -> None:
        async with Scene(folder / "s", told, AllowedUsers(os.getuid(), frozenset({4711}), with_tokens=with_tokens)):
            if with_tokens or "system.posix_acl_access" in os.listxattr(folder / "s"):  # else there are no lists here
                assert stat.S_IMODE((folder / "s").stat().st_mode) == (0o666 if with_tokens else 0o660)

    play(story())


def test_beyond_as_many_connections_as_there_may_be_others_are_closed_as_they_come(folder: Path) -> None:
    async def story() -> None:
        async with Scene(folder / "s", told, most=2) as scene, scene.channel() as channel:
            await channel.unary_unary("/t/who")(b"")
            _, second = await asyncio.open_unix_connection(str(folder / "s"))
            third, writer = await asyncio.open_unix_connection(str(folder / "s"))
            with contextlib.suppress(ConnectionResetError):
                assert await third.read() == b""
            await channel.unary_unary("/t/who")(b"")
            for one in (second, writer):
                one.close()

    play(story())


def test_a_user_who_is_not_trusted_has_an_eighth_of_the_places_at_most(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(0o711)

    async def story() -> None:
        async with Scene(folder / "s", told, AllowedUsers(os.getuid(), frozenset({4711})), most=16) as scene:
            kept = []
            with monkeypatch.context() as patched:
                patched.setattr("collectived_runtime.auth.unix_proxy.get_unix_peer", lambda _: UnixPeer(1, 4712))
                for _ in range(2):
                    kept.append(await asyncio.open_unix_connection(str(folder / "s")))
                third, writer = await asyncio.open_unix_connection(str(folder / "s"))
                with contextlib.suppress(ConnectionResetError):
                    assert await third.read() == b""
            async with scene.channel() as channel:
                await channel.unary_unary("/t/who")(b"")
            for _, one in (*kept, (third, writer)):
                one.close()

    play(story())
