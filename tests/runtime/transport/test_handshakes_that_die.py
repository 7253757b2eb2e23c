"""Connections that die amid what is said before they are links: whoever owns them lets go, and the thread sleeps.

Two connection servers shake hands through relays, each of which passes so many bytes on and dies then, in every way.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Signer
from tests.waiting import settle

from collectived_proto.tls.files import TlsMaterial, client_context, load_material, server_context
from collectived_runtime.transport.connections import ConnectionServer
from collectived_runtime.transport.dial import DialRequest
from collectived_runtime.transport.frame import encode_bye
from collectived_runtime.transport.hello import NONCE_BYTES, LinkHello
from collectived_runtime.transport.link import Link, LinkBroken

SECRET = "of these tests"
KEY, GENERATION = 7, 100
BYE = encode_bye(KEY, GENERATION)
WATCHED_SECONDS = 0.3
MOST_TURNS = 300  # while dials that have failed are tried again, every 0.1 s
MOST_IDLE_TURNS = 20
GIVE_UP_SECONDS = 1.0
KEPT_SECONDS = 0.2
WHOLE = 1 << 30


class CountedPoll:
    """What a connection server waits with; counts how often it has waited."""

    def __init__(self, poll: select.epoll) -> None:
        self._poll = poll
        self.turns = 0

    def poll(self, timeout: float | None) -> Any:
        self.turns += 1
        return self._poll.poll(timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poll, name)


class Relay(threading.Thread):
    """One connection from the dialling side to the accepting one, of which `most` bytes are passed on."""

    def __init__(self, port: int, most: int, die: Callable[[socket.socket], None]) -> None:
        super().__init__()
        self.sizes: list[int] = []  # of what was said, in order
        self.is_dead = threading.Event()
        self._port, self._left, self._die = port, most, die
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.sockets: list[socket.socket] = []
        self.start()

    def run(self) -> None:
        self._listener.settimeout(10)
        self.sockets = [self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._port))]
        while self._left:
            for source in select.select(self.sockets, [], [])[0]:
                data = source.recv(min(1 << 16, self._left))
                other = self.sockets[self.sockets[0] is source]
                if not data:
                    self._left = 0
                    break
                self._left -= len(data)
                self.sizes.append(len(data))
                other.sendall(data)
        self._listener.close()  # who dials again finds nobody
        for one in self.sockets:
            with contextlib.suppress(OSError):
                self._die(one)
        self.is_dead.set()

    def close(self) -> None:
        self.join()
        for one in self.sockets:
            one.close()


def close(sock: socket.socket) -> None:
    sock.close()


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def say_no_more(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


def say_nonsense(sock: socket.socket) -> None:
    sock.sendall(bytes(range(256)) * 64)


def fall_silent(sock: socket.socket) -> None: ...


class Workers:
    """Two connection servers, of workers 0 and 1, of which 0 dials."""

    def __init__(self, material: TlsMaterial | None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
        contexts = None
        if material is not None:
            both = server_context(material, demand=True), client_context(material)
            contexts = lambda: both  # noqa: E731
        self.servers = [
            ConnectionServer(task, SECRET, str(self.folder / f"door-{task}"), ("127.0.0.1", 0), contexts=contexts)
            for task in range(2)
        ]
        self.polls = [CountedPoll(server._poll) for server in self.servers]
        for server, poll in zip(self.servers, self.polls, strict=True):
            server._poll = poll  # type: ignore[assignment]
            server.set_secret(SECRET)  # wakes nobody; the next turn waits with it
        self.relays: list[Relay] = []
        self.ends: Counter[int] = Counter()  # of dials, by channel
        self.links: list[Link] = []
        self._lock = threading.Lock()

    def shake(self, channel: int, most: int, die: Callable[[socket.socket], None]) -> Relay:
        """A link, which is given back on both sides, and another one over the same connection, as far as it comes."""
        relay = Relay(self.servers[1].link_port, most, die)
        self.relays.append(relay)

        def accept(link: Link) -> None:
            self.servers[1].expect_links([(KEY, GENERATION, 0, channel)], self._keep)
            self._give_back(1, link)

        def dialled(link: Link) -> None:
            self._give_back(0, link)
            # When it is kept: until the other side has said goodbye, too, another one would be dialled.
            self._dial(channel, relay, lambda link: self._end(channel, link), KEPT_SECONDS)

        self.servers[1].expect_links([(KEY, GENERATION, 0, channel)], accept)
        self._dial(channel, relay, dialled)
        return relay

    def _dial(self, channel: int, relay: Relay, on_link: Callable[[Link], None], after: float = 0.0) -> None:
        hello = LinkHello(0, 1, KEY, GENERATION, channel, os.urandom(NONCE_BYTES))
        request = DialRequest(("127.0.0.1", relay.port), hello, on_link, lambda _: self._end(channel))
        request.not_before = time.monotonic() + after
        request.deadline = request.not_before + GIVE_UP_SECONDS
        request.incarnation = str(channel)  # with which a connection that was kept will do
        self.servers[0].dial(request)

    def _give_back(self, task: int, link: Link) -> None:
        """As a group loop does whose generation is over."""
        try:
            link.send([BYE])
        except LinkBroken:
            link.close()
        else:
            self.servers[task].release_link(link, BYE)

    def _keep(self, link: Link) -> None:
        with self._lock:
            self.links.append(link)

    def _end(self, channel: int, link: Link | None = None) -> None:
        if link is not None:
            self._keep(link)
        with self._lock:
            self.ends[channel] += 1

    def count_turns(self) -> int:
        before = sum(poll.turns for poll in self.polls)
        time.sleep(WATCHED_SECONDS)
        return sum(poll.turns for poll in self.polls) - before

    def close(self) -> None:
        for server in self.servers:
            server.close()
        for relay in self.relays:
            relay.close()
        for link in self.links:
            link.close()
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> TlsMaterial:
    return load_material(Signer(tmp_path_factory.mktemp("certificates")).issue("host"))


@pytest.fixture(params=["plain", "tls"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    made = Workers(request.getfixturevalue("material") if request.param == "tls" else None)
    yield made
    made.close()


def find_cuts(workers: Workers) -> list[int]:
    """After how many bytes a handshake is cut: amid everything that is said, and between."""
    relay = workers.shake(0, WHOLE, close)
    settle(lambda: workers.ends[0] == 1 and len(workers.links) == 2, 5)
    at, cuts = 0, []
    for size in relay.sizes:
        cuts += [at + 1, at + size // 2, at + size]
        at += size
    for link in workers.links:
        link.close()
    workers.links.clear()
    return sorted(set(cuts[:-1]))


def test_connections_that_die_amid_their_handshake_do_not_keep_their_thread_awake(workers: Workers) -> None:
    deaths = [(cut, die) for cut in find_cuts(workers) for die in (close, reset, say_no_more, say_nonsense)]
    assert len(deaths) > 40
    relays = [workers.shake(channel, *death) for channel, death in enumerate(deaths, 1)]
    assert all(relay.is_dead.wait(10) for relay in relays)
    assert workers.count_turns() <= MOST_TURNS
    settle(lambda: len(workers.ends) == 1 + len(deaths))
    assert set(workers.ends.values()) == {1}, "whoever asked for a link has been told once"
    settle(lambda: not any(len(server._handshakes) for server in workers.servers))
    assert workers.count_turns() <= MOST_IDLE_TURNS


def test_connections_that_fall_silent_amid_their_handshake_do_not_either(workers: Workers) -> None:
    cuts = find_cuts(workers)
    relays = [workers.shake(channel, cut, fall_silent) for channel, cut in enumerate(cuts, 1)]
    assert all(relay.is_dead.wait(10) for relay in relays)
    settle(lambda: len(workers.ends) == 1 + len(cuts))
    assert set(workers.ends.values()) == {1}
    assert workers.count_turns() <= MOST_IDLE_TURNS, "those that came in are waited for"
