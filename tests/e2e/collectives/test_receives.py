"""Receives from any rank, and receives that end alone: over shared memory, between workers, and over gRPC."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.waiting import settle

import collectived as cd

pytestmark = [
    pytest.mark.parametrize("transport", ["shared memory", "grpc"], indirect=True),
    pytest.mark.parametrize("workers", [1, 3]),
]
SECONDS = 40.0


@pytest.fixture
def cluster(request: pytest.FixtureRequest, workers: int, transport: str) -> Any:
    return request.getfixturevalue("one_worker" if workers == 1 else "three_workers")


def test_a_receive_from_any_rank_says_who_sent_and_each_message_comes_once_and_in_order(
    cluster: Any, workers: int, transport: str
) -> None:
    each = 20

    def body(group: cd.Group) -> Any:
        if group.rank:
            for number in range(each):
                group.send(np.full(2, 100 * group.rank + number), 0, timeout=SECONDS)
            return None
        found: dict[int, list[int]] = {1: [], 2: []}
        for _ in range(2 * each):
            work = group.recv(async_op=True, timeout=SECONDS)
            value = work.result()
            assert work.source in found
            found[work.source].append(int(value[0]) - 100 * work.source)
        return found

    assert cluster.run(3, body)[0] == {rank: list(range(each)) for rank in (1, 2)}


def test_blocking_receives_from_any_rank_at_one_line_take_values_of_every_form(
    cluster: Any, workers: int, transport: str
) -> None:
    values = [np.arange(3.0), np.arange(4.0), np.ones((2, 3), np.int32), np.zeros(0), np.ones(300_000), np.arange(3.0)]

    def body(group: cd.Group) -> Any:
        if group.rank:
            for value in values:
                group.send(value, 0, timeout=SECONDS)
            group.send({"a": [1.0, None]}, 0, timeout=SECONDS)
            return None
        taken = [group.recv(timeout=SECONDS) for _ in range(len(values) + 1)]
        assert taken.pop() == {"a": [1.0, None]}
        return [
            np.array_equal(one, other) and one.dtype == other.dtype for one, other in zip(taken, values, strict=True)
        ]

    assert cluster.run(2, body)[0] == [True] * len(values)


def test_named_receives_and_those_from_any_rank_are_served_as_they_were_posted(
    cluster: Any, workers: int, transport: str
) -> None:
    posted = threading.Event()

    def body(group: cd.Group) -> Any:
        if group.rank == 1:
            assert posted.wait(SECONDS)
            for number in range(4):
                group.send(float(number), 0, timeout=SECONDS)
            return None
        works = [group.recv(source, async_op=True, timeout=SECONDS) for source in (None, 1, None, 1)]
        assert [work.source for work in works] == [None, 1, None, 1] and not works[0].done()
        posted.set()
        return cd.wait(works), [work.source for work in works]

    assert cluster.run(2, body)[0] == ([0.0, 1.0, 2.0, 3.0], [1] * 4)


@pytest.mark.parametrize("source", [None, 1])
def test_a_cancelled_receive_takes_nothing_and_the_group_goes_on(
    cluster: Any, workers: int, transport: str, source: int | None
) -> None:
    cancelled = threading.Event()

    def body(group: cd.Group) -> Any:
        if group.rank == 1:
            assert cancelled.wait(SECONDS)
            group.send(5.0, 0, timeout=SECONDS)
            return group.all_reduce("sum", 1.0, timeout=SECONDS)
        heard = threading.Event()
        work = group.recv(source, async_op=True, timeout=SECONDS)
        work.add_done_callback(lambda _: heard.set())
        assert work.cancel() and work.cancel() and work.done()
        with pytest.raises(cd.errors.CancelledError, match=r"recv\(source=.*test_receives.py") as caught:
            work.result()
        assert not caught.value.rejoin and heard.wait(SECONDS)
        cancelled.set()
        assert group.recv(source, timeout=SECONDS) == 5.0
        return group.all_reduce("sum", 1.0, timeout=SECONDS)

    assert cluster.run(2, body) == [2.0, 2.0]


def test_a_receive_whose_message_is_there_and_other_collectives_cannot_be_taken_back(
    cluster: Any, workers: int, transport: str
) -> None:
    def body(group: cd.Group) -> Any:
        if group.rank == 1:
            sent = group.send(np.arange(5.0), 0, async_op=True, timeout=SECONDS)
            assert not sent.cancel() and sent.result() is None and sent.source is None
            reduced = group.all_reduce("sum", 1.0, async_op=True, timeout=SECONDS)
            assert not reduced.cancel()
            return reduced.result()
        work = group.recv(async_op=True, timeout=SECONDS)
        settle(work.done)
        assert not work.cancel() and len(work.result()) == 5 and work.source == 1
        return group.all_reduce("sum", 1.0, timeout=SECONDS)

    assert cluster.run(2, body) == [2.0, 2.0]


def test_no_message_is_lost_however_cancels_and_messages_meet(cluster: Any, workers: int, transport: str) -> None:
    count = 150

    def body(group: cd.Group) -> Any:
        if group.rank == 1:
            for number in range(count):
                group.send(float(number), 0, timeout=SECONDS)
            return None
        taken: list[float] = []
        while len(taken) < count:
            work = group.recv(None if len(taken) % 2 else 1, async_op=True, timeout=SECONDS)
            if len(taken) % 3 == 0:
                time.sleep(0.0005)
            if not work.cancel():
                taken.append(work.result())
        return taken

    assert cluster.run(2, body)[0] == [float(number) for number in range(count)]


@pytest.mark.parametrize("timeout", [0.003, 0.2])
@pytest.mark.parametrize("how", ["blocking", "async", "await", "nobody waits"])
def test_a_receive_whose_time_is_over_ends_alone_and_a_later_message_is_for_a_later_receive(
    cluster: Any, workers: int, transport: str, how: str, timeout: float
) -> None:
    over = threading.Event()

    def receive(group: cd.Group, source: int | None) -> Any:
        if how == "blocking":
            return group.recv(source, timeout=timeout)
        work = group.recv(source, async_op=True, timeout=timeout)
        if how == "await":

            async def wait() -> Any:
                return await work

            return asyncio.run(wait())
        if how == "nobody waits":
            settle(work.done)
        return work.result()

    def body(group: cd.Group) -> Any:
        if group.rank == 1:
            assert over.wait(SECONDS)
            group.send(7.0, 0, timeout=SECONDS)
            return group.all_reduce("sum", 1.0, timeout=SECONDS)
        for source, missing in ((1, [1]), (None, [0, 1])):
            for _ in range(2):  # at one line: the second time it goes the short way
                with pytest.raises(cd.errors.DeadlineExceededError) as caught:
                    receive(group, source)
                error = caught.value
                assert f"recv(source={source}, tag=0)" in str(error) and f"within {timeout:g} s" in str(error)
                assert "test_receives.py:" in str(error) and error.site and not error.rejoin
                assert [member.rank for member in error.missing] == missing
        over.set()
        assert group.recv(None, timeout=SECONDS) == 7.0
        return group.all_reduce("sum", 1.0, timeout=SECONDS)

    assert cluster.run(2, body) == [2.0, 2.0]


def test_a_receive_from_any_rank_ends_when_all_others_have_left(cluster: Any, workers: int, transport: str) -> None:
    left = threading.Event()

    def body(group: cd.Group) -> Any:
        if group.rank == 1:
            group.send(1.0, 0, tag=4, timeout=SECONDS)
            group.leave()
            left.set()
            return None
        if group.rank == 2:
            assert left.wait(SECONDS)
            time.sleep(0.2)
            group.send(2.0, 0, timeout=SECONDS)
            return None
        assert group.recv(timeout=SECONDS) == 2.0  # one of the others is still there
        with pytest.raises(cd.errors.AbortedError):
            group.recv(timeout=SECONDS)
        assert group.recv(tag=4, timeout=SECONDS) == 1.0  # what it sent before
        return True

    assert cluster.run(3, body)[0] is True


def test_an_abort_ends_a_receive_from_any_rank(cluster: Any, workers: int, transport: str) -> None:
    posted = threading.Event()

    def body(group: cd.Group) -> Any:
        if group.rank == 1:
            assert posted.wait(SECONDS)
            group.abort("enough")
            with pytest.raises(cd.errors.AbortedError):
                group.barrier()
            return None
        work = group.recv(async_op=True, timeout=SECONDS)
        posted.set()
        with pytest.raises(cd.errors.AbortedError, match="enough"):
            work.result()
        return work.cancel()

    assert cluster.run(2, body)[0] is False


LEAVES = """
import sys, numpy as np, collectived as cd
with cd.connect() as session, session.join() as group:
    if group.rank:
        print("receives", flush=True)
        print(group.recv(0).sum(), flush=True)
    else:
        sys.stdin.readline()
        group.send(np.ones(100_000), 1)
"""


def test_what_was_sent_before_its_sender_left_comes_however_late_its_receiver_looks(
    cluster: Any, workers: int, transport: str
) -> None:
    """It finds the verdict that its sender has left beside what that has sent."""
    leaver, receiver = (cluster.client(rank, 2, f"leaves-{workers}", LEAVES) for rank in range(2))
    try:
        assert receiver.stdout.readline() == "receives\n"
        settle(lambda: "recv(source=0" in str(cluster.status()))  # its worker watches it
        receiver.send_signal(signal.SIGSTOP)
        assert leaver.communicate("\n", timeout=SECONDS)[1] == ""
        time.sleep(0.3)  # until the verdict is there too
        receiver.send_signal(signal.SIGCONT)
        assert receiver.communicate(timeout=SECONDS) == ("100000.0\n", "")
    finally:
        for client in (leaver, receiver):
            client.kill()
            client.communicate()
