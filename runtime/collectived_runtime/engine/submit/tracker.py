"""The tracker of a group loop: which local rank has submitted which instance, what is due, and what has been decided.

Pure: arrivals, losses, verdicts and the time go in; instances to start, to report and to fail come out. The group loop
acts on it.

Instances are numbered on from those of the generation before, and run one after another. An instance *arrives* rank by
rank, is *started* when all local ranks are there with the same contract, and *finishes* or *fails* for each rank once.
A rank whose value is still being written by its GPU has submitted, and is compared with the others; it has arrived
when it can be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from collectived_proto.ipc.messages import MAX_OUTSTANDING
from collectived_proto.report.phrases import MAX_NAMED
from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Collective,
    Operation,
    RankPosition,
    ReduceScatter,
    Report,
    ReportKind,
    Submission,
    Verdict,
)
from collectived_runtime.engine.submit.contracts import PreparedCollective, receives_from_all

MAX_FINISHED = 64  # finished instances that are remembered, to answer what they were
MAX_LAST_SUBMISSIONS = 8  # of a rank that goes, reported with its departure
MAX_DESCRIBED_LEAVES = 4096  # so many of their leaves are described
_SYNCHRONISING_OPERATIONS = (
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Barrier,
)  # no rank is through before all have come
# Before a deadline or a stall, a missing rank is asked where it is; or at half, and a quarter, of the time.
DEADLINE_LEAD_SECONDS = 1.0
STALL_LEAD_SECONDS = 0.25
STALL_BACKOFF = 2.0  # a stall is reported again after twice the time


# An interval within an instance: kind (`MarkKind`), pack, shard, round, worker at the other end, begin, end.
Mark = tuple[int, int, int, int, int, float, float]

_UNKNOWN_COLLECTIVE = Collective(Barrier(), "", ())


@dataclass(slots=True)
class Arrival:
    """One rank's submission of one instance: where its value lies (the tracker does not look), and when it came.

    `inputs` is None once it will not be read any more, so that the client's memory is not held. Not `ready`: its GPU
    is still writing the value; `arrived_at` is when it rang, and becomes when it was ready. `is_lent`: it cannot
    complete without its rank, which moves the value itself.
    """

    prepared: PreparedCollective
    inputs: Any
    arrived_at: float
    ready: bool = True
    is_lent: bool = False


@dataclass(slots=True)
class Instance:
    number: int
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    deadline: float = math.inf
    timeout: float = 0.0  # that of the rank with the earliest deadline, in seconds
    stall_at: float = math.inf
    deadline_near_at: float = math.inf
    near_at: float = math.inf  # when a deadline or stall will be near; inf: none, or that has been reported
    stalled: bool = False  # reported as pending
    expired: bool = False  # reported as expired
    pending_writes: int = 0  # arrivals that are not ready
    is_barred: bool = False  # set by `bar`
    started: bool = False
    finished: bool = False
    started_at: float = 0.0
    marks: list[Mark] = field(default_factory=list)  # the marks of its course for the recorder
    reference: PreparedCollective | None = (
        None  # of the first rank that has a value of its own; until then of the first
    )
    collective: Collective = _UNKNOWN_COLLECTIVE  # as `reference` describes it, or as it was announced
    contract: bytes = b""
    rows: tuple[tuple[int, ...], ...] = ()  # of all ranks, where lengths differ and have been exchanged

    @property
    def first_arrival(self) -> Arrival:
        return next(iter(self.arrivals.values()))

    @property
    def last_arrival(self) -> Arrival:
        return next(reversed(self.arrivals.values()))

    @property
    def ready_arrivals(self) -> dict[int, Arrival]:
        """Those that are ready, in the order in which they were; may be read from any thread."""
        return {rank: arrival for rank, arrival in list(self.arrivals.items()) if arrival.ready}

    @property
    def open_ranks(self) -> tuple[int, ...]:
        """Local ranks that take what comes."""
        return tuple(rank for rank, arrival in self.arrivals.items() if arrival.prepared.collective.open)

    @property
    def form(self) -> bytes | tuple[object, ...]:
        """Its contract, and the lengths of all ranks where those are not part of it."""
        return (self.contract, self.rows) if self.rows else self.contract

    def bar(self) -> None:
        """Keep it from starting, or going on: something is wrong with it, and its verdict is on its way."""
        self.is_barred = True

    def describe(self, collective: Collective, contract: bytes) -> None:
        self.collective, self.contract = collective, contract


@dataclass(slots=True)
class RankProgress:
    """How far one local rank is.

    `received`: the last instance of which its submission has come. `submitted`: the last that has arrived, and all
    before it. `waited_seconds`: seconds from its submission to the end, of all those `waits` collectives in which every
    rank waits for all others. The last rank waits least.
    """

    received: int = -1
    submitted: int = -1
    finished: int = -1
    op: str = ""
    site: str = ""
    active_at: float = 0.0
    has_departed: bool = False  # lost, left or aborted: submits nothing more
    has_aborted: bool = False  # and is still there
    waits: int = 0
    waited_seconds: float = 0.0
    stack: str = ""  # where its threads were at `stack_at`, one a line
    stack_at: float = -math.inf
    is_stuck: bool = False  # does not go on where it moves its value itself

    @property
    def current_stack(self) -> str:
        """The same, if it has done nothing here since; ''."""
        return self.stack if self.stack_at >= self.active_at else ""


class OutOfOrder(Exception):
    """A rank submitted something that it must not submit now; says what."""


class InstanceTracker:
    """One generation of one group, as seen by one worker. `ranks` are the local ones, `first` the first instance."""

    def __init__(
        self, key: int, generation: int, ranks: Iterable[int], stall_after: float, now: float, first: int = 0
    ) -> None:
        self.key = key
        self.generation = generation
        self.stall_after = stall_after
        self.progress = {rank: RankProgress(first - 1, first - 1, active_at=now) for rank in ranks}
        self.instances: dict[int, Instance] = {}  # that ranks wait for, or that have failed
        self._finished: dict[int, Instance] = {}  # the latest
        self.verdicts: list[Verdict] = []  # in order of arrival; the first that covers an instance counts
        self.next_number = first  # the instance that starts next
        self.promised_from = math.inf  # nothing starts from this instance on
        self.promised_until = -math.inf
        self.is_aborted = False  # a rank has aborted: nothing starts any more, whatever the verdict will say
        self.waiting_joiners = 0  # processes that wait to join the group, as the ranks know it
        self.stalls = 0  # instances that have waited for longer than `stall_after`
        self._sought = -1  # the last instance that ranks elsewhere wait for

    def carry_progress(self, before: InstanceTracker) -> None:
        """The ranks go on from where they were in the generation `before`."""
        self.waiting_joiners = before.waiting_joiners
        for rank, known in before.progress.items():
            standing = self.progress[rank]
            standing.finished, standing.op, standing.site = known.finished, known.op, known.site
            standing.has_departed = known.has_departed

    # Events

    def record_arrival(self, rank: int, number: int, arrival: Arrival, remaining: float, timeout: float = 0.0) -> bool:
        """A rank submits an instance; `remaining` of its `timeout` in seconds, 0 for none.

        Returns False when it is the first whose contract differs from that of the ranks before it, or has a flaw.

        Raises:
            OutOfOrder: it skips a number, or has left.
        """
        standing = self.progress[rank]
        if standing.has_departed or number != standing.received + 1:
            raise OutOfOrder(
                f"rank {rank} submitted instance {number} after instance {standing.received}"
                + (" and after it had left" if standing.has_departed else "")
            )
        if number >= self.next_number + MAX_OUTSTANDING:
            raise OutOfOrder(f"rank {rank} has more than {MAX_OUTSTANDING} instances outstanding")
        collective = arrival.prepared.collective
        standing.received = number
        standing.active_at = arrival.arrived_at
        if arrival.ready and standing.submitted == number - 1:
            standing.submitted, standing.op, standing.site = number, arrival.prepared.op, collective.site
        instance = self.instances.get(number)
        if instance is None:
            instance = Instance(number, stall_at=arrival.arrived_at + self.stall_after)
            self._schedule_near(instance, arrival.arrived_at)
        if remaining and arrival.arrived_at + remaining < instance.deadline:
            instance.deadline, instance.timeout = arrival.arrived_at + remaining, timeout or remaining
            instance.deadline_near_at = instance.deadline - min(DEADLINE_LEAD_SECONDS, remaining / 2)
            self._schedule_near(instance, arrival.arrived_at)
        prepared = arrival.prepared
        if not instance.arrivals or (instance.collective.open and not collective.open):
            known, instance.reference = instance.reference, prepared
            instance.describe(collective, prepared.contract)
        else:
            known = instance.reference
        instance.arrivals[rank] = arrival
        instance.pending_writes += not arrival.ready
        self.instances[number] = instance  # now that it has an arrival, for others read along
        if (prepared.flaw or (known is not None and not known.matches(prepared))) and not instance.is_barred:
            instance.bar()
            return False
        return True

    def mark_ready(self, rank: int, number: int, now: float) -> None:
        """Take note that the value of a rank that had submitted can be read."""
        instance, standing = self.instances[number], self.progress[rank]
        arrival = instance.arrivals[rank]
        arrival.ready, arrival.arrived_at = True, now
        instance.pending_writes -= 1
        others = {other: one for other, one in instance.arrivals.items() if other != rank}
        instance.arrivals = {**others, rank: arrival}  # the latest stands last; other threads may read
        standing.active_at = now
        for following in range(standing.submitted + 1, standing.received + 1):
            one = self.instances[following].arrivals[rank]
            if not one.ready:
                break
            standing.submitted, standing.op, standing.site = following, one.prepared.op, one.prepared.collective.site

    def find_startable(self) -> Instance | None:
        """The next instance, once every local rank has arrived, they agree, and nothing was decided against it."""
        instance = self.instances.get(self.next_number)
        if (
            instance is None
            or self.is_aborted
            or instance.started
            or instance.is_barred
            or len(instance.arrivals) < len(self.progress)
            or instance.pending_writes
            or self.next_number >= self.promised_from
        ):
            return None
        return None if self.find_verdict(self.next_number) else instance

    def promise(self, until: float) -> int:
        """Starts nothing from the returned instance on, until that time or until it is freed of the promise."""
        running = self.instances.get(self.next_number)
        self.promised_from = self.next_number + (running is not None and running.started)
        self.promised_until = until
        return int(self.promised_from)

    def release_promise(self) -> None:
        """Start instances again as they come: the promise need not be kept any longer."""
        self.promised_from, self.promised_until = math.inf, -math.inf

    def finish(self, instance: Instance, now: float) -> None:
        """Finish an instance: all local ranks have their outcome."""
        instance.finished = True
        _discard_inputs(instance)
        del self.instances[instance.number]
        self._finished[instance.number] = instance
        self.next_number = instance.number + 1
        for rank in instance.arrivals:
            standing = self.progress[rank]
            standing.finished = instance.number
            standing.active_at = now
        self._finished.pop(instance.number - MAX_FINISHED, None)

    def take_finished(self, latest: Iterable[Instance], following: int, now: float) -> None:
        """Finish all instances before `following`, which were carried out elsewhere; `latest`: those that are known."""
        self.next_number = following
        for instance in latest:
            self._finished[instance.number] = instance
            for rank, arrival in instance.arrivals.items():
                self.progress[rank].op, self.progress[rank].site = arrival.prepared.op, arrival.prepared.collective.site
        for number in [known for known in self._finished if known < following - MAX_FINISHED]:
            del self._finished[number]
        for standing in self.progress.values():
            standing.received = standing.submitted = standing.finished = following - 1
            standing.active_at = now

    def add_waits(self, operation: Operation, count: int, waited: Mapping[int, float]) -> None:
        """Count how long each rank has waited in so many instances of one operation, all in all."""
        if isinstance(operation, _SYNCHRONISING_OPERATIONS):
            for rank, seconds in waited.items():
                self.progress[rank].waited_seconds += seconds  # first, as below
                self.progress[rank].waits += count

    def count_waits(self, operation: Operation, arrivals: Mapping[int, float], now: float) -> None:
        """Count how long each rank has waited in an instance that has ended; `arrivals`: when it came, by rank."""
        if isinstance(operation, _SYNCHRONISING_OPERATIONS):
            for rank, arrived_at in arrivals.items():
                self.progress[rank].waited_seconds += now - arrived_at  # first: others read the two together
                self.progress[rank].waits += 1

    def apply_verdict(self, verdict: Verdict) -> list[Instance]:
        """Takes a verdict; returns the instances that fail by it now."""
        covered = [instance for instance in self.list_open() if instance.number >= verdict.from_instance]
        self.verdicts.append(verdict)
        for instance in covered:
            _discard_inputs(instance)
        return covered

    # Consequences

    def find_verdict(self, number: int) -> Verdict | None:
        """The verdict by which this instance fails, if any."""
        if not self.verdicts:
            return None
        return next((verdict for verdict in self.verdicts if number >= verdict.from_instance), None)

    @property
    def missing_count(self) -> int:
        """How many local ranks are still to submit what starts next, where some have; 0 where none has."""
        instance = self.instances.get(self.next_number)
        return 0 if instance is None else len(self.progress) - len(instance.arrivals)

    def release_aborted(self, rank: int) -> bool:
        """Whether that rank had aborted and was there until now, as the others of the generation that it has ended."""
        standing = self.progress[rank]
        had_aborted, standing.has_aborted = standing.has_aborted, False
        return had_aborted

    @property
    def has_no_ranks(self) -> bool:
        """Whether no local rank is left."""
        return False not in [standing.has_departed for standing in self.progress.values()]

    @property
    def fault(self) -> Verdict | None:
        """The first verdict that says more than that a rank has left in order."""
        return next((verdict for verdict in self.verdicts if not verdict.orderly), None)

    def find(self, number: int) -> Instance | None:
        """That instance, if a rank has submitted it here and it is not forgotten."""
        return self.instances.get(number) or self._finished.get(number)

    def list_open(self) -> list[Instance]:
        """Instances that ranks wait for, and about which nothing has been decided; may be read from any thread."""
        return [instance for instance in list(self.instances.values()) if self.find_verdict(instance.number) is None]

    def collect_due_reports(self, now: float) -> list[Report]:
        """The reports that are due at this time; each once, stalls again with back-off."""
        if self.promised_until <= now:
            self.release_promise()
        reports = []
        for instance in self.list_open():
            if instance.deadline <= now and not instance.expired:
                instance.expired, instance.near_at = True, math.inf  # all reports have been made
                reports.append(self.make_report(ReportKind.EXPIRED, instance.number, timeout=instance.timeout))
                continue
            is_near = instance.near_at <= now
            if is_near:
                self._schedule_near(instance, now)
            if instance.stall_at <= now:
                waited = now - instance.first_arrival.arrived_at
                instance.stall_at = now + max(self.stall_after, waited * (STALL_BACKOFF - 1))
                self._schedule_near(instance, now)
                self.stalls += not instance.stalled
                instance.stalled = True
                reports.append(self.make_report(ReportKind.PENDING, instance.number))
            elif is_near:
                reports.append(self.make_report(ReportKind.NEAR, instance.number))
        return reports

    def _schedule_near(self, instance: Instance, now: float) -> None:
        times = (instance.stall_at - min(STALL_LEAD_SECONDS, self.stall_after / 4), instance.deadline_near_at)
        instance.near_at = min((at for at in times if at > now), default=math.inf)

    def next_deadline(self) -> float:
        """When `collect_due_reports` next has something to report; inf where never."""
        at = math.inf if self.promised_from == math.inf else self.promised_until
        for instance in self.list_open() if self.verdicts else self.instances.values():
            at = min(at, instance.stall_at, instance.near_at, math.inf if instance.expired else instance.deadline)
        return at

    def missing_ranks(self, instance: Instance) -> list[int]:
        """Local ranks from which it has not arrived."""
        come = instance.ready_arrivals
        return [rank for rank in self.progress if rank not in come]

    def seek(self, number: int) -> list[int]:
        """Ranks elsewhere wait for this instance: the local ranks from which it has not come, the first few."""
        self._sought = max(self._sought, number)
        return self._absent_ranks(number)

    def awaited_ranks(self) -> list[int]:
        """Local ranks that others are known to wait for, the first few; may be read from any thread."""
        if self.fault is not None:
            return []
        return self._absent_ranks(max(self._sought, self.next_number if self.next_number in self.instances else -1))

    def _absent_ranks(self, number: int) -> list[int]:
        known = list(self.progress.items())
        return [rank for rank, one in known if not (one.has_departed or self.has_come(rank, number))][:MAX_NAMED]

    def find_last_submitted(self, rank: int) -> int:
        """The last instance that a rank has submitted, before the first in which it still moves its value itself."""
        known = list(self.instances.values())
        lent = [one.number for one in known if rank in one.arrivals and one.arrivals[rank].is_lent]
        return min([self.progress[rank].submitted, *(number - 1 for number in lent)])

    def has_come(self, rank: int, number: int) -> bool:
        """Whether a rank has submitted an instance, and is not stopped in its own part of that or of one before."""
        standing = self.progress[rank]
        return (self.find_last_submitted(rank) if standing.is_stuck else standing.submitted) >= number

    def record_stack(self, rank: int, stack: str, now: float) -> None:
        """Take note of where the threads of a rank are."""
        self.progress[rank].stack, self.progress[rank].stack_at = stack, now

    def positions(self, number: int, now: float) -> tuple[RankPosition, ...]:
        """Where every local rank stands, and what it submitted as instance `number`.

        Of a rank that has submitted and not arrived the contract is included all the same: others may differ from it.
        """
        instance = self.find(number)
        found = []
        for rank, standing in self.progress.items():
            arrival = instance.arrivals.get(rank) if instance else None
            asked = arrival.prepared if arrival else None
            found.append(
                RankPosition(
                    rank,
                    self.find_last_submitted(rank),
                    standing.finished,
                    standing.op,
                    standing.site,
                    now - standing.active_at,
                    arrived=self.has_come(rank, number),
                    op=asked.op if asked else "",
                    site=asked.collective.site if asked else "",
                    contract=asked.contract if asked else b"",
                    collective=asked.collective if asked else None,
                    stack="" if self.has_come(rank, number) else standing.current_stack,
                )
            )
        return tuple(found)

    def last_submissions(self, rank: int) -> tuple[Submission, ...]:
        """The submissions in which others may find a difference only after this rank has gone, oldest first.

        These are the submissions since it last received from all ranks. A rank that only sends, or receives from the
        root alone, may be through long before the others have come.
        """
        found: list[Submission] = []
        leaves, newest = 0, self.progress[rank].received
        for number in range(newest, max(-1, newest - MAX_LAST_SUBMISSIONS), -1):
            instance = self.find(number)
            arrival = instance.arrivals.get(rank) if instance else None
            if instance is None or arrival is None:
                break
            prepared = arrival.prepared
            collective = prepared.collective
            if instance.finished and receives_from_all(collective.operation, rank):
                break
            leaves += len(collective.leaves)
            told = collective if leaves <= MAX_DESCRIBED_LEAVES else None
            found.append(Submission(number, prepared.op, collective.site, prepared.contract, told))
        return tuple(reversed(found))

    def make_report(
        self, kind: ReportKind, number: int, *, rank: int = 0, worker: int = 0, text: str = "", timeout: float = 0.0
    ) -> Report:
        """A report about this generation, with the positions of all local ranks as of their last activity."""
        now = max(standing.active_at for standing in self.progress.values())
        return Report(self.key, self.generation, kind, number, rank, worker, text, timeout, self.positions(number, now))


def _discard_inputs(instance: Instance) -> None:
    for arrival in instance.arrivals.values():
        arrival.inputs = None
