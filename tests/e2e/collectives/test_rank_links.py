"""Messages over rank links: two ranks of different workers, or of one worker of several, send without any worker."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import Cluster
from tests.e2e.metrics.test_daemon_metrics import Page
from tests.waiting import settle

import collectived as cd
from collectived.shared.matching_channel import MatchingChannel
from collectived.shared.message_forms import describe_value
from collectived.shared.rank_link import OutgoingLink
from collectived.values import nest
from collectived_proto.ipc.rank_messages import Header
from collectived_proto.types import Broadcast, Collective, DType, Leaf

SECONDS = 40.0
LARGE = 4 << 20  # elements of a float32 array: more than the system keeps on its way
VALUES: list[Any] = [
    np.arange(5.0),
    np.float32(2.5),
    np.zeros((0, 3), np.int16),
    np.arange(24).reshape(2, 3, 4)[:, ::2],
    np.arange(6, dtype=">i4"),
    np.array([True, False]),
    {"a": [np.ones(3), None], "b": (1, np.complex64(2j))},
    {f"leaf {index}": np.full(index % 7, index) for index in range(900)},
    np.arange(100_000, dtype=np.float64),
    np.arange(LARGE, dtype=np.float32),
    [],
]


def find_link(group: cd.Group, peer: int) -> OutgoingLink | None:
    """The link over which this rank sends to `peer` now."""
    channel = group._channel
    assert isinstance(channel, MatchingChannel)
    channel.poll()
    exchange = channel._exchange
    if exchange is None or exchange.generation != group.generation:
        return None
    return exchange.links.find_ready(peer)


def connect(group: cd.Group, peer: int) -> None:
    """Has both ranks send to each other until both have a link."""
    for number in range(3):
        work = group.recv(peer, tag=99, async_op=True, timeout=SECONDS)
        group.send(number, peer, tag=99, timeout=SECONDS)
        work.result()
    settle(lambda: find_link(group, peer))
    work = group.recv(peer, tag=98, async_op=True, timeout=SECONDS)  # the other one has a link, too
    group.send(0, peer, tag=98, timeout=SECONDS)
    work.result()


def assert_same(got: Any, sent: Any) -> None:
    if isinstance(sent, dict):
        assert list(got) == sorted(sent)
        for key in sent:
            assert_same(got[key], sent[key])
    elif isinstance(sent, (list, tuple)):
        assert type(got) is type(sent) and len(got) == len(sent)
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)
    elif sent is None:
        assert got is None
    else:
        assert np.asarray(got).dtype == np.asarray(sent).dtype.newbyteorder("=")
        assert np.array_equal(got, sent)


@contextmanager
def stopped(cluster: Cluster) -> Iterator[None]:
    """No worker does anything."""
    for worker in cluster.workers:
        os.kill(worker.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for worker in cluster.workers:
            os.kill(worker.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("receive", ["blocking", "async", "out"])
def test_values_of_every_form_arrive(request: pytest.FixtureRequest, workers: int, receive: str) -> None:
    cluster: Cluster = request.getfixturevalue("two_workers" if workers == 2 else "three_workers")

    def body(group: cd.Group) -> None:
        peer = group.size - 1 - group.rank
        if group.rank == peer:
            return
        connect(group, peer)
        for _ in range(3):  # the third time without preparing anything
            for value in VALUES:
                if group.rank < peer:
                    group.send(value, peer, timeout=SECONDS)
                elif receive == "async":
                    assert_same(group.recv(peer, async_op=True, timeout=SECONDS).result(), value)
                elif receive == "out" and isinstance(value, np.ndarray):
                    out = np.empty(value.shape, value.dtype)
                    assert group.recv(peer, out=out) is out
                    assert np.array_equal(out, value)
                else:
                    assert_same(group.recv(peer, timeout=SECONDS), value)

    cluster.run(4 if workers == 2 else 3, body)


def test_messages_keep_their_order_when_they_begin_to_go_over_a_link(two_workers: Cluster) -> None:
    def body(group: cd.Group) -> Any:
        if group.rank == 0:
            for number in range(400):
                group.send(np.full(1 + 300 * (number % 50), number), 1, tag=number % 2, timeout=SECONDS)
            return find_link(group, 1)
        taken: list[list[int]] = [[], []]
        for number in range(400):
            tag = number % 3 % 2 if len(taken[number % 3 % 2]) < 200 else 1 - number % 3 % 2
            taken[tag].append(int(group.recv(0, tag, timeout=SECONDS)[0]))
        return taken

    link, taken = two_workers.run(2, body)
    assert link is not None
    assert taken == [list(range(0, 400, 2)), list(range(1, 400, 2))]


@pytest.mark.parametrize("gives_out", [False, True], ids=["new arrays", "out"])
def test_short_messages_of_changing_forms_keep_their_order(two_workers: Cluster, gives_out: bool) -> None:
    """A receive without a call expects what it got the last time, and gets what comes first."""
    lengths = [1, 2, 1, 1, 20_000, 2, 1, 30_000, 30_000, 1]

    def body(group: cd.Group) -> Any:
        connect(group, 1 - group.rank)
        chance = random.Random(5)
        found = []
        for number in range(600):
            length = lengths[number % 10] if number < 300 else chance.choice(lengths)
            value = np.full(length, number, np.float32)
            if group.rank == 0:
                group.send(value, 1)
                if chance.random() < 0.3:  # the next one finds a receiver that waits, or two come together
                    time.sleep(0.0005)
            else:
                out = np.empty(length, np.float32) if gives_out else None
                if chance.random() < 0.3:
                    time.sleep(0.0003)
                found.append(np.array_equal(group.recv(0, out=out), value))
        return found

    assert all(two_workers.run(2, body)[1])


def test_no_worker_takes_part(two_workers: Cluster) -> None:
    ready, done = threading.Barrier(2), threading.Barrier(2)

    def body(group: cd.Group) -> None:
        value, out = np.arange(1000.0), np.empty(1000)
        connect(group, 1 - group.rank)
        for _ in range(50):
            exchange(group, value, out)
        ready.wait(SECONDS)
        if group.rank == 0:
            with stopped(two_workers):
                for number in range(50):
                    exchange(group, value + number, out)
        else:
            for number in range(50):
                exchange(group, value + number, out)
        assert np.array_equal(out, value + 49)
        done.wait(SECONDS)

    def exchange(group: cd.Group, value: Any, out: Any) -> None:
        peer = 1 - group.rank
        if group.rank == 0:
            group.send(value, peer)
            group.recv(peer, out=out)
        else:
            group.recv(peer, out=out)
            group.send(value, peer)

    two_workers.run(2, body)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_hear_of_receives_that_wait_for_a_moment(request: pytest.FixtureRequest, workers: int) -> None:
    """Though no thread waits when they begin."""
    rounds = 300

    def body(group: cd.Group) -> int:
        channel: Any = group._channel
        announcements, heard = channel._announcements, []

        def send(message: bytes) -> bool:
            heard.append(message)
            return bool(send_now(message))

        send_now, announcements._send = announcements._send, send
        peer = 1 - group.rank
        for number in range(rounds):
            if group.rank == 0:
                group.send(np.full(5, number), peer)
            assert group.recv(peer, async_op=True).wait()[0] == number
            if group.rank == 1:
                group.send(np.full(5, number), peer)
        return len(heard)

    cluster = request.getfixturevalue("one_worker" if workers == 1 else "two_workers")
    for heard in cluster.run(2, body):
        assert heard < rounds / 2  # a machine that is busy may have some wait for longer


def test_both_may_send_first(two_workers: Cluster) -> None:
    def body(group: cd.Group) -> None:
        peer = 1 - group.rank
        connect(group, peer)
        group.send(np.full(LARGE, group.rank, np.float32), peer, timeout=SECONDS)
        assert (group.recv(peer, timeout=SECONDS) == peer).all()

    two_workers.run(2, body)


def test_a_send_does_not_wait_for_a_receiver_that_calls_nothing(two_workers: Cluster) -> None:
    sent = threading.Event()

    def body(group: cd.Group) -> None:
        connect(group, 1 - group.rank)
        if group.rank == 0:
            group.send(np.ones(LARGE, np.float32), 1, timeout=SECONDS)
            sent.set()
        else:
            assert sent.wait(SECONDS)
            assert group.recv(0, timeout=SECONDS).sum() == LARGE

    two_workers.run(2, body)


def test_a_collective_goes_on_behind_a_message_that_is_not_received_yet(two_workers: Cluster) -> None:
    def body(group: cd.Group) -> None:
        connect(group, 1 - group.rank)
        if group.rank == 0:
            group.send(np.ones(LARGE, np.float32), 1, timeout=SECONDS)
        assert group.all_reduce("sum", 1.0, timeout=SECONDS) == 2.0
        if group.rank == 1:
            assert group.recv(0, timeout=SECONDS).sum() == LARGE

    two_workers.run(2, body)


def test_receives_from_any_rank_take_from_links_and_from_workers(three_workers: Cluster) -> None:
    each = 30

    def body(group: cd.Group) -> Any:
        if group.rank == 1:
            connect(group, 0)
        elif group.rank == 0:
            connect(group, 1)
        if group.rank:
            for number in range(each if group.rank == 1 else 1):
                group.send(np.array([group.rank, number]), 0, timeout=SECONDS)
            return None
        found: dict[int, list[int]] = {1: [], 2: []}
        for _ in range(each + 1):
            work = group.recv(async_op=True, timeout=SECONDS)
            source, number = work.result()
            assert work.source == source
            found[int(source)].append(int(number))
        return found

    assert three_workers.run(3, body)[0] == {1: list(range(each)), 2: [0]}


@pytest.mark.parametrize("how", ["blocking", "async"])
def test_a_receive_ends_alone_at_its_timeout(two_workers: Cluster, how: str) -> None:
    expired = threading.Event()

    def body(group: cd.Group) -> None:
        peer = 1 - group.rank
        connect(group, peer)
        if group.rank == 0:
            with pytest.raises(cd.errors.DeadlineExceededError, match="has sent nothing for it") as caught:
                if how == "async":
                    group.recv(peer, async_op=True, timeout=0.1).result()
                else:
                    group.recv(peer, timeout=0.1)
            assert not caught.value.rejoin
            assert [member.rank for member in caught.value.missing] == [1]
            expired.set()
            assert group.recv(peer, timeout=SECONDS) == 7
        else:
            assert expired.wait(SECONDS)
            group.send(7, peer, timeout=SECONDS)
        assert group.all_reduce("sum", 1.0, timeout=SECONDS) == 2.0

    two_workers.run(2, body)


def test_a_cancelled_receive_takes_nothing(two_workers: Cluster) -> None:
    cancelled = threading.Event()

    def body(group: cd.Group) -> None:
        connect(group, 1 - group.rank)
        if group.rank == 0:
            first, second = (group.recv(1, async_op=True, timeout=SECONDS) for _ in range(2))
            assert first.cancel()
            cancelled.set()
            assert second.result() == 5
            assert not second.cancel()
        else:
            assert cancelled.wait(SECONDS)
            group.send(5, 0, timeout=SECONDS)

    two_workers.run(2, body)


def test_callbacks_are_called_though_no_thread_waits(two_workers: Cluster) -> None:
    def body(group: cd.Group) -> None:
        connect(group, 1 - group.rank)
        heard = threading.Event()
        if group.rank == 0:
            group.recv(1, async_op=True, timeout=SECONDS).add_done_callback(lambda _: heard.set())
        else:
            group.send(np.ones(LARGE, np.float32), 0, async_op=True, timeout=SECONDS).add_done_callback(
                lambda _: heard.set()
            )
        assert heard.wait(SECONDS)

    two_workers.run(2, body)


def test_a_callback_may_receive_what_comes_next(two_workers: Cluster) -> None:
    def body(group: cd.Group) -> None:
        connect(group, 1 - group.rank)
        if group.rank == 1:
            for number in range(3):
                group.send(np.array([number]), 0, timeout=SECONDS)
            return
        taken: list[int] = []
        heard = threading.Event()

        def go_on(_: object) -> None:
            taken.append(int(group.recv(1, timeout=SECONDS)[0]))
            heard.set()

        work = group.recv(1, async_op=True, timeout=SECONDS)
        work.add_done_callback(go_on)
        assert heard.wait(SECONDS)
        assert work.result()[0] == 0 and taken == [1]
        assert group.recv(1, timeout=SECONDS)[0] == 2

    two_workers.run(2, body)


def test_what_a_rank_sent_before_it_left_arrives(two_workers: Cluster) -> None:
    def body(group: cd.Group) -> None:
        connect(group, 1 - group.rank)
        if group.rank == 0:
            group.send(np.ones(LARGE, np.float32), 1, timeout=SECONDS)
            group.send(3, 1, timeout=SECONDS)
            group.leave()
            return
        time.sleep(0.1)
        assert group.recv(0, timeout=SECONDS).sum() == LARGE
        assert group.recv(0, timeout=SECONDS) == 3
        with pytest.raises(cd.errors.AbortedError, match="rank 0 .* left the group"):
            group.recv(0, timeout=SECONDS)
        with pytest.raises(cd.errors.AbortedError, match="rank 0 .* left the group"):
            group.send(np.ones(LARGE, np.float32), 0, timeout=SECONDS)

    two_workers.run(2, body)


def test_short_messages_arrive_though_their_sender_leaves_before_all_of_them_is_taken(two_workers: Cluster) -> None:
    left = threading.Event()
    value = np.arange(1 << 16, dtype=np.float32)  # more than a socket between two ranks of one worker keeps

    def body(group: cd.Group) -> None:
        if group.rank > 1:
            return
        connect(group, 1 - group.rank)
        if group.rank == 0:
            for _ in range(2):  # the second time without a call
                group.send(value, 1)
            group.leave()
            left.set()
        else:
            for _ in range(2):
                assert np.array_equal(group.recv(0, timeout=SECONDS), value)
            assert left.wait(SECONDS)

    two_workers.run(4, body)


def test_a_connection_that_breaks_ends_the_generation_for_all(two_workers: Cluster) -> None:
    def body(group: cd.Group) -> str:
        peer = 1 - group.rank
        connect(group, peer)
        if group.rank == 0:
            link = find_link(group, 1)
            assert link is not None
            link.socket.send(b"CDM")  # a part of a header
            link.socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(cd.errors.CollectiveError) as caught:
            group.recv(peer, timeout=SECONDS)
        return str(caught.value)

    for text in two_workers.run(2, body):
        assert "the connection with rank 0" in text and "has ended" in text


def test_who_sends_more_than_there_is_room_for_is_named(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster(2, worker_options=("--memory-limit", "256M"))

    def body(group: cd.Group) -> cd.errors.CollectiveError:
        connect(group, 1 - group.rank)
        with pytest.raises(cd.errors.ResourceExhaustedError) as caught:
            if group.rank == 0:
                for _ in range(100):
                    group.send(np.ones(LARGE, np.float32), 1, timeout=SECONDS)
            group.recv(1 - group.rank, tag=5, timeout=SECONDS)
        return caught.value

    for error in cluster.run(2, body):
        assert [member.rank for member in error.missing] == [0]
        assert "has not received it" in str(error)


def test_messages_are_counted_once(make_cluster: Any) -> None:
    cluster: Cluster = make_cluster(2, worker_options=("--metrics", "0"))
    each = 20

    def body(group: cd.Group) -> None:
        peer = 1 - group.rank
        connect(group, peer)
        for _ in range(each):
            group.send(np.ones(10), peer, timeout=SECONDS)
            group.recv(peer, timeout=SECONDS)

    cluster.run(2, body)
    settle(cluster.quiet)

    def count(name: str, operation: str) -> float:
        pages = [Page(where) for where in cluster.metrics[1:]]
        return sum(page(name, operation=operation, algorithm="point_to_point") for page in pages)

    for operation in ("send", "recv"):
        assert count("collectived_collective_duration_seconds_count", operation) == 2 * (each + 4)
    assert count("collectived_payload_bytes_total", "send") == 2 * (each * 80 + 4 * 8)


def test_links_are_made_anew_in_the_next_generation(two_workers: Cluster) -> None:
    def body(group: cd.Group) -> None:
        peer = 1 - group.rank
        connect(group, peer)
        first = group.generation
        with pytest.raises(cd.errors.InvalidArgumentError):
            group.all_reduce("sum", np.ones(2 + group.rank), timeout=SECONDS)
        assert group.generation != first
        connect(group, peer)
        group.send(np.full(LARGE, group.rank, np.float32), peer, timeout=SECONDS)
        assert (group.recv(peer, timeout=SECONDS) == peer).all()

    two_workers.run(2, body)


def test_nothing_is_left_open(two_workers: Cluster) -> None:
    def count() -> tuple[int, int]:
        links = [thread for thread in threading.enumerate() if thread.name.endswith("links")]
        return len(os.listdir("/proc/self/fd")), len(links)

    def body(group: cd.Group) -> None:
        connect(group, 1 - group.rank)

    two_workers.run(2, body)
    before = count()
    for _ in range(3):
        two_workers.run(2, body)
    assert count()[1] == 0
    settle(lambda: count() <= before)


def encode(group: cd.Group, value: Any) -> bytes:
    """The bytes of a message to rank 0, as a link carries them."""
    channel = group._channel
    assert isinstance(channel, MatchingChannel) and channel._exchange is not None
    leaf = Leaf("", DType.FLOAT32, value.shape)
    description = describe_value(Collective(Broadcast(0), nest.LEAF, (leaf,)))
    header = Header(0, len(description), value.nbytes, channel._exchange.given[0])
    return header.encode() + description + bytes(value.tobytes())


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("who", ["another rank", "this rank"])
def test_memory_of_a_receive_that_has_failed_is_left_alone(three_workers: Cluster, who: str, begun: bool) -> None:
    connected, failed, sent = (threading.Barrier(3) for _ in range(3))

    def receive(group: cd.Group) -> None:
        out = np.zeros(LARGE, np.float32)
        work = group.recv(1, out=out, async_op=True)
        connected.wait(SECONDS)
        if begun:
            settle(lambda: out[0])
        if who == "this rank":
            group.abort("enough")
        with pytest.raises(cd.errors.AbortedError):
            work.result(SECONDS)
        out[:] = -1
        failed.wait(SECONDS)
        sent.wait(SECONDS)
        time.sleep(0.1)  # in which the library's thread would read
        assert (out == -1).all()

    def send(group: cd.Group) -> None:
        link, message = find_link(group, 0), encode(group, np.ones(LARGE, np.float32))
        assert link is not None
        connected.wait(SECONDS)
        if begun:  # the header, and a part of the value
            message = message[link.socket.send(message[:1000]) :]
        failed.wait(SECONDS)
        with contextlib.suppress(OSError):  # it may be closed by now, or full
            while message:
                message = message[link.socket.send(message) :]
        sent.wait(SECONDS)

    def body(group: cd.Group) -> None:
        if group.rank < 2:
            connect(group, 1 - group.rank)
            (send if group.rank else receive)(group)
            return
        connected.wait(SECONDS)
        if who == "another rank":
            time.sleep(0.2)
            group.abort("enough")
            with pytest.raises(cd.errors.AbortedError):
                group.barrier()
        failed.wait(SECONDS)
        sent.wait(SECONDS)

    three_workers.run(3, body)


def test_no_message_overtakes_one_that_is_lost(two_workers: Cluster) -> None:
    broken = threading.Barrier(2)

    def body(group: cd.Group) -> None:
        connect(group, 1 - group.rank)
        if group.rank == 0:
            link = find_link(group, 1)
            assert link is not None
            link.socket.send(b"CDM")
            link.socket.shutdown(socket.SHUT_RDWR)
            broken.wait(SECONDS)
            with pytest.raises(cd.errors.CollectiveError, match="has ended"):
                for number in range(100):
                    group.send(number, 1, timeout=SECONDS)
        else:
            broken.wait(SECONDS)
            with pytest.raises(cd.errors.CollectiveError, match="has ended"):
                group.recv(0, timeout=SECONDS)

    two_workers.run(2, body)
