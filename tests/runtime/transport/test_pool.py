"""Kept connections: a link whose generation is over serves the next one, or somebody dials; nothing else happens."""

from __future__ import annotations

import os
import queue
import select
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Signer

from collectived_proto.tls.files import TlsMaterial, client_context, load_material, server_context
from collectived_runtime.limits.descriptors import RESERVED_DESCRIPTORS, can_open_descriptor
from collectived_runtime.transport import connections as reception_
from collectived_runtime.transport import pool as kept_
from collectived_runtime.transport.connections import ConnectionServer
from collectived_runtime.transport.dial import DialRequest
from collectived_runtime.transport.frame import encode_bye
from collectived_runtime.transport.handshake import TlsContexts
from collectived_runtime.transport.hello import ANSWER_BYTES, NONCE_BYTES, LinkHello, proof
from collectived_runtime.transport.link import Link

SECRET = "of these tests"
KEY, CHANNEL = 7, 3


def contexts_of(material: TlsMaterial) -> TlsContexts:
    both = server_context(material, demand=True), client_context(material)
    return lambda: both


class Pair:
    """Two connection servers, as of workers 0 and 1; worker 0 dials."""

    def __init__(self, contexts: TlsContexts | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
        self.workers = [
            ConnectionServer(task, SECRET, str(self.folder / f"door-{task}"), ("127.0.0.1", 0), contexts=contexts)
            for task in (0, 1)
        ]
        self.arrived: queue.Queue[Any] = queue.Queue()
        self.links: list[Link] = []
        self.generation = 100

    def next(self, incarnation: str = "one") -> tuple[Link, Link]:
        """A link of the next generation, as both sides have it."""
        self.generation += 1
        self.dial(incarnation)
        accepted: queue.Queue[Link] = queue.Queue()
        self.workers[1].expect_links([(KEY, self.generation, 0, CHANNEL)], accepted.put)
        mine = self.arrived.get(timeout=10)
        assert isinstance(mine, Link), mine
        self.links += [mine, accepted.get(timeout=10)]
        return mine, self.links[-1]

    def dial(self, incarnation: str = "one", port: int = 0) -> None:
        hello = LinkHello(0, 1, KEY, self.generation, CHANNEL, os.urandom(NONCE_BYTES))
        address = ("127.0.0.1", port or self.workers[1].link_port)
        call = DialRequest(
            address, hello, self.arrived.put, lambda error: self.arrived.put(str(error)), incarnation=incarnation
        )
        self.workers[0].dial(call)

    @property
    def farewell(self) -> bytes:
        return encode_bye(KEY, self.generation, keeps=True)

    def part(self, *links: Link) -> None:
        """As a generation that ends does it."""
        sides = self.workers if links[0].peer else self.workers[::-1]
        for link, worker in zip(links, sides, strict=False):
            assert link.send([self.farewell]) == len(self.farewell)
            worker.release_link(link, self.farewell)

    def rested(self, *, free: int = 1) -> None:
        """Returns when so many connections may be taken again."""
        settle(lambda: len(self.workers[0]._pool._reusable) == free)

    @property
    def opened(self) -> list[tuple[int, ...]]:
        return [tuple(worker.links_opened.values()) for worker in self.workers]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for link in self.links:
            link.close()
        self.folder.rmdir()


def settle(fact: Callable[[], bool]) -> None:
    while not fact():
        select.select([], [], [], 0.001)


def carries(mine: Link, theirs: Link) -> bool:
    for sender, receiver in ((mine, theirs), (theirs, mine)):
        said, heard = os.urandom(64), bytearray(64)
        sender.send([said])
        got = 0
        while got < 64:
            select.select([receiver.stream], [], [], 5)
            got += receiver.recv_into(memoryview(heard)[got:])
        if heard != said:
            return False
    return True


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer(tmp_path_factory.mktemp("authority"))


@pytest.fixture(params=["tcp", "tls"])
def pair(request: pytest.FixtureRequest, signer: Signer) -> Iterator[Pair]:
    made = Pair(contexts_of(load_material(signer.issue("host"))) if request.param == "tls" else None)
    yield made
    made.close()


@pytest.fixture
def plain() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_one_connection_serves_generation_after_generation(pair: Pair) -> None:
    for _ in range(5):
        links = pair.next()
        assert carries(*links)
        pair.part(*links)
        pair.rested()
    assert pair.opened == [(1, 0, 4), (0, 1, 4)]


def test_who_parts_first_does_not_matter(pair: Pair) -> None:
    for order in (1, -1):
        links = pair.next()
        pair.part(*links[::order])
        pair.rested()
    assert carries(*pair.next())
    assert pair.opened == [(1, 0, 2), (0, 1, 2)]


def test_what_only_one_side_keeps_is_dialled_anew(pair: Pair) -> None:
    mine, theirs = pair.next()
    pair.part(mine)
    theirs.close()
    assert carries(*pair.next())
    mine, theirs = pair.links[-2:]
    pair.part(theirs)
    mine.close()
    assert carries(*pair.next())
    assert pair.opened == [(3, 0, 0), (0, 3, 0)]


def test_a_farewell_that_has_not_come_yet_is_not_waited_for(pair: Pair) -> None:
    mine, theirs = pair.next()
    pair.part(mine)
    farewell = pair.farewell
    assert carries(*pair.next())
    theirs.send([farewell])
    pair.workers[1].release_link(theirs, farewell)
    pair.rested()
    assert pair.opened == [(2, 0, 0), (0, 2, 0)]


@pytest.mark.parametrize("side", [0, 1])
def test_bytes_that_nobody_has_taken_end_the_connection_and_reach_nobody(pair: Pair, side: int) -> None:
    links = pair.next()
    links[side].send([b"of the generation before"])
    pair.part(*links)
    settle(lambda: not len(pair.workers[1 - side]._handshakes))
    following = pair.next()
    assert carries(*following)
    assert pair.opened == [(2, 0, 0), (0, 2, 0)]


def test_another_incarnation_of_the_peer_is_dialled(pair: Pair) -> None:
    pair.part(*pair.next("one"))
    pair.rested()
    assert carries(*pair.next("another"))
    assert pair.opened[0] == (2, 0, 0)


def test_who_wants_a_connection_of_its_own_gets_one(pair: Pair) -> None:
    pair.part(*pair.next())
    pair.rested()
    assert carries(*pair.next(incarnation=""))
    assert pair.opened[0] == (2, 0, 0)


def test_a_kept_connection_that_dies_is_forgotten(plain: Pair) -> None:
    pair = plain
    pair.part(*pair.next())
    pair.rested()
    settle(lambda: bool(pair.workers[1]._pool.idle))
    guest = next(iter(pair.workers[1]._pool.idle.values()))
    guest.connection.shutdown(socket.SHUT_RDWR)
    pair.rested(free=0)
    assert carries(*pair.next())
    assert pair.opened[0] == (2, 0, 0)


def test_there_are_only_so_many_and_the_oldest_goes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_, "MAX_POOLED", 2)
    generations = [(pair.next(incarnation=str(number)), pair.farewell) for number in range(3)]
    for links, farewell in generations:
        for link, worker in zip(links, pair.workers, strict=True):
            link.send([farewell])
            worker.release_link(link, farewell)
    settle(lambda: sorted(whom.incarnation for whom in pair.workers[0]._pool._reusable.values()) == ["1", "2"])
    settle(lambda: [len(worker._pool.idle) for worker in pair.workers] == [2, 2])


def test_where_descriptors_have_run_out_since_a_link_was_made_it_is_not_kept(pair: Pair) -> None:
    mine, theirs = pair.next()
    assert mine.origin and theirs.origin
    made = max(link.origin.connection.fileno() for link in (mine, theirs) if link.origin)
    with ExitStack() as held:
        given = made
        while given < made + 40:  # what others have been given since
            given = os.dup(0)
            held.callback(os.close, given)
        room = made + 20
        pair.workers[0]._pool._descriptors = room + min(RESERVED_DESCRIPTORS, room // 3)
        assert not can_open_descriptor(pair.workers[0]._pool._descriptors)
        pair.part(mine, theirs)
        settle(lambda: mine.origin is None or mine.origin.connection.fileno() == -1)
        assert not pair.workers[0]._pool.idle


def test_one_on_which_a_hello_is_said_again_is_not_the_one_that_goes(
    plain: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its dialler may have handed it on."""
    monkeypatch.setattr(kept_, "MAX_POOLED", 1)
    worker = plain.workers[1]
    hellos = [LinkHello(0, 1, KEY, number, CHANNEL, os.urandom(NONCE_BYTES)).encode() for number in (100, 101, 102)]
    for number in (100, 101, 102):
        worker.expect_links([(KEY, number, 0, CHANNEL)], plain.arrived.put)
    port = ("127.0.0.1", worker.link_port)
    with socket.create_connection(port, 10) as first, socket.create_connection(port, 10) as second:

        def answered(dialler: socket.socket) -> bytes:
            return dialler.recv(ANSWER_BYTES, socket.MSG_WAITALL)[:NONCE_BYTES]

        def proved(dialler: socket.socket, said: bytes, nonce: bytes) -> Link:
            dialler.sendall(proof(SECRET, "dial", said, nonce))
            plain.links.append(plain.arrived.get(timeout=10))
            return plain.links[-1]

        links = []
        for dialler, hello in ((first, hellos[0]), (second, hellos[1])):
            dialler.sendall(hello)
            links.append(proved(dialler, hello, answered(dialler)))
        first.sendall(plain.farewell + hellos[2])
        links[0].send([plain.farewell])
        worker.release_link(links[0], plain.farewell)
        assert first.recv(64, socket.MSG_WAITALL) == plain.farewell
        nonce = answered(first)
        worker.release_link(links[1], encode_bye(KEY, 101, keeps=True))
        settle(lambda: len(worker._pool.idle) == 1)
        assert proved(first, hellos[2], nonce).peer == 0


def test_they_rest_for_so_long_only(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.part(*pair.next())
    pair.rested()
    ends = pair.workers[0]._pool.deadlines
    assert 0 < ends[0] - time.monotonic() < kept_.MAX_IDLE_SECONDS == 60
    pair.workers[0]._call_soon_threadsafe(lambda: pair.workers[0]._pool.close_expired(ends[0]))
    pair.rested(free=0)
    assert carries(*pair.next())
    assert pair.opened[0] == (2, 0, 0)


def test_a_hello_that_comes_together_with_the_farewell_is_heard(plain: Pair) -> None:
    worker = plain.workers[1]
    hellos = [LinkHello(0, 1, KEY, number, CHANNEL, os.urandom(NONCE_BYTES)).encode() for number in (100, 101)]
    for number in (100, 101):
        worker.expect_links([(KEY, number, 0, CHANNEL)], plain.arrived.put)
    with socket.create_connection(("127.0.0.1", worker.link_port), 10) as dialler:

        def proved(said: bytes) -> Link:
            nonce = dialler.recv(ANSWER_BYTES, socket.MSG_WAITALL)[:NONCE_BYTES]
            dialler.sendall(proof(SECRET, "dial", said, nonce))
            plain.links.append(plain.arrived.get(timeout=10))
            return plain.links[-1]

        dialler.sendall(hellos[0])
        link = proved(hellos[0])
        dialler.sendall(plain.farewell + hellos[1])
        settle(lambda: link.read_header() is not None)
        assert link.unread_bytes == plain.farewell + hellos[1], "both have been read before it is given back"
        link.send([plain.farewell])
        worker.release_link(link, plain.farewell)
        assert dialler.recv(64, socket.MSG_WAITALL) == plain.farewell
        assert proved(hellos[1]).peer == 0
    assert plain.opened[1] == (0, 1, 1)


def test_a_kept_connection_opens_nothing_for_whom_the_secret_is_not_known(plain: Pair) -> None:
    plain.part(*plain.next())
    plain.rested()
    plain.workers[0].set_secret("of another job")
    plain.dial()
    assert "secret" in plain.arrived.get(timeout=10)
    assert plain.opened == [(1, 0, 0), (0, 1, 0)]


def test_a_peer_that_does_not_answer_there_is_dialled(plain: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stands behind it may have gone without a word."""
    monkeypatch.setattr(reception_, "REUSE_ANSWER_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answered() -> socket.socket:
            guest, _ = listener.accept()
            guest.settimeout(10)
            said = guest.recv(52, socket.MSG_WAITALL)
            guest.sendall(bytes(NONCE_BYTES) + proof(SECRET, "accept", said, bytes(NONCE_BYTES)))
            return guest

        plain.dial(port=port)
        with answered() as silent:
            link = plain.arrived.get(timeout=10)
            plain.part(link)
            silent.sendall(plain.farewell)
            plain.rested()
            plain.generation += 1
            plain.dial(port=port)
            with answered():
                plain.links.append(plain.arrived.get(timeout=10))
    assert plain.opened[0] == (2, 0, 0)


@pytest.mark.parametrize("side", [0, 1])
def test_new_certificates_end_what_was_made_with_the_former_ones(signer: Signer, side: int) -> None:
    material = load_material(signer.issue("host"))
    contexts = contexts_of(material)
    pair = Pair(lambda: contexts())
    try:
        pair.part(*pair.next())
        pair.rested()
        renewed = contexts_of(material)
        pair.workers[side]._pool._contexts = renewed
        assert carries(*pair.next())
        assert pair.opened[0] == (2, 0, 0)
    finally:
        pair.close()


def test_links_that_come_back_when_the_reception_has_closed_are_closed(plain: Pair) -> None:
    mine, theirs = plain.next()
    plain.workers[0].close()
    plain.workers[0].release_link(mine, plain.farewell)
    assert mine.stream.fileno() == -1
    assert theirs.origin is not None


@pytest.mark.parametrize("said_farewell", [True, False], ids=["kept", "handed back"])
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_kept_connection_whose_other_end_dies_is_closed_and_wakes_nobody_again(
    plain: Pair, how: str, said_farewell: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = plain.next()
    plain.part(mine)
    if said_farewell:
        theirs.send([plain.farewell])
        plain.rested()
    settle(lambda: len(plain.workers[0]._pool.idle) == 1)
    assert theirs.origin is not None
    if how == "reset":
        theirs.origin.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    settle(lambda: not plain.workers[0]._pool.idle)
    turns: list[float] = []
    begin_turn = plain.workers[0]._start_due_dials

    def counted() -> None:
        turns.append(0.0)
        begin_turn()

    monkeypatch.setattr(plain.workers[0], "_start_due_dials", counted)
    select.select([], [], [], 0.2)
    assert len(turns) < 10 and not plain.workers[0]._handshakes
