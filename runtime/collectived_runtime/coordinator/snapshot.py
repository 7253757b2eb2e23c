"""A snapshot: what the coordinator knows, as values for whoever asks; nothing in it changes afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from collectived_proto.types import Member, Tier, Verdict
from collectived_runtime.coordinator import completion, joins, judgement
from collectived_runtime.coordinator.events import Hello
from collectived_runtime.coordinator.registry import Departure, Forming, Generation, Registry

SHOWN_OVER = 16  # so many of the generations that are over


@dataclass(frozen=True, slots=True)
class WorkerView:
    hello: Hello
    connected: bool
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class PendingView:
    """An instance that lanes have reported as waiting."""

    instance: int
    op: str
    site: str
    seconds: float
    arrived: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupView:
    name: str
    key: int
    generation: int
    state: str  # forming | ready | draining | failed | ended
    size: int
    members: tuple[Member, ...] = ()
    left: tuple[Member, ...] = ()
    pending: tuple[PendingView, ...] = ()
    waiting_for: str = ""
    table: tuple[Tier, ...] = ()
    idle: bool = False
    forming_seconds: float = 0.0
    min_size: int = 0  # while an elastic one forms


@dataclass(frozen=True, slots=True)
class FailureView:
    seconds_ago: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Snapshot:
    epoch: int
    workers: tuple[WorkerView, ...]
    groups: tuple[GroupView, ...]
    failures: tuple[FailureView, ...]  # latest first


def snapshot(book: Registry, now: float) -> Snapshot:
    return Snapshot(
        book.epoch,
        tuple(
            WorkerView(worker.hello, worker.connected, max(0.0, now - worker.heard_at))
            for _, worker in sorted(book.workers.items())
        ),
        tuple(_groups(book, now)),
        tuple(FailureView(now - failure.at, failure.verdict) for failure in book.failures),
    )


def _groups(book: Registry, now: float) -> Iterator[GroupView]:
    for forming in book.forming.values():
        yield _forming(book, forming, now)
    for generation in book.generations.values():
        if not generation.over:
            yield _generation(book, generation, now)
    # Of what is over only the latest generation of each name, and of those the most recent.
    latest = (number for number in reversed(book.over) if number in book.latest.values())
    for number in islice(latest, SHOWN_OVER):
        yield _generation(book, book.generations[number], now)


def _forming(book: Registry, forming: Forming, now: float) -> GroupView:
    # Ranks are given when all are here; until then those who named none are shown in the gaps.
    free = (rank for rank in range(forming.max_size) if rank not in forming.taken)
    members = tuple(
        Member(next(free) if ask.rank is None else ask.rank, ask.device, task, ask.host, ask.pid, ask.label)
        for task, ask in ((waiting.task, waiting.ask) for waiting in forming.waiting.values())
    )
    text = joins.progress(book, forming)
    return GroupView(
        forming.name,
        book.keys.get(forming.name, 0),
        0,
        "forming",
        forming.max_size,
        members,
        waiting_for=text,
        forming_seconds=max(0.0, now - forming.since),
        min_size=forming.min_size if forming.min_size < forming.max_size else 0,
    )


def _generation(book: Registry, generation: Generation, now: float) -> GroupView:
    info = generation.info
    measuring = info.generation in book.measurements
    state = "ended" if generation.ended else "failed" if generation.failed else "forming" if measuring else "ready"
    state = "draining" if state == "ready" and generation.refused_from is not None else state
    left = [rank for rank, how in sorted(generation.departed.items()) if how is not Departure.MOVED]
    pending = tuple(_pending(generation, instance, book.stall_seconds, now) for instance in sorted(generation.evidence))
    return GroupView(
        info.name,
        info.key,
        info.generation,
        state,
        info.size,
        generation.members(now),
        generation.members(now, left),
        pending,
        completion.measuring_text(generation) if measuring else "",
        generation.table,
        generation.idle,
    )


def _pending(generation: Generation, instance: int, stall_seconds: float, now: float) -> PendingView:
    evidence = generation.evidence[instance]
    ranks = range(generation.info.size)
    arrived = tuple(rank for rank in ranks if generation.arrived(rank, instance))
    sites = (position.site for position in evidence.positions.values() if position.site)
    return PendingView(
        instance,
        judgement.operation(generation, instance),
        next(sites, ""),
        stall_seconds + max(0.0, now - evidence.since),
        arrived,
        tuple(rank for rank in ranks if rank not in arrived),
    )
