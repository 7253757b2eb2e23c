"""Probes over real sockets: what they find, and that nobody waits for a peer that is silent, gone or mad."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from collectived_runtime.transport.connections import ConnectionServer
from collectived_runtime.transport.dial import DialRequest
from collectived_runtime.transport.hello import PROBE_CHANNEL, LinkHello
from collectived_runtime.transport.link import Link, LinkBroken, TcpStream
from collectived_runtime.worker import link_probe


def connected() -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = connected()
    with one, other:
        yield one, other


@pytest.fixture
def reception(tmp_path: Path) -> Iterator[Callable[[int, str], ConnectionServer]]:
    """Makes connection servers of workers."""
    made: list[ConnectionServer] = []

    def make(task: int, secret: str) -> ConnectionServer:
        made.append(ConnectionServer(task, secret, str(tmp_path / f"door-{task}"), ("127.0.0.1", 0)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def probed(mine: ConnectionServer, address: str) -> link_probe.LinkMeasurement:
    """Worker 0 probes worker 1."""
    found: queue.Queue[link_probe.LinkMeasurement] = queue.Queue()
    link_probe.start_probe(0, 1, address, mine, found.put)
    return found.get(timeout=10)


def in_a_second() -> float:
    return time.monotonic() + 1


def test_two_receptions_measure_their_link(reception: Callable[[int, str], ConnectionServer]) -> None:
    mine, theirs = reception(0, "secret"), reception(1, "secret")
    theirs.set_probe_handler(link_probe.ProbeServer().serve_in_thread)
    found = probed(mine, f"127.0.0.1:{theirs.link_port}")
    assert found.error == ""
    assert 0 < found.latency_seconds < 0.1 and found.bytes_per_second > 1e6


def test_a_worker_that_does_not_answer_probes_is_not_waited_for(
    reception: Callable[[int, str], ConnectionServer],
) -> None:
    mine, theirs = reception(0, "secret"), reception(1, "secret")
    assert probed(mine, f"127.0.0.1:{theirs.link_port}").error != ""


def test_nobody_is_measured_without_the_secret(reception: Callable[[int, str], ConnectionServer]) -> None:
    mine, theirs = reception(0, "secret"), reception(1, "another")
    theirs.set_probe_handler(link_probe.ProbeServer().serve_in_thread)
    assert probed(mine, f"127.0.0.1:{theirs.link_port}").error.endswith(": the peer does not know this job's secret")


def test_an_address_that_is_none_is_named(reception: Callable[[int, str], ConnectionServer]) -> None:
    assert "'nowhere', expected host:port" in probed(reception(0, "secret"), "nowhere").error


def test_an_address_where_nobody_listens_is_given_up(reception: Callable[[int, str], ConnectionServer]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert f"127.0.0.1:{port}" in probed(reception(0, "secret"), f"127.0.0.1:{port}").error


def test_a_silent_peer_is_given_up_in_time(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        link_probe.measure(TcpStream(ends[0]), time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        link_probe.serve_requests(TcpStream(ends[1]), time.monotonic())


def test_a_peer_that_goes_is_noticed_at_once(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].close()
    with pytest.raises(LinkBroken):
        link_probe.measure(TcpStream(ends[0]), in_a_second())


def test_more_than_a_probe_asks_for_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(struct.pack("<I", (8 << 20) + 1))
    with pytest.raises(LinkBroken, match="8388609 bytes was announced, 8388608 are allowed"):
        link_probe.serve_requests(TcpStream(ends[1]), in_a_second())


def test_a_slow_link_is_asked_for_little(ends: tuple[socket.socket, socket.socket]) -> None:
    """A peer that takes 64 KiB a blink: what is sent to it stays small."""
    served = 0

    def serve_slowly() -> None:
        nonlocal served
        with ends[1], ends[1].makefile("rb") as said:
            while len(head := said.read(4)) == 4:
                (count,) = struct.unpack("<I", head)
                served += 4 + len(said.read(count))
                pause.wait(count / 1e6)
                ends[1].sendall(bytes(link_probe.ANSWER_BYTES))

    pause = threading.Event()
    server = threading.Thread(target=serve_slowly)
    server.start()
    found = link_probe.measure(TcpStream(ends[0]), time.monotonic() + 10)
    ends[0].close()
    server.join()
    assert 0 < found.bytes_per_second < 11e6  # at most ten times what the whole exchange took
    assert served == link_probe.ROUNDS * link_probe.ANSWER_BYTES + 2 * (64 << 10)


def test_four_probes_are_answered_at_once_and_further_ones_are_closed() -> None:
    answers = link_probe.ProbeServer()
    request = struct.pack("<I", 8) + bytes(8)

    def probing() -> socket.socket:
        mine, theirs = connected()
        mine.settimeout(10)
        answers.serve_in_thread(Link(7, PROBE_CHANNEL, TcpStream(theirs)))
        return mine

    def is_answered(one: socket.socket) -> bool:
        try:
            one.sendall(request)
            return len(one.recv(link_probe.ANSWER_BYTES, socket.MSG_WAITALL)) == link_probe.ANSWER_BYTES
        except (BrokenPipeError, ConnectionResetError):
            return False

    with contextlib.ExitStack() as stack:
        first = [stack.enter_context(probing()) for _ in range(link_probe.MAX_CONCURRENT_PROBES)]
        assert all(map(is_answered, first)) and link_probe.MAX_CONCURRENT_PROBES == 4
        assert not is_answered(stack.enter_context(probing()))
        first[0].close()
        while not is_answered(stack.enter_context(probing())):  # until it has been noticed
            pass


def test_a_probe_is_a_hello_that_no_group_says() -> None:
    assert LinkHello(0, 1, 0, 0, PROBE_CHANNEL, bytes(16)).is_probe
    assert not LinkHello(0, 1, 7, 8, PROBE_CHANNEL, bytes(16)).is_probe


def test_a_call_that_fails_is_told_once(ends: tuple[socket.socket, socket.socket]) -> None:
    class Nobody:
        def dial(self, call: DialRequest) -> None:
            call.on_failure(LinkBroken("no route", call.hello.acceptor))

        def expect_links(self, keys: Sequence[tuple[int, int, int, int]], arrived: Callable[[Link], None]) -> None:
            raise AssertionError("probes are dialled")

        def release_link(self, link: Link, farewell: bytes) -> None:
            raise AssertionError("a probe wants a connection of its own")

        def discard_generation(self, key: int, generation: int) -> None:
            raise AssertionError("probes are dialled")

    found: list[link_probe.LinkMeasurement] = []
    link_probe.start_probe(0, 1, "h:1", Nobody(), found.append)
    assert found == [link_probe.LinkMeasurement(error="no route")]


@pytest.mark.parametrize(
    ("answer", "round_trip", "latency"),
    [(400e-6, 20e-6, 35e-6), (60e-6, 20e-6, 30e-6), (400e-6, 0.0, 200e-6)],
    ids=["Python takes most of it", "the answer was as quick as that", "the kernel does not say"],
)
def test_the_latency_is_that_of_frames_and_not_of_pythons_threads(
    answer: float, round_trip: float, latency: float
) -> None:
    assert link_probe.estimate_latency(answer, round_trip) == pytest.approx(latency)
