"""The flight recorder of a worker: what its group loops did last, kept always, read without asking any of them.

A *ring* is a list of fixed length. A group loop puts one tuple into it for each collective, when that has ended; the
oldest is overwritten. Nothing is encoded, looked up or locked there, and a reader takes a copy of the list, so that
neither waits for the other. Failed collectives go to a ring of their own, which a busy group cannot flush. Collectives
that are still under way are in no ring: readers find them in the trackers of the group loops (`observe/trace.py`).

*Marks* are the intervals within a collective: its tasks, their folds, and their moves as far as they fit.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from collectived_proto.types import Verdict
from collectived_runtime.engine.record.segment_history import PastInstance
from collectived_runtime.engine.submit.contracts import PreparedCollective
from collectived_runtime.engine.submit.tracker import Instance, Mark

MAX_ENTRIES = 8192  # collectives that have ended, of all groups of a worker
MAX_FAILED_ENTRIES = 512
MOST_MOVES = 9  # of one collective are marked, folds among them; later ones are not, so that none pays for more
MOST_MARKS = 11  # with its tasks

_AT = attrgetter("arrived_at")
_SITE = attrgetter("prepared.collective.site")


class MarkKind(enum.IntEnum):
    """The meaning of the time between a mark's two ends."""

    STRAND = 1  # a pack or shard was carried out; the released contract calls it so
    FOLD = 2  # the local ranks were folded, or what they have was put in place
    SEND = 3  # from the start of a round until the system below had taken all that goes to a peer in it
    RECEIVE = 4  # from the start of a round until all of a peer was there and folded
    PRELUDE = 5  # workers exchanged announcements, or lengths


STRAND, FOLD, SEND, RECEIVE, PRELUDE = map(
    int, MarkKind
)  # for group loops: to look into an enumeration costs as much again


@dataclass(frozen=True, slots=True)
class GroupLabel:
    """A group as one group loop of it knows it, in the few words that outlive the group loop.

    name: as its users call it. ranks: the local ones. tasks: of the group's workers. places: the ranks of each of them.
    """

    name: str
    key: int
    size: int
    ranks: tuple[int, ...]
    tasks: tuple[int, ...]
    places: tuple[tuple[int, ...], ...] = field(default=(), compare=False)  # the key says which group it is


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payload bytes that a program sends to the worker `task` and receives from it."""

    task: int
    sent: int
    received: int


@dataclass(frozen=True, slots=True)
class ProgramSummary:
    """The recorded data of a program, the same for all collectives that it carries out."""

    algorithm: str = ""
    nbytes: int = 0
    packs: int = 0
    shards: int = 0  # of the pack that has most
    traffic: tuple[Traffic, ...] = ()


EMPTY_SUMMARY = ProgramSummary()


class Entry(NamedTuple):
    """One collective, or one send or recv, that has ended here. Times are of this process's monotonic clock.

    number: counts the entries of a ring. instance: of a send or recv, its number from `messages.P2P_BASE` on.
    ranks, arrival_times, sites: of the local ranks that had come, when and from which line, in order of arrival.
    started_at: when the first stage began; 0 where it never did. code: 0 where it succeeded. missing: as the verdict
    names them. peer: of a send or recv, the rank at its other end; else -1.
    """

    number: int
    label: GroupLabel
    generation: int
    instance: int
    op: str
    summary: ProgramSummary
    ranks: tuple[int, ...]
    arrival_times: tuple[float, ...]
    sites: tuple[str, ...]
    started_at: float
    ended_at: float
    marks: Sequence[Mark] = ()
    code: int = 0
    message: str = ""
    missing: tuple[int, ...] = ()
    peer: int = -1


class RingBuffer:
    """A list of fixed length, with any number of writers and readers, none of which waits.

    Each step is one that the interpreter does not divide.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[tuple[Any, ...] | None] = [None] * size
        self.numbers = itertools.count()

    def put(self, fields: tuple[Any, ...]) -> None:
        """`fields` are those of an `Entry` but its number."""
        number = next(self.numbers)
        self.slots[number % self.size] = (number, *fields)

    def entries(self, first: int = 0) -> list[Entry]:
        """The entries from that number on, oldest first."""
        found = [slot for slot in self.slots[:] if slot is not None and slot[0] >= first]
        found.sort(key=lambda slot: int(slot[0]))
        return [Entry(*slot) for slot in found]


class FlightRecorder:
    """The records of one worker's collectives: those that ended last and those that failed last."""

    def __init__(self, kept: int = MAX_ENTRIES, kept_failed: int = MAX_FAILED_ENTRIES) -> None:
        self.completed = RingBuffer(kept)
        self.failed = RingBuffer(kept_failed)

    def entries(self) -> list[Entry]:
        """Everything that is kept, in the order in which it ended."""
        return sorted([*self.completed.entries(), *self.failed.entries()], key=lambda entry: entry.ended_at)


class PointToPointOp(Protocol):
    """A send or recv as it is recorded; `peer` is the rank at its other end."""

    rank: int
    number: int
    prepared: PreparedCollective
    peer: int
    submitted_at: float


class GroupRecorder:
    """The recorder as one group loop writes to it."""

    def __init__(self, recorder: FlightRecorder, label: GroupLabel) -> None:
        self.recorder = recorder
        self.label = label
        self._ring = recorder.completed

    def record_completed(self, generation: int, instance: Instance, summary: ProgramSummary, now: float) -> None:
        """A collective has ended well. On the path of every collective: it costs what `benchmarks.recorder` says."""
        arrivals = instance.arrivals
        came = arrivals.values()
        model = instance.reference
        ring = self._ring
        number = next(ring.numbers)
        ring.slots[number % ring.size] = (
            number,
            self.label,
            generation,
            instance.number,
            model.op if model is not None else "",
            summary,
            tuple(arrivals),
            tuple(map(_AT, came)),
            tuple(map(_SITE, came)),
            instance.started_at,
            now,
            instance.marks,
        )

    def record_past(
        self, generation: int, past: PastInstance, op: str, summary: ProgramSummary, sites: tuple[str, ...]
    ) -> None:
        """A collective that ranks have carried out by themselves; `sites` are of its arrivals."""
        ranks, times = tuple(one.rank for one in past.arrivals), tuple(one.at for one in past.arrivals)
        self._ring.put(
            (self.label, generation, past.number, op, summary, ranks, times, sites, times[-1], past.ended_at)
        )

    def record_failed(self, generation: int, instance: Instance, summary: ProgramSummary, verdict: Verdict) -> None:
        """A collective has failed by that verdict."""
        came = instance.ready_arrivals
        op = instance.reference.op if instance.reference is not None else ""
        arrived = tuple(arrival.arrived_at for arrival in came.values())
        sites = tuple(arrival.prepared.collective.site for arrival in came.values())
        times = (instance.started_at, time.monotonic(), tuple(instance.marks))
        summary = (
            summary
            if summary is not EMPTY_SUMMARY
            else ProgramSummary(nbytes=sum(leaf.nbytes for leaf in instance.collective.leaves))
        )
        told = (verdict.code, verdict.message, _ranks(verdict))
        self.recorder.failed.put(
            (self.label, generation, instance.number, op, summary, tuple(came), arrived, sites, *times, *told)
        )

    def record_point_to_point(
        self, generation: int, op: PointToPointOp, nbytes: int, verdict: Verdict | None = None, code: int = 0
    ) -> None:
        """A send or recv has ended: well, by that verdict, or a receive alone with that code."""
        told: tuple[Any, ...] = (code, "", ()) if verdict is None else (verdict.code, verdict.message, _ranks(verdict))
        ring = self.recorder.failed if told[0] else self._ring
        described, since = op.prepared, op.submitted_at
        where = (self.label, generation, op.number, described.op, ProgramSummary(nbytes=nbytes))
        arrival = ((op.rank,), (since,), (described.collective.site,))
        ring.put((*where, *arrival, since, time.monotonic(), (), *told, op.peer))


def _ranks(verdict: Verdict) -> tuple[int, ...]:
    return tuple(member.rank for member in verdict.missing)


def sum_traffic(moved: Iterable[tuple[int, int, int]]) -> tuple[Traffic, ...]:
    """The sums of (task, bytes sent, bytes received), by task."""
    sums: dict[int, list[int]] = {}
    for task, sent, received in moved:
        both = sums.setdefault(task, [0, 0])
        both[0] += sent
        both[1] += received
    return tuple(Traffic(task, *sums[task]) for task in sorted(sums))
