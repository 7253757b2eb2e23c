"""Ranks that had not arrived at collectives that have not succeeded, by the accounts of all workers. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from collectived_launcher.trace.collect import CollectedTrace, TracedProcess
from collectived_proto.errors import Code
from collectived_proto.v1.trace_pb2 import TraceLane, TraceRank

CollectiveKey = tuple[int, int, int]  # of the group, generation, instance


@dataclass(frozen=True, slots=True)
class Absence:
    """A rank for which others have waited, or still wait. Times are the trace's, in seconds.

    task: of its worker; None where no account says it. code: with which the collective has failed; 0 while it waits.
    known: the last action of the rank, where its worker reported it.
    """

    group: str
    key: CollectiveKey
    op: str
    site: str
    rank: int
    task: int | None
    since: float
    until: float
    code: int
    waiting: tuple[int, ...]  # ranks that have arrived
    last_state: TraceRank | None = None

    @property
    def text(self) -> str:
        return f"rank {self.rank} {_FATE_TEXTS.get(self.code, 'has not arrived')}"

    @property
    def is_lost(self) -> bool:
        """Whether it had come or not is not known."""
        return self.code in (Code.UNAVAILABLE, Code.ABORTED)


# Texts about the ranks that a verdict names, by its code. Other codes do not say that a rank was waited for.
_FATE_TEXTS: dict[int, str] = {
    Code.DEADLINE_EXCEEDED: "had not arrived",
    Code.UNAVAILABLE: "was lost",
    Code.ABORTED: "has aborted or left",
}


@dataclass(slots=True)
class _MergedCollective:
    """One collective by all accounts."""

    group: str
    size: int
    op: str = ""
    site: str = ""
    arrived: dict[int, float] = field(default_factory=dict)
    is_open: bool = False
    missing: dict[int, int] = field(default_factory=dict)  # rank -> code of the verdict that names it
    ended_at: float = 0.0
    succeeded_ranks: set[int] = field(default_factory=set)  # ranks of workers where it has succeeded


def find_absences(account: CollectedTrace) -> list[Absence]:
    """Ranks that were waited for in vain, and those that are waited for now; first the longest wait."""
    told = _merge_collectives(account)
    found = [absence for key, one in told.items() for absence in _find_absences_in(account, key, one)]
    return sorted(found, key=lambda absence: (absence.code != 0, absence.since, absence.rank))


def _merge_collectives(account: CollectedTrace) -> dict[CollectiveKey, _MergedCollective]:
    found: dict[CollectiveKey, _MergedCollective] = {}
    for worker in account.workers.values():
        for collective in worker.collectives:
            if collective.HasField("peer"):
                continue
            group_loop = worker.group_loops[collective.lane]
            key = (group_loop.key, collective.generation, collective.instance)
            one = found.setdefault(key, _MergedCollective(group_loop.group, group_loop.size))
            one.op = one.op or collective.op
            for arrival in collective.arrivals:
                one.arrived.setdefault(arrival.rank, arrival.at + worker.clock_offset)
                one.site = one.site or arrival.site
            if not collective.ended:
                one.is_open = True
            elif collective.code:
                if collective.code in _FATE_TEXTS:
                    one.missing.update(dict.fromkeys(collective.missing, collective.code))
                one.ended_at = max(one.ended_at, collective.ended + worker.clock_offset)
            else:
                one.succeeded_ranks.update(group_loop.ranks)
    return found


def _find_absences_in(account: CollectedTrace, key: CollectiveKey, one: _MergedCollective) -> Iterator[Absence]:
    if not one.arrived or not (one.is_open or one.missing):
        return
    since, waiting = min(one.arrived.values()), tuple(sorted(one.arrived))
    for rank in range(one.size):
        if rank in one.arrived or rank in one.succeeded_ranks:
            continue
        worker, group_loop = _find_worker(account, key, rank)
        known = _find_trace_rank(group_loop, rank)
        if not one.is_open:
            if rank in one.missing:
                task = worker.task if worker is not None else _find_task(account, key, rank)
                ended, code = one.ended_at, one.missing[rank]
                yield Absence(one.group, key, one.op, one.site, rank, task, since, ended, code, waiting, known)
        elif worker is not None and _has_not_arrived(group_loop, known, key):
            now = worker.now + worker.clock_offset
            until = max(now, since)
            yield Absence(one.group, key, one.op, one.site, rank, worker.task, since, until, 0, waiting, known)


def _has_not_arrived(group_loop: TraceLane | None, known: TraceRank | None, key: CollectiveKey) -> bool:
    if group_loop is None or known is None:
        return False
    return group_loop.generation == key[1] and known.submitted < key[2]


def _find_worker(
    account: CollectedTrace, key: CollectiveKey, rank: int
) -> tuple[TracedProcess | None, TraceLane | None]:
    """The worker of a rank, where it has reported the current generation of the group."""
    for worker in account.workers.values():
        for group_loop in worker.group_loops:
            if group_loop.key == key[0] and group_loop.living and rank in group_loop.ranks:
                return worker, group_loop
    return None, None


def _find_task(account: CollectedTrace, key: CollectiveKey, rank: int) -> int | None:
    """The number of its worker by the accounts of others; None where none has it."""
    for worker in account.workers.values():
        for group_loop in worker.group_loops:
            if group_loop.key == key[0]:
                if rank in group_loop.ranks:
                    return worker.task
                for place in group_loop.places:
                    if rank in place.ranks:
                        return place.task
    return None


def _find_trace_rank(group_loop: TraceLane | None, rank: int) -> TraceRank | None:
    return next((one for one in group_loop.standings if one.rank == rank), None) if group_loop is not None else None
