"""Stragglers: how much later than the earliest of its group a rank submits, on average.

No clocks are compared. In a collective in which every rank waits for all others they are all through at about the same
moment, so a rank that waits a second less than another has come a second later. Heartbeats report how long each rank
has waited in all. The lateness of a rank is the time per collective that it waits less than the rank that waits most. A
rank for which others wait right now is late by at least as long as they have waited.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from collectived_proto.types import RankPosition, unscoped_name
from collectived_runtime.coordinator.core.registry import GenerationRecord, Registry, WaitStats

MAX_STRAGGLERS = 32  # ranks that are reported
FRESH_HEARTBEATS = 3.0  # for so long a rank's report says something about it


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank, and by how many seconds it comes late."""

    group: str
    rank: int
    worker: int
    seconds: float


def update_wait_stats(generation: GenerationRecord, task: int, positions: Iterable[RankPosition], now: float) -> None:
    """Take in what a heartbeat of this worker says about its own ranks."""
    own = generation.ranks_by_worker.get(task, ())
    for position in positions:
        if position.rank not in own or not position.waits:
            continue
        pace = generation.wait_stats.setdefault(position.rank, WaitStats())
        more = position.waits - pace.waits
        if more > 0:
            pace.mean = max(0.0, position.waited_seconds - pace.waited_seconds) / more
            pace.updated_at = now
        pace.waits, pace.waited_seconds = position.waits, position.waited_seconds


def select_worst(late: Iterable[Straggler]) -> list[Straggler]:
    """The ranks that come last, the latest first; at most `MOST`."""
    return heapq.nlargest(MAX_STRAGGLERS, late, key=lambda one: one.seconds)


def find_stragglers(registry: Registry, generation: GenerationRecord, now: float) -> Iterator[Straggler]:
    """The ranks of a generation that come later than the earliest."""
    if generation.is_over or generation.idle:
        return
    since = now - FRESH_HEARTBEATS * registry.heartbeat_seconds
    means = {rank: pace.mean for rank, pace in generation.wait_stats.items() if pace.updated_at >= since}
    most = max(means.values(), default=0.0)
    seconds = {rank: most - mean for rank, mean in means.items() if mean < most}
    if generation.evidence:
        instance = min(generation.evidence)
        waited = registry.stall_seconds + max(0.0, now - generation.evidence[instance].since)
        for rank in generation.missing_ranks(instance):
            seconds[rank] = max(waited, seconds.get(rank, 0.0))
    group, members = unscoped_name(generation.info.name), generation.info.members
    for rank, by in seconds.items():
        if rank not in generation.departed:
            yield Straggler(group, rank, members[rank].worker, by)
