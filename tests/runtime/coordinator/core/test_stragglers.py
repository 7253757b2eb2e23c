"""Who comes last, and the census: from what heartbeats and reports tell, without any clock being compared."""

from __future__ import annotations

from typing import Any

import pytest

from collectived_proto.types import GroupInfo, Member, RankPosition
from collectived_runtime.coordinator.core import stragglers
from collectived_runtime.coordinator.core.events import WorkerHello
from collectived_runtime.coordinator.core.registry import (
    Evidence,
    FormingGroup,
    GenerationRecord,
    Registry,
    WorkerRecord,
)
from collectived_runtime.coordinator.core.stragglers import MAX_STRAGGLERS
from collectived_runtime.coordinator.metrics import GroupSample, MetricsSnapshot, collect_metrics


def group(
    registry: Registry, size: int, workers: int = 2, name: str = "job/world", number: int = 100
) -> GenerationRecord:
    """A generation whose ranks are dealt out to workers in turn."""
    members = tuple(Member(rank, "CPU:0", rank % workers, "host", 1000 + rank) for rank in range(size))
    made = GenerationRecord(GroupInfo(name, 7, number, members))
    registry.generations[number] = made
    return made


def beat(generation: GenerationRecord, now: float, **waited: tuple[int, float]) -> None:
    """One heartbeat of every worker, by rank: how many collectives, and seconds that they waited in all."""
    for task in generation.ranks_by_worker:
        positions = [
            RankPosition(int(rank[1:]), waits=waits, waited_seconds=seconds)
            for rank, (waits, seconds) in waited.items()
        ]
        stragglers.update_wait_stats(generation, task, positions, now)


def counted(registry: Registry, now: float) -> MetricsSnapshot:
    *pauses, found = collect_metrics(registry, now)
    assert found is not None and not any(pauses)
    return found


def seconds(registry: Registry, now: float) -> dict[int, Any]:
    return {late.rank: pytest.approx(late.seconds) for late in counted(registry, now).stragglers}


def test_who_waits_least_comes_last() -> None:
    registry = Registry(1, 5.0, 1.0)
    generation = group(registry, 3)
    beat(generation, 0.0, r0=(10, 2.0), r1=(10, 2.0), r2=(10, 0.5))
    assert seconds(registry, 1.0) == {2: 0.15}


def test_it_is_about_the_time_between_the_last_two_heartbeats() -> None:
    registry = Registry(1, 5.0, 1.0)
    generation = group(registry, 2)
    beat(generation, 0.0, r0=(10, 10.0), r1=(10, 0.0))
    beat(generation, 5.0, r0=(20, 10.0), r1=(20, 3.0))
    assert seconds(registry, 6.0) == {0: 0.3}
    beat(generation, 10.0, r0=(20, 10.0), r1=(20, 3.0))
    assert seconds(registry, 11.0) == {0: 0.3}, "nothing has been done since"


def test_what_was_told_long_ago_says_nothing_any_more() -> None:
    registry = Registry(1, 5.0, 1.0)
    generation = group(registry, 2)
    beat(generation, 0.0, r0=(10, 10.0), r1=(10, 0.0))
    assert seconds(registry, 15.0) and not seconds(registry, 15.1)


def test_who_is_waited_for_now_is_late_by_that() -> None:
    registry = Registry(1, 5.0, 1.0)
    generation = group(registry, 2)
    generation.update_progress(0, -1, [RankPosition(0, 4)], 0.0)
    generation.evidence[4] = Evidence(20.0)
    assert seconds(registry, 22.0) == {1: 3.0}
    assert counted(registry, 22.0).groups == (GroupSample("world", 1, 1, 3.0),)


def test_what_is_idle_over_or_gone_is_not_late() -> None:
    registry = Registry(1, 5.0, 1.0)
    spoiled: tuple[dict[str, Any], ...] = ({"idle": True}, {"failed": True}, {"departed": {1: None}})
    for number, spoil in enumerate(spoiled):
        generation = group(registry, 3, number=number)
        beat(generation, 0.0, r0=(1, 1.0), r1=(1, 0.0), r2=(1, 1.0))
        for name, value in spoil.items():
            setattr(generation, name, value)
    assert not seconds(registry, 1.0)


def test_a_worker_is_believed_about_its_own_ranks_alone() -> None:
    registry = Registry(1, 5.0, 1.0)
    generation = group(registry, 2)
    stragglers.update_wait_stats(generation, 0, [RankPosition(1, waits=1, waited_seconds=9.0)], 0.0)
    assert not generation.wait_stats


def test_only_the_latest_are_told_however_many_there_are() -> None:
    registry = Registry(1, 5.0, 1.0)
    for number in range(4):
        generation = group(registry, 50, name=f"job/g{number}", number=number)
        beat(generation, 0.0, **{f"r{rank}": (1, 100.0 - 50 * number - rank) for rank in range(50)})
    late = counted(registry, 1.0).stragglers
    assert len(late) == MAX_STRAGGLERS
    assert [one.seconds for one in late] == sorted((one.seconds for one in late), reverse=True)
    assert late[0].rank == 49


def test_a_census_counts_workers_and_groups() -> None:
    registry = Registry(1, 5.0, 1.0)
    hello = WorkerHello(3, "i", "host", 1, (), "unix:/w", "127.0.0.1:1")
    registry.workers[3] = WorkerRecord(hello, last_seen_at=10.0, connected=False)
    forming = FormingGroup("job/next", 2, 2, 0.0, since=0.0)
    registry.forming["job/next"] = forming
    idle = group(registry, 2, number=5)
    idle.idle, idle.evidence[0] = True, Evidence(0.0)
    found = counted(registry, 12.0)
    assert [(worker.task, worker.connected, worker.silent_seconds) for worker in found.workers] == [(3, False, 2.0)]
    assert (found.forming_groups, found.joining_ranks) == (1, 0)
    assert found.groups == (GroupSample("world", 0, 0, 0.0),), "in an idle group waiting is normal"
