"""Rank links with real sockets: both ends in this process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import settle

from collectived.shared.rank_links import RankLinks
from collectived_proto.ipc.rank_messages import HEADER_BYTES, READY, Header

PEER = 3


class Recorder:
    """Keeps what comes."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, int, bytes, bytes]] = []  # source, tag, description, value
        self.sent: list[object] = []
        self.broken: list[tuple[int, str]] = []
        self.delivered = 0  # messages that came by the worker
        self.looks = 0
        self.readers: set[int] = set()  # threads
        self._open: dict[int, tuple[Header, bytes, bytearray]] = {}
        self.expected = b""  # a whole message
        self.taken = 0  # of those

    def take_expected(self, source: int, memory: bytearray, begin: int, end: int) -> int:
        if not self.expected or not memory.startswith(self.expected[:HEADER_BYTES], begin):
            return 0
        if memory[begin:end].startswith(self.expected):
            self.taken += 1
        return len(self.expected)

    def may_read(self, source: int, header: Header) -> bool:
        return self.delivered >= header.before

    def begin(self, source: int, header: Header, description: bytes) -> tuple[object, list[memoryview]]:
        memory = bytearray(header.nbytes)
        message = header, description, memory
        half = header.nbytes // 2
        return message, [memoryview(memory)[:half], memoryview(memory)[half:]]

    def finish(self, source: int, taker: object) -> None:
        assert isinstance(taker, tuple)
        header, description, memory = taker
        self.readers.add(threading.get_ident())
        self.messages.append((source, header.tag, description, bytes(memory)))

    def on_sent(self, sender: object) -> None:
        self.sent.append(sender)

    def on_advanced(self) -> None:
        pass

    def on_broken(self, peer: int, why: str, is_outgoing: bool) -> None:
        self.broken.append((peer, why))

    def on_failure(self, error: BaseException) -> None:
        raise AssertionError from error

    def look(self) -> bool:
        self.looks += 1
        return False


class End:
    """The links of one rank, with a doorbell that says nothing."""

    def __init__(self) -> None:
        self.user = Recorder()
        self.doorbell, self.worker = socket.socketpair()
        self.rung = 0
        self.mutex = threading.Lock()
        self.links = RankLinks(self.mutex, self.user, self.doorbell.fileno(), self._ring)

    def _ring(self) -> None:
        self.rung += len(self.doorbell.recv(100))

    def add(self, sock: socket.socket, *, is_outgoing: bool) -> None:
        with self.mutex:
            self.links.add(sock.detach(), PEER, is_outgoing=is_outgoing)

    def wait(self, condition: Callable[[], object]) -> None:
        """Read the links as a call does, until that is so."""
        settle(lambda: self.links.turns.lead(lambda: self.links.wait(0.01, None)) and condition())

    def close(self) -> None:
        self.links.close()
        self.doorbell.close()
        self.worker.close()


@pytest.fixture
def end() -> Iterator[End]:
    made = End()
    yield made
    made.close()


def connect() -> tuple[socket.socket, socket.socket]:
    near, far = socket.socketpair()
    far.settimeout(10)
    return near, far


def encode(value: bytes, tag: int = 5, description: bytes = b"described", before: int = 0) -> bytes:
    return Header(tag, len(description), len(value), before).encode() + description + value


@pytest.mark.parametrize("size", [1, 7, 31, 32, 33, 41, 1000, 1 << 20])
def test_messages_arrive_whole_however_they_are_cut(end: End, size: int) -> None:
    near, far = connect()
    end.add(near, is_outgoing=False)
    assert far.recv(1) == READY
    values = [b"", b"x", os.urandom(1000), os.urandom(200_000), b"", os.urandom(63)]
    stream = b"".join(encode(value, tag) for tag, value in enumerate(values))

    def write() -> None:
        for at in range(0, len(stream), max(size, len(stream) // 500)):
            far.sendall(stream[at : at + max(size, len(stream) // 500)])

    writing = threading.Thread(target=write)
    writing.start()
    end.wait(lambda: len(end.user.messages) == len(values))
    writing.join()
    assert end.user.messages == [(PEER, tag, b"described", value) for tag, value in enumerate(values)]
    far.close()


@pytest.mark.parametrize("cut", range(1, 48))
def test_a_short_message_may_be_cut_anywhere(end: End, cut: int) -> None:
    near, far = connect()
    end.add(near, is_outgoing=False)
    whole = encode(b"value") * 2
    far.sendall(whole[:cut])
    end.wait(lambda: True)
    far.sendall(whole[cut:])
    end.wait(lambda: len(end.user.messages) == 2)
    assert [message[3] for message in end.user.messages] == [b"value"] * 2
    far.close()


@pytest.mark.parametrize("nbytes", [1, 1000, 70_000, 200_000])
@pytest.mark.parametrize("cut", [1, 31, 32, 40, 42, 65_535, 65_536, 65_537])
def test_a_message_that_is_expected_is_taken_once_all_of_it_is_there(end: End, nbytes: int, cut: int) -> None:
    near, far = connect()
    end.add(near, is_outgoing=False)
    whole = end.user.expected = encode(os.urandom(nbytes))
    other = encode(b"other", tag=6)
    stream = other + whole + whole + other

    def write() -> None:
        far.sendall(stream[: len(other) + cut])
        far.sendall(stream[len(other) + cut :])

    writing = threading.Thread(target=write)
    writing.start()
    end.wait(lambda: len(end.user.messages) == 2)
    writing.join()
    assert end.user.taken == 2
    assert end.user.messages == [(PEER, 6, b"described", b"other")] * 2
    far.close()


def test_a_part_of_a_message_that_was_expected_is_read_by_others(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=False)
    value = os.urandom(100_000)
    whole = end.user.expected = encode(value)
    far.sendall(whole[:70_000])
    end.wait(lambda: end.links._incoming[PEER]._end == 70_000)
    end.user.expected = b""  # who waited for it has gone
    far.sendall(whole[70_000:])
    end.wait(lambda: end.user.messages)
    assert end.user.messages == [(PEER, 5, b"described", value)] and not end.user.taken
    far.close()


def test_a_long_description_is_read_whole(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=False)
    description = os.urandom(300_000)
    writing = threading.Thread(target=far.sendall, args=(encode(b"v", 1, description) * 2,))
    writing.start()
    end.wait(lambda: len(end.user.messages) == 2)
    writing.join()
    assert end.user.messages == [(PEER, 1, description, b"v")] * 2
    far.close()


def test_a_link_is_ready_when_its_receiver_has_taken_it(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=True)
    assert end.links.find_ready(PEER) is None
    far.sendall(READY)
    settle(lambda: end.links.find_ready(PEER))
    far.close()


def test_a_link_that_is_refused_is_no_fault(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=True)
    far.close()
    settle(lambda: end.links.outgoing[PEER].is_over)
    assert end.links.find_ready(PEER) is None
    assert not end.user.broken


def test_a_sender_goes_on_when_there_is_room_again(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=True)
    far.sendall(READY)
    settle(lambda: end.links.find_ready(PEER))
    link = end.links.outgoing[PEER]
    value = os.urandom(8 << 20)
    assert not end.links.send(link, [encode(b"")[:32], b"described", value], "first")
    assert not end.links.send(link, [b"second"], "second")  # in order, though there may be room for it
    read = bytearray()
    while len(read) < 32 + 9 + len(value) + 6:
        read += far.recv(1 << 20)
        end.links.turns.lead(lambda: end.links.wait(0, None))
    assert read[41:] == value + b"second"
    settle(lambda: end.user.sent == ["first", "second"])
    assert link.is_idle
    far.close()


def test_nothing_is_read_before_what_came_by_the_worker(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=False)
    far.sendall(encode(b"later", before=2) + encode(b"latest", before=2))
    settle(lambda: end.user.looks)  # the thread looks whether the others have come
    assert not end.user.messages
    end.user.delivered = 2
    with end.mutex:
        end.links.resume(PEER)
    end.wait(lambda: len(end.user.messages) == 2)
    assert [message[3] for message in end.user.messages] == [b"later", b"latest"]
    far.close()


def test_a_thread_reads_while_no_call_does(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=False)
    far.sendall(encode(bytes(8 << 20)))  # far more than the system keeps
    settle(lambda: end.user.messages)
    assert threading.get_ident() not in end.user.readers
    far.close()


@pytest.mark.parametrize("sent", [b"x", encode(b"value")[:35], encode(b"value")[:-1]])
def test_a_link_that_ends_amid_a_message_is_broken(end: End, sent: bytes) -> None:
    near, far = connect()
    end.add(near, is_outgoing=False)
    assert far.recv(1) == READY
    far.sendall(sent)
    far.close()
    end.wait(lambda: end.user.broken)
    assert end.user.broken == [(PEER, "the connection has ended amid a message")]


def test_a_link_may_end_between_messages(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=False)
    assert far.recv(1) == READY
    far.sendall(encode(b"last"))
    far.close()
    end.wait(lambda: end.user.messages)
    end.links.read()
    assert not end.user.broken


def test_a_link_that_no_message_came_over_may_end_in_any_way(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=False)
    link = end.links._incoming[PEER]
    far.close()  # with the word unread that it is taken: that is an error of the connection
    end.wait(lambda: link.is_over)
    assert not end.user.broken


def test_a_send_that_is_not_taken_wholly_breaks_the_link(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=True)
    far.sendall(READY)
    settle(lambda: end.links.find_ready(PEER))
    assert not end.links.send(end.links.outgoing[PEER], [bytes(8 << 20)], "sender")
    far.close()
    end.wait(lambda: end.user.broken)
    assert not end.user.sent


def test_a_send_to_a_rank_that_has_gone_breaks_the_link(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=True)
    far.sendall(READY)
    link = settle(lambda: end.links.find_ready(PEER))
    far.close()
    assert not end.links.send(link, [b"lost"], "sender")  # whether or not the thread has seen the end before
    assert [peer for peer, _ in end.user.broken] == [PEER]


def test_what_is_no_message_breaks_the_link(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=False)
    far.sendall(bytes(64))
    end.wait(lambda: end.user.broken)
    assert end.user.broken[0][1].startswith("no header of a message: b'")
    far.close()


def test_memory_of_a_call_that_has_failed_is_not_written_to(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=False)
    message = encode(b"abcdef")
    far.sendall(message[:-3])
    link = end.links._incoming[PEER]
    end.wait(lambda: link.taker)
    taker = link.taker
    assert isinstance(taker, tuple)
    before = bytes(taker[2])
    end.links.discard(taker)
    with pytest.raises(OSError, match="reset|Broken"):
        while True:
            far.sendall(message[-3:])
    assert bytes(taker[2]) == before
    far.close()


def test_a_second_link_of_one_kind_is_refused_and_closed(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=False)
    other, beyond = connect()
    with pytest.raises(ValueError, match="a second link from rank 3"):
        end.add(other, is_outgoing=False)
    assert beyond.recv(1) == b""
    far.close()
    beyond.close()


def test_a_waiting_call_hears_the_doorbell(end: End) -> None:
    end.worker.sendall(b"!")
    end.wait(lambda: end.rung)


def test_nothing_is_left_behind() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    end = End()
    near, far = connect()
    end.add(near, is_outgoing=False)
    end.close()
    far.close()
    assert set(Path("/proc/self/fd").iterdir()) <= before
    assert "links" not in " ".join(thread.name for thread in threading.enumerate())


def test_a_short_message_of_which_the_system_takes_a_part_is_sent_later(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=True)
    far.sendall(READY)
    link = settle(lambda: end.links.find_ready(PEER))
    value = bytearray(os.urandom(1 << 20))
    sent = bytes(value)
    assert end.links.send_short(link, [b"head", value]) and end.links.is_sending
    value[:] = bytes(len(value))  # its caller goes on
    assert not end.links.send_short(link, [b"next"])  # which has to wait its turn
    read = b""
    while len(read) < 4 + len(sent):
        read += far.recv(1 << 20)
        end.links.turns.lead(lambda: end.links.wait(0, None))
    assert read == b"head" + sent
    end.wait(lambda: not end.links.is_sending)
    assert end.user.sent == []
    far.close()


def test_links_may_be_closed_twice_and_read_afterwards(end: End) -> None:
    near, far = connect()
    end.add(near, is_outgoing=False)
    end.links.close()
    end.links.close()
    end.links.wait(60, None)
    end.links.read()
    assert end.links.is_closed
    assert far.recv(2) == READY and far.recv(1) == b""
    far.close()


def test_links_that_a_caller_reads_are_closed_when_it_looks_up(end: End) -> None:
    before = set(os.listdir("/proc/self/fd"))
    other = End()
    near, far = connect()
    other.add(near, is_outgoing=False)

    def read() -> None:
        while not other.links.is_closed:
            other.links.turns.lead(lambda: other.links.wait(60, None))

    reading = threading.Thread(target=read)
    reading.start()
    settle(lambda: other.links.turns.is_led_elsewhere)
    other.close()
    reading.join(30)
    far.close()
    assert not reading.is_alive()
    settle(lambda: set(os.listdir("/proc/self/fd")) <= before)


@pytest.mark.parametrize("is_outgoing", [False, True])
def test_without_a_thread_there_is_no_link(end: End, monkeypatch: pytest.MonkeyPatch, is_outgoing: bool) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    near, far = connect()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        end.add(near, is_outgoing=is_outgoing)
    assert far.recv(1) == b""  # its peer is not told that it is taken
    assert not end.links.has_incoming and end.links.find_ready(PEER) is None
    far.close()


def test_a_link_that_comes_when_all_are_closed_is_closed(end: End) -> None:
    near, far = connect()
    end.links.close()
    end.add(near, is_outgoing=False)
    assert far.recv(1) == b""
    far.close()
