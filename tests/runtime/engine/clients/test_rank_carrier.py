"""A rank's carrier as its worker sees it: its answers are checked, and its socket may end or fill."""

from __future__ import annotations

import array
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.transport.test_link_streams import tcp_pair

from collectived_proto.ipc import carrier_orders as orders
from collectived_proto.ipc.carrier_orders import AnswerKind
from collectived_runtime.engine.base.poller import Poller
from collectived_runtime.engine.clients.rank_carrier import RankCarrier, connect_carrier
from collectived_runtime.transport.link import Link

_ANSWER = struct.Struct("<BxxxIixxxxQ64s")


class Rank:
    """The rank's end, and the worker's."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.poller = Poller()
        ours, self.socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.carrier = RankCarrier(ours, self.poller, self.faults.append)

    def answer(self, kind: int, number: int) -> None:
        self.socket.send(_ANSWER.pack(kind, 0, 0, number, bytes(64)))

    def look(self) -> None:
        self.poller.wait(0.0)

    def close(self) -> None:
        self.socket.close()
        self.carrier.close()
        self.poller.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.close()


def test_an_order_is_done_when_it_is_answered(rank: Rank) -> None:
    order = rank.carrier.begin(5, orders.encode_stage(5))
    assert rank.socket.recv(100) == orders.encode_stage(5) and not order.done
    rank.answer(AnswerKind.STAGED, 5)
    rank.look()
    assert order.done and order.answer is not None and order.answer.kind is AnswerKind.STAGED
    assert not rank.faults


@pytest.mark.parametrize("kind, number", [(AnswerKind.DONE, 6), (AnswerKind.PONG, 1), (0, 5), (9, 5)])
def test_answers_that_were_not_asked_for_end_the_rank(rank: Rank, kind: int, number: int) -> None:
    order = rank.carrier.begin(5, orders.encode_stage(5))
    rank.answer(kind, number)
    rank.look()
    assert not order.done and len(rank.faults) == 1 and "malformed" in rank.faults[0]


def test_a_second_answer_ends_the_rank(rank: Rank) -> None:
    rank.carrier.begin(5, orders.encode_stage(5))
    for _ in range(2):
        rank.answer(AnswerKind.STAGED, 5)
        rank.look()
    assert len(rank.faults) == 1


@given(st.binary(max_size=200))
def test_no_bytes_raise(data: bytes) -> None:
    with ExitStack() as stack:
        rank = Rank()
        stack.callback(rank.close)
        rank.carrier.begin(5, orders.encode_stage(5))
        rank.socket.send(data)
        rank.look()
        assert len(rank.faults) <= 1


def test_it_is_known_whether_it_answers(rank: Rank) -> None:
    carrier = rank.carrier
    carrier.ask()
    assert carrier.is_answering
    carrier.ask()
    assert not carrier.is_answering
    rank.answer(AnswerKind.PONG, 1)
    rank.look()
    carrier.ask()
    assert carrier.is_answering and not rank.faults


def test_the_end_of_its_socket_is_an_answer(rank: Rank) -> None:
    """If its process is over, the doorbell says so."""
    order = rank.carrier.begin(5, orders.encode_stage(5))
    rank.socket.close()
    rank.look()
    rank.carrier.ask()
    assert order.answer is not None and order.answer.kind is AnswerKind.REFUSED and not rank.faults


def test_orders_wait_for_room(rank: Rank) -> None:
    """The process may be stopped, and go on."""
    sent = [bytes([number]) * 50_000 for number in range(40)]
    for message in sent:
        rank.carrier.begin(5, message)
    found: list[bytes] = []
    while len(found) < len(sent):
        found.append(rank.socket.recv(60_000))
        rank.look()
    assert found == sent and not rank.faults


def test_many_bytes_that_were_read_go_in_several_packets(rank: Rank) -> None:
    one, other = tcp_pair()
    link = Link(3, 0, one)
    unread = bytes(range(256)) * 1000
    rank.carrier.lend(1, link, unread)
    found = b""
    while len(found) < len(unread):
        rank.look()
        data = rank.socket.recv(60_000)
        assert data[:8] == orders.encode_link(1, b"")[:8] and int.from_bytes(data[8:16], "little") == len(data) - 16
        found += data[16:]
    assert found == unread
    for stream in (one, other):
        stream.close()


def test_a_link_is_sent_once_and_bytes_that_were_read_each_time(rank: Rank) -> None:
    one, other = tcp_pair()
    link = Link(3, 0, one)
    for unread in (b"", b"abc", b""):
        rank.carrier.lend(1, link, unread)
    found = []
    for _ in range(2):  # the link, and the bytes
        data, ancillary, _, _ = rank.socket.recvmsg(100, 100)
        found.append(data)
        for _, _, content in ancillary:
            [descriptor] = array.array("i", content)
            with socket.socket(fileno=descriptor) as lent:
                lent.send(b"here")
    assert found == [orders.encode_link(1, b""), orders.encode_link(1, b"abc")]
    room = bytearray(4)
    while not other.recv_into(memoryview(room)):
        pass
    assert room == b"here"
    with pytest.raises(BlockingIOError):
        rank.socket.recv(100, socket.MSG_DONTWAIT)
    for stream in (one, other):
        stream.close()


def test_there_is_none_where_the_socket_cannot_be_sent() -> None:
    def refuse(_: socket.socket) -> None:
        raise OSError("no descriptors")

    poller = Poller()
    assert connect_carrier(poller, refuse, lambda why: None) is None
    taken: list[int] = []
    carrier = connect_carrier(poller, lambda theirs: taken.append(theirs.fileno()), lambda why: None)
    assert carrier is not None and taken
    carrier.close()
    poller.close()
