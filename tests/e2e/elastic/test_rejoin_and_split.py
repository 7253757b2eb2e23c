"""After a failure, and when others want to come in: rejoin, waiting, split, and groups whose waiting is normal."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.waiting import settle

import collectived as cd


def rank_of(cluster: Any, rank: int, size: tuple[int, int], body: Any, name: str, **given: Any) -> Any:
    with cd.connect(cluster.address_of(rank, 3)) as session:
        group = session.join(name, size, timeout=20, **given)
        with group:
            return body(group)


@pytest.mark.parametrize("workers", ["one_worker", "two_workers"])
def test_all_ranks_rejoin_after_a_failure_and_hear_what_each_had_finished(
    workers: str, request: pytest.FixtureRequest
) -> None:
    cluster: Any = request.getfixturevalue(workers)

    def body(group: cd.Group) -> Any:
        first = group.generation
        for _ in range(3):
            group.all_reduce("sum", 1.0)
        if group.rank == 1:
            group.abort("enough")
        with pytest.raises(cd.errors.AbortedError) as caught:
            group.all_reduce("sum", 1.0)
        assert caught.value.rejoin
        assert group.rejoin(timeout=20) is group
        assert group.generation > first and group.size == 2
        assert [member.last_instance for member in group.members] == [2, 2]
        return group.all_reduce("sum", 1.0)

    assert cluster.run(2, body) == [2.0, 2.0]


def test_what_ends_while_a_rank_leaves_for_the_next_generation_is_among_what_it_has_finished(one_worker: Any) -> None:
    def body(group: cd.Group) -> list[int]:
        group.barrier()
        group.barrier(async_op=True)
        group.rejoin(timeout=20)
        return [member.last_instance for member in group.members]

    assert one_worker.run(2, body) == [[1, 1], [1, 1]]


def test_a_warm_name_can_be_joined_again_and_again(one_worker: Any) -> None:
    def body(group: cd.Group) -> int:
        generations = {group.generation}
        for _ in range(20):
            group.rejoin(timeout=20)
            generations.add(group.generation)
            assert group.all_reduce("sum", 1.0) == 2.0
        return len(generations)

    assert one_worker.run(2, body) == [21, 21]


def test_a_rank_that_is_lost_is_gone_from_the_next_generation_of_an_elastic_group(two_workers: Any) -> None:
    gone = threading.Event()

    def stays(group: cd.Group) -> Any:
        group.all_reduce("sum", 1.0)
        gone.wait(20)
        with pytest.raises(cd.errors.UnavailableError):
            while True:
                group.all_reduce("sum", 1.0)
        group.rejoin(timeout=20)
        return group.size, group.all_reduce("sum", 1.0)

    def goes(session: cd.Session, group: cd.Group) -> None:
        group.all_reduce("sum", 1.0)
        session._transport.close()  # as if the process had died
        gone.set()

    with ThreadPoolExecutor(3) as pool:
        staying = [
            pool.submit(rank_of, two_workers, rank, (2, 3), stays, "elastic-loss", settle=0.3) for rank in range(2)
        ]
        session = cd.connect(two_workers.address_of(2, 3))
        pool.submit(goes, session, session.join("elastic-loss", (2, 3), settle=0.3, timeout=20)).result(20)
        assert [one.result(20) for one in staying] == [(2, 2.0), (2, 2.0)]
    session.close()


def test_all_ranks_see_a_newcomer_with_the_same_collective_and_let_it_in(two_workers: Any) -> None:
    running = threading.Barrier(3)

    def old(group: cd.Group) -> Any:
        seen = []
        running.wait(20)
        while not group.waiting:
            seen.append(group.all_reduce("sum", 1.0))
        steps = len(seen)
        group.rejoin(timeout=20)
        return steps, group.size, group.all_reduce("sum", 1.0)

    def new(group: cd.Group) -> Any:
        return group.size, group.all_reduce("sum", 1.0)

    def late() -> Any:
        running.wait(20)
        return rank_of(two_workers, 2, (2, 3), new, "elastic-more", settle=0.2)

    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(rank_of, two_workers, rank, (2, 3), old, "elastic-more", settle=0.2) for rank in range(2)]
        third = pool.submit(late)
        one, other = (future.result(30) for future in first)
        assert one == other and one[1:] == (3, 3.0)
        assert third.result(30) == (3, 3.0)


def test_a_group_splits_by_color_in_order_of_key(two_workers: Any) -> None:
    def body(group: cd.Group) -> Any:
        halves = group.split(group.rank % 2, key=-group.rank)
        assert halves is not None
        with halves:
            ranks = halves.all_gather(np.array([group.rank]))
        none = group.split(None if group.rank else 7)
        if none is not None:
            assert none.size == 1
            none.leave()
        group.barrier()
        return ranks.tolist(), halves.rank

    assert two_workers.run(4, body) == [([2, 0], 1), ([3, 1], 1), ([2, 0], 0), ([3, 1], 0)]


def test_nobody_is_warned_of_waiting_in_an_idle_group(make_cluster: Any) -> None:
    cluster = make_cluster(2)

    def body(group: cd.Group) -> None:
        group.barrier()  # for a rank's first call there is more patience
        if group.rank:
            seconds_waited(cluster, 1.5)
        group.barrier()

    cluster.run(2, body, idle=True)
    assert "waiting" not in cluster.log and "waited" not in cluster.log
    cluster.run(2, body)
    assert "has waited" in cluster.log


def seconds_waited(cluster: Any, seconds: float) -> None:
    """Returns when status tells of something that has been in flight for so long."""
    settle(
        lambda: any(
            flight.seconds > seconds
            for worker in cluster.status().workers
            for group_loop in worker.lanes
            for flight in group_loop.in_flight
        )
    )


@pytest.mark.parametrize("size", [0, (3, 2), "2", 1.5])
def test_a_size_that_cannot_be_is_refused_before_the_group_is_left(one_worker: Any, size: Any) -> None:
    def body(group: cd.Group) -> float:
        with pytest.raises((TypeError, ValueError), match="size must be"):
            group.rejoin(size)
        return float(group.all_reduce("sum", 1.0))

    assert one_worker.run(2, body) == [2.0, 2.0]


def test_who_aborts_right_after_joining_is_heard_with_its_reason(one_worker: Any) -> None:
    def body(group: cd.Group) -> str:
        if group.rank:
            with pytest.raises(RuntimeError), group:
                raise RuntimeError("no data")
            return ""
        with pytest.raises(cd.errors.AbortedError) as caught:
            group.barrier()
        return str(caught.value)

    for _ in range(20):
        assert "RuntimeError: no data" in one_worker.run(2, body)[0]
