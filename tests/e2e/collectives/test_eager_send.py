"""Sends that end as they start, and those that cannot."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.waiting import settle

import collectived as cd
from collectived.eager_send import begin_send

pytestmark = pytest.mark.parametrize("transport", ["shared memory", "grpc"], indirect=True)


@pytest.fixture(params=["one_worker", "two_workers"])
def cluster(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_short_sends_arrive_in_order_whether_or_not_they_ended_at_once(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        peer = 1 - group.rank
        for number in range(200):
            work = begin_send(group, np.full(1 + number % 3 * 5000, number), peer, 4)
            assert group.recv(peer, 4)[0] == number
            if work is not None:
                work.result(20)
        return True

    assert all(cluster.run(2, body))


def test_a_sender_goes_on_though_nobody_receives(cluster: Any) -> None:
    """Both send more than is kept on its way before either receives."""
    count = 300

    def body(group: cd.Group) -> Any:
        peer = 1 - group.rank
        works: list[cd.Work[None]] = []
        for number in range(count):
            slow = works[-1] if works else None
            value = np.full(8000, number, np.float64)
            if slow is not None and not slow.done():  # as a process group does
                works.append(group.send(value, peer, async_op=True))
            elif (work := begin_send(group, value, peer, 0)) is not None:
                works.append(work)
        assert [int(group.recv(peer)[0]) for _ in range(count)] == list(range(count))
        for work in works:
            work.result(20)
        return True

    assert all(cluster.run(2, body))


def test_a_send_that_waits_for_room_goes_on_though_its_thread_does_not_wait(cluster: Any, transport: str) -> None:
    has_little_room = len(cluster.addresses) == 1 and transport == "shared memory"  # a segment keeps 4,096 letters

    def body(group: cd.Group) -> Any:
        if group.rank == 1:
            filled.wait(30)
            received = [int(group.recv(0)[0]) for _ in range(counts[0])]
            group.barrier()
            return received == list(range(counts[0]))
        work, number = None, 0
        while work is None and number < 5000:
            work = begin_send(group, np.full(2, number, np.float64), 1, 0)
            number += 1
        counts.append(number)
        filled.set()
        assert work is not None or not has_little_room
        if work is not None:
            settle(work.done)
            assert work.exception() is None
        group.barrier()
        return True

    filled, counts = threading.Event(), list[int]()
    assert all(cluster.run(2, body))


def test_a_send_of_a_group_that_is_over_says_why(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        begin_send(group, np.ones(3), group.rank, 0)
        assert group.recv(group.rank).tolist() == [1, 1, 1]
        group.barrier()
        if group.rank == 0:
            group.abort("enough")
        with pytest.raises(cd.errors.AbortedError, match="enough"):
            while True:
                work = begin_send(group, np.ones(3), 1 - group.rank, 0)
                if work is not None:
                    work.result(20)
        return True

    assert all(cluster.run(2, body))
