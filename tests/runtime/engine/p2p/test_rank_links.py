"""Connections that workers lend to two ranks, over which these send to each other themselves."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.certificates import Signer
from tests.runtime.engine.conftest import Rank, World, wait_for
from tests.waiting import is_readable

from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.ipc.rank_messages import READY, LinkOffer
from collectived_proto.tls.files import client_context, load_material, server_context
from collectived_proto.types import ANY_SOURCE, Recv, ReportKind, Send
from collectived_runtime.engine.base import arenas
from collectived_runtime.engine.p2p import rank_links
from collectived_runtime.engine.p2p.point_to_point import PointToPoint
from collectived_runtime.engine.run.message import encode_header, encode_rank_link
from collectived_runtime.transport.connections import ConnectionServer
from collectived_runtime.transport.dial import DialRequest
from collectived_runtime.transport.handshake import TlsContexts
from collectived_runtime.transport.hello import LinkHello
from collectived_runtime.transport.link import Link, LinkBroken, TcpStream

spread = pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)
VALUE = np.ones(3, np.float32)


def send(sender: Rank, receiver: Rank, count: int = rank_links.FIRST_SENDS) -> None:
    """Have a rank send over its worker, and the other one get it."""
    for _ in range(count):
        sender.post(Send(receiver.rank), VALUE)
        assert sender.done().is_last
        receiver.release(receiver.delivered().slot)


def connect(sender: Rank, receiver: Rank) -> tuple[socket.socket, socket.socket]:
    """Both ends of the link that two ranks get."""
    for rank in (sender, receiver):
        rank.match()
    send(sender, receiver)
    return sender.offered()[1], receiver.offered()[1]


def read(connection: socket.socket, count: int = 100) -> bytes:
    """What comes next; nothing: its end."""
    assert is_readable(connection, 10.0)
    return connection.recv(count)


def list_descriptors() -> set[tuple[str, str]]:
    """The open sockets and pipes of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:  # that of the listing
            continue
    return {one for one in found if "socket:" in one[1] or "eventfd" in one[1]}


@spread
def test_two_ranks_get_a_link_after_some_messages_and_talk_over_it(
    world: Any, monkeypatch: pytest.MonkeyPatch, hosts: Any
) -> None:
    monkeypatch.setattr(arenas, "UNEXPECTED_MEMORY_DIVISOR", (1 << 30) // 1000)
    here = world(*hosts)
    sender, receiver = here.ranks
    for rank in here.ranks:
        rank.match()
    send(sender, receiver, rank_links.FIRST_SENDS - 1)
    assert not sender.links and not receiver.links
    send(sender, receiver, 1)
    generation, most = here.group.generation, 1000 // hosts[0]
    offer, out = sender.offered()
    assert offer == LinkOffer(generation, 1, True, most)
    offer, into = receiver.offered()
    assert offer == LinkOffer(generation, 0, False, most)
    assert not os.get_blocking(out.fileno()) and not os.get_blocking(into.fileno())
    into.send(READY)
    assert read(out) == READY
    out.send(b"a message")
    assert read(into) == b"a message"
    send(sender, receiver, 3)
    assert not sender.links and not receiver.links, "one link is enough"


@spread
def test_a_rank_that_does_not_match_by_itself_gets_no_link(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    sender, receiver = here.ranks
    for _ in range(4):
        sender.post(Send(1), VALUE)
        sender.done()
        receiver.post(Recv(0))
        receiver.done()
    assert not sender.links and not receiver.links
    assert not here.group_loop_of(0)._generation.point_to_point._rank_links._ends


def test_a_rank_of_the_same_worker_gets_its_end_with_the_next_message_once_it_matches(world: Any) -> None:
    here = world(2)
    sender, receiver = here.ranks
    sender.match()
    for _ in range(rank_links.FIRST_SENDS + 1):
        sender.post(Send(1), VALUE)
        sender.done()
    assert not sender.links
    receiver.match()
    for _ in range(rank_links.FIRST_SENDS + 1):
        receiver.delivered()
    send(sender, receiver, 1)
    assert sender.offered()[0].peer == 1 and receiver.offered()[0].peer == 0


def test_a_rank_of_another_worker_gets_its_end_when_it_matches(world: Any) -> None:
    here = world(1, 1)
    sender, receiver = here.ranks
    sender.match()
    for _ in range(rank_links.FIRST_SENDS):
        sender.post(Send(1), VALUE)
        sender.done()
    out = sender.offered()[1]
    links = here.group_loops[1]._generation.point_to_point._rank_links
    wait_for(lambda: links._unclaimed)
    assert not is_readable(out, 0)
    receiver.match()
    into = receiver.offered()[1]
    into.send(READY)
    assert read(out) == READY


def test_a_rank_has_no_link_to_itself_and_not_too_many_to_others(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_links, "MAX_LINKS", 1)
    here = world(3)
    first, second, third = here.ranks
    for rank in here.ranks:
        rank.match()
    send(first, first)
    send(first, second)
    assert first.offered()[0].peer == 1
    send(first, third)
    send(third, first)
    assert third.offered()[0].peer == 0
    assert [offer.peer for offer, _ in first.links] == [2], "that one comes from there"
    assert not third.links


def serve(folder: Path, contexts: TlsContexts | None = None) -> list[ConnectionServer]:
    return [
        ConnectionServer(task, "secret", str(folder / f"door{task}"), ("127.0.0.1", 0), contexts=contexts)
        for task in range(2)
    ]


@pytest.fixture
def plain_servers(tmp_path: Path) -> Iterator[list[ConnectionServer]]:
    made = serve(tmp_path)
    yield made
    for one in made:
        one.close()


@pytest.fixture
def tls_servers(tmp_path: Path) -> Iterator[list[ConnectionServer]]:
    material = load_material(Signer(tmp_path / "authority").issue("host"))
    both = server_context(material, demand=True), client_context(material)
    made = serve(tmp_path, lambda: both)
    yield made
    for one in made:
        one.close()


def test_ranks_of_two_workers_that_all_begin_at_once_get_all_their_links(
    world: Any, plain_servers: list[ConnectionServer]
) -> None:
    here = world(3, 3, connection_servers=plain_servers)
    for rank in here.ranks:
        rank.match()
    pairs = [(one, other) for one in here.ranks for other in here.ranks if one.rank < 3 <= other.rank]
    for sender, receiver in pairs * rank_links.FIRST_SENDS:
        sender.post(Send(receiver.rank), VALUE)
    for sender, _ in pairs * rank_links.FIRST_SENDS:
        sender.done()
    for _, receiver in pairs * rank_links.FIRST_SENDS:
        receiver.delivered()
    into = {
        (offer.peer, rank.rank): end for rank in here.ranks[3:] for offer, end in [rank.offered() for _ in range(3)]
    }
    out = {(rank.rank, offer.peer): end for rank in here.ranks[:3] for offer, end in [rank.offered() for _ in range(3)]}
    assert into.keys() == out.keys() == {(one.rank, other.rank) for one, other in pairs}
    for pair, end in out.items():
        end.send(str(pair).encode())
        assert read(into[pair]) == str(pair).encode()
    assert sum(one.links_opened["dialled"] for one in plain_servers) == 1 + len(pairs)


# No link, and no fault


class VeiledStream:
    """A stream that is no plain TCP connection, as those over TLS."""

    min_read_bytes = 1

    def __init__(self, stream: TcpStream) -> None:
        self.fileno, self.send, self.recv_into, self.close = (
            stream.fileno,
            stream.send,
            stream.recv_into,
            stream.close,
        )


def intercept(here: Any, change: Callable[[DialRequest], DialRequest | None]) -> list[int]:
    """Change how worker 0 dials rank links; the receivers' workers that it dials."""
    exchange, dialled = here.group_loops[0]._worker.resources.link_provider, list[int]()
    dial = exchange.dial

    def changed(call: DialRequest) -> None:
        if call.hello.channel != rank_links.CHANNEL:
            dial(call)
            return
        dialled.append(call.hello.acceptor)
        if (again := change(call)) is not None:
            dial(again)

    exchange.dial = changed
    return dialled


def veil(call: DialRequest) -> DialRequest:
    def veiled(link: Link) -> None:
        assert isinstance(link.stream, TcpStream)
        call.on_link(Link(link.peer, link.channel, VeiledStream(link.stream)))

    return DialRequest(call.address, call.hello, veiled, call.on_failure)


def refuse(call: DialRequest) -> None:
    call.on_failure(LinkBroken("nobody listens there", call.hello.acceptor))


def hang_up(call: DialRequest) -> DialRequest:
    def ended(link: Link) -> None:
        assert isinstance(link.stream, TcpStream)
        link.stream.shutdown(socket.SHUT_RDWR)
        call.on_link(link)

    return DialRequest(call.address, call.hello, ended, call.on_failure)


@pytest.mark.parametrize(("change", "tries"), [(veil, 1), (refuse, 2), (hang_up, 2)])
def test_where_no_link_can_be_made_messages_go_over_the_workers(world: Any, change: Any, tries: int) -> None:
    here = world(1, 2)
    sender, *receivers = here.ranks
    dialled = intercept(here, change)
    for rank in here.ranks:
        rank.match()
    for _, receiver in itertools.product(range(3), receivers):
        send(sender, receiver)
    assert dialled == [1] * tries
    assert not any(rank.links for rank in here.ranks) and here.reports.empty()
    assert not any(one._generation.point_to_point._rank_links._ends for one in here.group_loops)


def test_messages_between_workers_over_tls_go_over_the_workers(world: Any, tls_servers: list[ConnectionServer]) -> None:
    here = world(1, 1, connection_servers=tls_servers)
    for rank in here.ranks:
        rank.match()
    send(here.ranks[0], here.ranks[1])
    links = here.group_loops[0]._generation.point_to_point._rank_links
    wait_for(lambda: not links._can_lend)
    send(here.ranks[0], here.ranks[1])
    assert not any(rank.links for rank in here.ranks) and here.reports.empty()


def test_where_there_are_no_descriptors_messages_go_over_the_worker(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world(2)
    for rank in here.ranks:
        rank.match()

    def exhausted(*_: Any) -> Any:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(socket, "socketpair", exhausted)
    send(here.ranks[0], here.ranks[1], 4)
    assert not any(rank.links for rank in here.ranks)


KEY, GENERATION = 7, 100
WRONG = {
    "a receiver elsewhere": encode_rank_link(KEY, GENERATION, 0, 2),
    "a sender elsewhere": encode_rank_link(KEY, GENERATION, 2, 1),
    "another group": encode_rank_link(KEY + 1, GENERATION, 0, 1),
    "another generation": encode_rank_link(KEY, GENERATION + 1, 0, 1),
    "another kind": encode_header(KEY, GENERATION, (1, 0, 0), b"", []),
    "no frame": bytes(64),
    "more than a frame": encode_rank_link(KEY, GENERATION, 0, 1) + b"!",
    "a part, and the end": encode_rank_link(KEY, GENERATION, 0, 1)[:-1],
}


@pytest.mark.parametrize("said", WRONG.values(), ids=WRONG.keys())
def test_a_link_that_is_not_for_ranks_of_both_workers_is_closed_and_no_fault(world: Any, said: bytes) -> None:
    here = world(1, 1, 1)
    here.ranks[1].match()
    exchange = here.group_loops[0]._worker.resources.link_provider
    there: list[Link] = []
    call = LinkHello(0, 1, KEY, GENERATION, rank_links.CHANNEL, bytes(16))
    exchange.dial(DialRequest(("127.0.0.1", 1), call, there.append, lambda error: None))
    [link] = there
    link.send([said])
    mine = here.board.connections[-2]
    if len(said) < 64:
        mine.shutdown(socket.SHUT_WR)
    assert read(mine) == b""
    assert here.reports.empty() and not here.ranks[1].links


def test_a_second_link_between_the_same_ranks_is_closed(world: Any) -> None:
    here = world(1, 1)
    out, into = connect(*here.ranks)
    points = here.group_loops[0]._generation.point_to_point._rank_links
    before = set(here.board.connections)
    here.group_loops[0]._poller.call_soon_threadsafe(lambda: (points._to_dial[1].append((0, 1)), points._dial(1)))
    again = here.ranks[0].offered()[1]
    assert read(again) == b"" and len(set(here.board.connections) - before) == 3
    out.send(b"x")
    assert read(into) == b"x"


# The end of links


@spread
@pytest.mark.parametrize("lost", [0, 1])
def test_the_link_of_a_rank_that_is_lost_ends_even_where_its_process_lives(world: Any, hosts: Any, lost: int) -> None:
    here = world(*hosts)
    ends = connect(*here.ranks)
    ends[0].send(b"its last words")
    here.ranks[lost].doorbell.close()
    assert here.report(ReportKind.LOST).rank == lost
    if not lost:
        assert read(ends[1]) == b"its last words"
    assert read(ends[1 - lost]) == b""


@spread
def test_what_a_rank_has_sent_before_it_left_arrives(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    out, into = connect(*here.ranks)
    out.send(b"its last words")
    here.ranks[0].doorbell.send(messages.encode_bare(messages.MessageType.LEAVE))
    out.close()
    here.report(ReportKind.LEFT)
    assert read(into) == b"its last words"
    assert read(into) == b""


def test_a_link_for_a_rank_that_has_gone_is_closed(world: Any) -> None:
    here = world(1, 1)
    sender, receiver = here.ranks
    for rank in here.ranks:
        rank.match()
    receiver.doorbell.close()
    assert here.report(ReportKind.LOST).rank == 1
    for _ in range(rank_links.FIRST_SENDS):
        sender.post(Send(1), VALUE)
        sender.done()
    assert read(sender.offered()[1]) == b""


@spread
def test_workers_keep_no_link_of_a_generation_that_is_over(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    out, into = connect(*here.ranks)
    before = [one._generation.point_to_point._rank_links for one in here.group_loops]
    here.rule(here.verdict(Code.INVALID_ARGUMENT, successor=101))
    wait_for(lambda: all(links._closed and not links._ends for links in before))
    out.close()
    assert read(into) == b""


@spread
def test_no_descriptor_is_left_open(hosts: Any) -> None:
    before = list_descriptors()
    here = World((*hosts, 1))
    ends = connect(here.ranks[0], here.ranks[1])
    here.ranks[2].match()
    for _ in range(rank_links.FIRST_SENDS):  # of this link the receiver takes no end
        here.ranks[0].post(Send(2), VALUE)
        here.ranks[0].done()
    here.ranks[0].offered()
    here.close()
    for end in ends:
        end.close()
    assert list_descriptors() == before


# The worker's view


def is_empty(point_to_point: PointToPoint) -> bool:
    return not point_to_point.ops


def test_the_path_of_a_link_is_watched_while_a_rank_waits_for_what_goes_over_it(world: Any) -> None:
    here = world(1, 1)
    connect(*here.ranks)
    for rank, wanted in ((0, Send(1)), (1, Recv(0)), (1, Recv(ANY_SOURCE))):
        point_to_point = here.group_loops[rank]._generation.point_to_point
        lent = set(point_to_point._rank_links._ends.values())
        assert len(lent) == 1 and not lent & set(point_to_point._list_awaited_links())
        number = here.ranks[rank].post(wanted, VALUE if rank == 0 else None, watched=True)
        wait_for(partial(len, point_to_point.ops))
        assert lent <= set(point_to_point._list_awaited_links())
        assert point_to_point._path_watch.next_deadline < float("inf")
        here.ranks[rank].doorbell.send(messages.Completion(number, 0, True, False).encode())
        wait_for(partial(is_empty, point_to_point))
