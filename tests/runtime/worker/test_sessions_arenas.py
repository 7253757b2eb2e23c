"""Arenas of sessions: granted in the order in which they were asked for, without holding up the worker."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

import pytest

from collectived_proto.ipc import messages
from collectived_runtime.engine.base.memory_budget import MemoryBudget, SessionBudget
from collectived_runtime.worker import arenas
from collectived_runtime.worker.sessions import Client, Session

LARGE = 64 << 20


class Scene:
    """A session with its socket, and the client's end of it."""

    def __init__(self, limit: int = 1 << 30) -> None:
        mine, self.client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.client.setblocking(False)
        self.budget = SessionBudget(MemoryBudget(limit), limit)
        self.session = Session(Client("h", os.getpid(), "", "job"), self.budget, lambda session: None)
        self.session.attach(mine)

    def ask(self, *sizes: int) -> None:
        for size in sizes:
            self.client.send(messages.encode_arena(messages.MessageType.ARENA_REQUEST, 0, size))

    async def hear(self) -> tuple[messages.MessageType, bytes]:
        loop = asyncio.get_running_loop()
        while True:
            data = await asyncio.wait_for(loop.sock_recv(self.client, messages.MAX_MESSAGE), 30)
            if messages.parse_type(data) is not messages.MessageType.PONG:
                return messages.parse_type(data), data


def played(play: Callable[[Scene], Awaitable[None]], **options: int) -> None:
    async def run() -> None:
        scene = Scene(**options)
        try:
            await play(scene)
        finally:
            scene.session.end("the test is over")
            scene.client.close()
            if scene.session.arenas.grant_task is not None:
                await scene.session.arenas.grant_task
            assert scene.budget.used == 0

    asyncio.run(run())


def test_arenas_come_in_the_order_in_which_they_were_asked_for() -> None:
    async def play(scene: Scene) -> None:
        scene.ask(LARGE, 4096, LARGE, 8192)
        sizes = [messages.parse_arena((await scene.hear())[1])[1] for _ in range(4)]
        assert sizes == [LARGE, 4096, LARGE, 8192]

    played(play)


def test_the_event_loop_goes_on_while_a_large_arena_comes_into_being(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(scene: Scene) -> None:
        goes_on = asyncio.Event()
        loop = asyncio.get_running_loop()

        def fallocate(descriptor: int, offset: int, size: int) -> None:  # returns only if the loop turns meanwhile
            loop.call_soon_threadsafe(goes_on.set)
            asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result(30)

        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        scene.ask(arenas.INLINE_COMMIT_BYTES + 1)
        assert (await scene.hear())[0] is messages.MessageType.ARENA

    played(play)


def test_an_ask_beyond_the_limit_is_refused_and_the_next_is_granted() -> None:
    async def play(scene: Scene) -> None:
        scene.ask(LARGE, 4096)
        assert (await scene.hear())[0] is messages.MessageType.REFUSED
        assert (await scene.hear())[0] is messages.MessageType.ARENA

    played(play, limit=1 << 20)


def test_what_is_asked_for_by_a_client_that_goes_is_given_back() -> None:
    async def play(scene: Scene) -> None:
        scene.ask(LARGE, LARGE, LARGE)
        scene.client.shutdown(socket.SHUT_RDWR)
        await asyncio.wait_for(scene.session.ended.wait(), 30)

    played(play)


def test_what_was_dropped_takes_no_memory_though_the_client_keeps_its_descriptor() -> None:
    """Else somebody who asks, keeps, drops and asks again has as much as there is, whatever the limit."""

    async def play(scene: Scene) -> None:
        kept = []
        for _ in range(6):
            scene.ask(LARGE)
            while True:
                await wait_readable(scene.client)
                data, descriptors, _, _ = socket.recv_fds(scene.client, messages.MAX_MESSAGE, 1)
                if descriptors:
                    break
            kept += descriptors
            drop = messages.encode_arena(messages.MessageType.ARENA_DROP, messages.parse_arena(data)[0], 0)
            scene.client.send(drop)
        while scene.budget.used:
            await asyncio.sleep(0)
        assert [os.fstat(one).st_blocks for one in kept] == [0] * 6
        for one in kept:
            os.close(one)

    played(play, limit=LARGE)


def test_what_is_dropped_while_it_is_looked_into_counts_until_then() -> None:
    async def play(scene: Scene) -> None:
        scene.ask(LARGE)
        number = messages.parse_arena((await scene.hear())[1])[0]
        looked_into = scene.session.arenas.resolve_memory(number, 0, LARGE)
        scene.client.send(messages.encode_arena(messages.MessageType.ARENA_DROP, number, 0))
        scene.ask(LARGE)
        assert (await scene.hear())[0] is messages.MessageType.REFUSED
        assert scene.budget.used == LARGE == scene.session.arena_bytes
        del looked_into
        scene.ask(LARGE)
        assert (await scene.hear())[0] is messages.MessageType.ARENA
        assert scene.budget.used == LARGE

    played(play, limit=LARGE)


async def wait_readable(client: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(client.fileno(), ready.set)
    try:
        await asyncio.wait_for(ready.wait(), 30)
    finally:
        loop.remove_reader(client.fileno())


def test_a_client_that_asks_without_end_is_shown_out() -> None:
    async def play(scene: Scene) -> None:
        scene.ask(LARGE)
        for _ in range(10 * arenas.MAX_PENDING_REQUESTS):
            if scene.session.ended.is_set():
                break
            try:
                scene.ask(LARGE)
            except OSError:
                break
            await asyncio.sleep(0)
        await asyncio.wait_for(scene.session.ended.wait(), 30)
        assert "requests for shared memory at once" in scene.session.end_reason

    played(play, limit=1 << 40)
