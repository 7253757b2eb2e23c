"""Sends and recvs that cannot complete: the same verdict whether ranks share a worker, and its memory, or not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import Cluster

import collectived as cd

pytestmark = pytest.mark.parametrize("workers", [1, 3])


@pytest.fixture
def cluster(request: pytest.FixtureRequest, workers: int) -> Any:
    return request.getfixturevalue("one_worker" if workers == 1 else "three_workers")


def receive_with(how: str, group: cd.Group, source: int, **terms: Any) -> Any:
    if how == "blocking":
        return group.recv(source, **terms)
    work = group.recv(source, async_op=True, **terms)
    return work.result()


def test_who_leaves_ends_only_what_waits_for_it(cluster: Any, workers: int) -> None:
    left = threading.Event()

    def body(group: cd.Group) -> Any:
        if group.rank == 2:
            group.send(7.0, 0)
            group.leave()
            left.set()
            return None
        left.wait(20)
        if group.rank == 0:
            assert group.recv(2) == 7.0
        with pytest.raises(cd.errors.AbortedError) as caught:
            group.recv(2, timeout=30)
        for number in range(100):  # the others go on
            group.send(number, 1 - group.rank)
            assert group.recv(1 - group.rank) == number
        return [member.rank for member in caught.value.missing]

    assert cluster.run(3, body)[:2] == [[2], [2]]


@pytest.mark.parametrize("how", ["blocking", "async"])
def test_an_abort_ends_what_waits(cluster: Any, workers: int, how: str) -> None:
    waits = threading.Barrier(3)

    def body(group: cd.Group) -> list[int]:
        if group.rank == 2:
            waits.wait(20)
            time.sleep(0.05)
            group.abort("enough of this")
        with pytest.raises(cd.errors.AbortedError, match="enough of this") as caught:
            if group.rank == 2:
                group.recv(0)
            waits.wait(20)
            receive_with(how, group, 1 - group.rank)
        return [member.rank for member in caught.value.missing]

    assert cluster.run(3, body)[:2] == [[2], [2]]


CLIENT = """
import sys, collectived as cd
with cd.connect() as session:
    group = session.join(timeout=20)
    group.send(5.0, 0)
    group.barrier()
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["blocking", "async"])
def test_a_recv_from_a_rank_that_dies_names_it_and_what_it_sent_before_arrives(
    cluster: Any, workers: int, how: str
) -> None:
    name = f"dies-{how}-{workers}"
    with (
        cluster.client(1, 2, name, CLIENT) as client,
        cd.connect(cluster.addresses[0]) as session,
        session.join(name, 2, rank=0, timeout=20) as group,
    ):
        try:
            group.barrier()
            assert client.stdout.readline() == "ready\n"
            killer = threading.Timer(0.2, client.kill)
            killer.start()
            assert group.recv(1) == 5.0
            with pytest.raises(cd.errors.UnavailableError) as caught:
                receive_with(how, group, 1, timeout=30)
            assert [member.rank for member in caught.value.missing] == [1]
            killer.join()
        finally:
            client.kill()


def test_messages_that_nobody_receives_use_up_a_share_of_memory_and_then_their_sender_fails(
    make_cluster: Callable[..., Cluster], workers: int
) -> None:
    cluster = make_cluster(workers, worker_options=("--memory-limit", "96MiB"))
    done = threading.Event()

    def body(group: cd.Group) -> Any:
        if group.rank == 0:
            with pytest.raises(cd.errors.ResourceExhaustedError) as caught:
                for _ in range(40):
                    group.send(np.zeros(1 << 20, np.uint8), 1, timeout=30)
                group.barrier(timeout=30)
            done.set()
        else:
            done.wait(30)
            with pytest.raises(cd.errors.ResourceExhaustedError) as caught:
                group.barrier(timeout=30)
        return [member.rank for member in caught.value.missing]

    assert cluster.run(2, body) == [[0], [0]]


def test_thousands_of_messages_may_be_sent_before_any_is_received(cluster: Any, workers: int) -> None:
    count = 3000

    def body(group: cd.Group) -> bool:
        other = 1 - group.rank
        for number in range(count):
            group.send(number, other, timeout=60)
        return [int(group.recv(other, timeout=60)) for _ in range(count)] == list(range(count))

    assert cluster.run(2, body) == [True, True]


def test_a_mismatch_of_others_ends_what_waits_and_messages_go_on_in_the_successor(cluster: Any, workers: int) -> None:
    def body(group: cd.Group) -> float:
        waiting = group.recv((group.rank + 1) % 3, tag=9, async_op=True)
        with pytest.raises(cd.errors.InvalidArgumentError):
            group.all_reduce("sum", np.ones(2 + (group.rank == 2)))
        with pytest.raises(cd.errors.InvalidArgumentError):
            waiting.result()
        group.send(float(group.rank), (group.rank + 2) % 3, tag=9)
        return float(group.recv((group.rank + 1) % 3, tag=9))

    assert cluster.run(3, body) == [1.0, 2.0, 0.0]
