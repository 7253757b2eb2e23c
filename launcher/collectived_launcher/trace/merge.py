"""Who had not arrived: what the accounts of all workers say together of collectives that have not succeeded. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from collectived_launcher.trace.gather import Account, Worker
from collectived_proto.errors import Code
from collectived_proto.v1.trace_pb2 import TraceLane, TraceRank

Key = tuple[int, int, int]  # of the group, generation, instance


@dataclass(frozen=True, slots=True)
class Absence:
    """A rank that somebody has waited for, or still waits for. Times are the trace's, in seconds.

    task: of its worker; None where nobody says it. code: with which the collective has failed; 0 while it waits. known:
    what the rank did last, where its worker told it.
    """

    group: str
    key: Key
    op: str
    site: str
    rank: int
    task: int | None
    since: float
    until: float
    code: int
    waiting: tuple[int, ...]  # ranks that have arrived
    known: TraceRank | None = None

    @property
    def text(self) -> str:
        return f"rank {self.rank} {_FATES.get(self.code, 'has not arrived')}"

    @property
    def lost(self) -> bool:
        """Whether it had come or not is not known."""
        return self.code in (Code.UNAVAILABLE, Code.ABORTED)


# What verdicts say of the ranks that they name; those of other codes do not say that anybody was waited for.
_FATES: dict[int, str] = {
    Code.DEADLINE_EXCEEDED: "had not arrived",
    Code.UNAVAILABLE: "was lost",
    Code.ABORTED: "has aborted or left",
}


@dataclass(slots=True)
class _Together:
    """One collective by all accounts."""

    group: str
    size: int
    op: str = ""
    site: str = ""
    arrived: dict[int, float] = field(default_factory=dict)
    open: bool = False
    missing: dict[int, int] = field(default_factory=dict)  # rank -> code of the verdict that names it
    ended: float = 0.0
    here: set[int] = field(default_factory=set)  # ranks of workers where it has succeeded


def absences(account: Account) -> list[Absence]:
    """Ranks that were waited for in vain, and those that are waited for now; first who is waited for longest."""
    told = _together(account)
    found = [absence for key, one in told.items() for absence in _of(account, key, one)]
    return sorted(found, key=lambda absence: (absence.code != 0, absence.since, absence.rank))


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
                if collective.code in _FATES:
                    one.missing.update(dict.fromkeys(collective.missing, collective.code))
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
                ended, code = one.ended, one.missing[rank]
                yield Absence(one.group, key, one.op, one.site, rank, task, since, ended, code, waiting, known)
        elif worker is not None and _has_not_come(lane, known, key):
            now = worker.now + worker.shift
            until = max(now, since)
            yield Absence(one.group, key, one.op, one.site, rank, worker.task, since, until, 0, waiting, known)


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


def _task_of(account: Account, key: Key, rank: int) -> int | None:
    """The number of its worker by what others say; None where nobody does."""
    for worker in account.workers.values():
        for lane in worker.lanes:
            if lane.key == key[0]:
                if rank in lane.ranks:
                    return worker.task
                for place in lane.places:
                    if rank in place.ranks:
                        return place.task
    return None


def _standing(lane: TraceLane | None, rank: int) -> TraceRank | None:
    return next((one for one in lane.standings if one.rank == rank), None) if lane is not None else None
