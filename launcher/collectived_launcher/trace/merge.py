"""Who had not arrived: what the accounts of all workers say together of collectives that have not succeeded. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from collectived_launcher.trace.gather import Account, Worker
from collectived_proto.v1.trace_pb2 import TraceLane, TraceRank

Key = tuple[int, int, int]  # of the group, generation, instance


@dataclass(frozen=True, slots=True)
class Absence:
    """A rank that somebody has waited for, or still waits for. Times are the trace's, in seconds.

    over: the collective has failed meanwhile; else it still waits. known: what the rank did last, where its worker
    told it.
    """

    group: str
    key: Key
    op: str
    site: str
    rank: int
    task: int
    since: float
    until: float
    over: bool
    waiting: tuple[int, ...]  # ranks that have arrived
    known: TraceRank | None = None

    @property
    def text(self) -> str:
        return f"rank {self.rank} {'had' if self.over else 'has'} not arrived"


@dataclass(slots=True)
class _Together:
    """One collective by all accounts."""

    group: str
    size: int
    op: str = ""
    site: str = ""
    arrived: dict[int, float] = field(default_factory=dict)
    open: bool = False
    missing: set[int] = field(default_factory=set)  # as a verdict says
    ended: float = 0.0
    here: set[int] = field(default_factory=set)  # ranks of workers where it has succeeded


def absences(account: Account) -> list[Absence]:
    """Ranks that were waited for in vain, and those that are waited for now; first who is waited for longest."""
    told = _together(account)
    found = [absence for key, one in told.items() for absence in _of(account, key, one)]
    return sorted(found, key=lambda absence: (absence.over, absence.since, absence.rank))


def _together(account: Account) -> dict[Key, _Together]:
    found: dict[Key, _Together] = {}
    for worker in account.workers.values():
        for collective in worker.collectives:
            if collective.HasField("peer"):
                continue
            lane = worker.lanes[collective.lane]
            key = (lane.key, collective.generation, collective.instance)
            one = found.setdefault(key, _Together(lane.group, lane.size))
            one.op = one.op or collective.op
            for arrival in collective.arrivals:
                one.arrived.setdefault(arrival.rank, arrival.at + worker.shift)
                one.site = one.site or arrival.site
            if not collective.ended:
                one.open = True
            elif collective.code:
                one.missing.update(collective.missing)
                one.ended = max(one.ended, collective.ended + worker.shift)
            else:
                one.here.update(lane.ranks)
    return found


def _of(account: Account, key: Key, one: _Together) -> Iterator[Absence]:
    if not one.arrived or not (one.open or one.missing):
        return
    since, waiting = min(one.arrived.values()), tuple(sorted(one.arrived))
    for rank in range(one.size):
        if rank in one.arrived or rank in one.here:
            continue
        worker, lane = _worker_of(account, key, rank)
        known = _standing(lane, rank)
        if not one.open:
            if rank in one.missing:
                task = worker.task if worker is not None else _task_of(account, key, rank)
                ended = one.ended
                yield Absence(one.group, key, one.op, one.site, rank, task, since, ended, True, waiting, known)
        elif worker is not None and _has_not_come(lane, known, key):
            now = worker.now + worker.shift
            until = max(now, since)
            yield Absence(one.group, key, one.op, one.site, rank, worker.task, since, until, False, waiting, known)


def _has_not_come(lane: TraceLane | None, known: TraceRank | None, key: Key) -> bool:
    if lane is None or known is None:
        return False
    return lane.generation == key[1] and known.submitted < key[2]


def _worker_of(account: Account, key: Key, rank: int) -> tuple[Worker | None, TraceLane | None]:
    """The worker of a rank, where it has told of the group as it is now."""
    for worker in account.workers.values():
        for lane in worker.lanes:
            if lane.key == key[0] and lane.living and rank in lane.ranks:
                return worker, lane
    return None, None


def _task_of(account: Account, key: Key, rank: int) -> int:
    """The number of its worker by what others say; -1 where nobody does."""
    for worker in account.workers.values():
        for lane in worker.lanes:
            if lane.key == key[0]:
                if rank in lane.ranks:
                    return worker.task
                for place in lane.places:
                    if rank in place.ranks:
                        return place.task
    return -1


def _standing(lane: TraceLane | None, rank: int) -> TraceRank | None:
    return next((one for one in lane.standings if one.rank == rank), None) if lane is not None else None
