"""A census: what the coordinator counts, for whoever measures it; cheaper than a snapshot, and nothing of clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from collectived_proto.types import shown_name
from collectived_runtime.coordinator import lateness
from collectived_runtime.coordinator.lateness import Late
from collectived_runtime.coordinator.registry import Counts, Generation, Registry


@dataclass(frozen=True, slots=True)
class WorkerCount:
    task: int
    connected: bool
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class GroupCount:
    """A group that runs: how many of its instances lanes have reported as waiting, for how many ranks the first one
    waits, and for how many seconds it has. None of a group in which waiting is normal."""

    name: str
    waiting: int
    missing: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Census:
    """`joining` ranks wait in `forming` groups; `counts` go on growing."""

    workers: tuple[WorkerCount, ...]
    groups: tuple[GroupCount, ...]  # the oldest first
    forming: int
    joining: int
    late: tuple[Late, ...]
    counts: Counts


def census(book: Registry, now: float) -> Iterator[Census | None]:
    """Takes a census: None after each thing that needs some thinking, where others may go first; at last the census."""
    workers = tuple(
        WorkerCount(task, worker.connected, max(0.0, now - worker.heard_at))
        for task, worker in sorted(book.workers.items())
    )
    yield None
    groups: list[GroupCount] = []
    late: list[Late] = []
    for _, generation in sorted(book.generations.items()):
        if not generation.over and generation.info.generation not in book.measurements:
            groups.append(_group(book, generation, now))
            late = lateness.latest([*late, *lateness.late(book, generation, now)])
            yield None
    forming = len(book.forming) + len(book.measurements)
    joining = sum(len(forming.waiting) for forming in book.forming.values())
    yield Census(workers, tuple(groups), forming, joining, tuple(late), book.counts)


def _group(book: Registry, generation: Generation, now: float) -> GroupCount:
    name = shown_name(generation.info.name)
    if generation.idle or not generation.evidence:
        return GroupCount(name, 0, 0, 0.0)
    first = min(generation.evidence)
    waited = book.stall_seconds + max(0.0, now - generation.evidence[first].since)
    return GroupCount(name, len(generation.evidence), len(lateness.missing(generation, first)), waited)
