"""The watch of a group loop over a segment: it follows the ranks there, and reports why nothing completes.

The loop is not on the path of a collective. It looks when a rank has waited for a while, when a rank has gone, and at
deadlines. It updates the tracker, so that stalls, deadlines and verdicts are decided as in other groups. The
segment's word comes first: an instance has failed once the segment says so, and what is reported says the same.

It counts what has been done by what the first rank has counted, so that each instance counts once for its group; of
messages, by what each rank has counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from collectived_native import core
from collectived_native.segment import SeatState, Total
from collectived_proto.deadline import Patience
from collectived_proto.ipc import messages
from collectived_proto.report.bandwidth import BUS_FACTORS
from collectived_proto.types import ReportKind, Verdict
from collectived_runtime.engine.base.memory_budget import MemoryBudget
from collectived_runtime.engine.base.poller import Poller
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.clients.segment import NS, GroupSegment
from collectived_runtime.engine.failure.reporter import FaultReporter
from collectived_runtime.engine.record.counters import OPERATIONS, POINT_TO_POINT
from collectived_runtime.engine.record.group_records import GroupRecords
from collectived_runtime.engine.record.rates import OperationLoad
from collectived_runtime.engine.record.segment_history import SegmentHistory
from collectived_runtime.engine.record.segment_totals import MessageTotals, SegmentTotals
from collectived_runtime.engine.submit.contracts import PreparedCollective
from collectived_runtime.engine.submit.tracker import Arrival, InstanceTracker

_LOOK_SECONDS = 0.2  # between two looks at an instance that ranks wait for
_EXPLAIN_SECONDS = 0.1  # in which a rank that ended the generation says why
_MOST_INSTANCES = 1 << 39  # no generation begins with a larger number: a word has no room for it
_ENDED_BY_A_RANK = (core.ABORTED, core.INTERRUPTED, core.FAILED)
_OPERATIONS = {getattr(core, name.upper()): name for name in BUS_FACTORS}
_MESSAGES = {core.SENDS: "send", core.RECEIVES: "recv"}


class SegmentWatch:
    """Follows one generation's segment. In the group loop's thread.

    Attributes:
        spans_hosts: whether the group has ranks of other workers, too.
    """

    spans_hosts = False

    def __init__(
        self,
        poller: Poller,
        tracker: InstanceTracker,
        reporter: FaultReporter,
        doorbells: Doorbells,
        records: GroupRecords,
        budget: MemoryBudget,
    ) -> None:
        """
        Raises:
            MemoryExhausted, OSError: there is no memory, or no descriptor, for a segment.
        """
        ranks, start = tuple(tracker.progress), tracker.next_number
        self._start = start
        self._began = time.monotonic()
        local_ranks = [doorbells.local_ranks[rank] for rank in ranks]
        self._segment = GroupSegment(
            local_ranks, tracker.generation, start, poller, budget, self._on_knock, is_operated=self.spans_hosts
        )
        self._tracker = tracker
        self._reporter = reporter
        self._doorbells = doorbells
        self._records = records
        self._totals = SegmentTotals(start)
        self._messages = MessageTotals()
        self._history = SegmentHistory(ranks, start)
        self._look_at = math.inf
        self._patience: Patience | None = None  # with a rank that has ended the generation, and has not said why
        self._reported = False  # why the generation is over

    def offer(self, local_rank: LocalRank) -> None:
        """Send a rank the segment of its generation."""
        self._segment.offer(local_rank, self._doorbells)

    def answer(
        self,
        local_rank: LocalRank,
        prepared: PreparedCollective,
        submission: messages.Submit,
        fail: Callable[[LocalRank, int, Verdict], None],
    ) -> bool:
        """A rank has seen in the segment that an instance has failed, and asks for the verdict.

        False: this is a submission instead, of what is not carried out there.
        """
        instance = submission.instance
        self.look()
        verdict = self._tracker.find_verdict(instance)
        if verdict is not None:
            fail(local_rank, instance, verdict)
        else:  # it is on its way
            self._take_description(local_rank.rank, prepared, instance)
        progress = self._tracker.progress[local_rank.rank]
        progress.received = max(progress.received, instance)
        self._doorbells.throttle(local_rank)
        return True

    def _take_description(self, rank: int, prepared: PreparedCollective, instance: int) -> None:
        """A rank that was too late to publish what it submits says it all the same: others may differ from it."""
        tracker = self._tracker
        known, progress = tracker.instances.get(instance), tracker.progress[rank]
        is_new = known is None or rank not in known.arrivals
        if instance == tracker.next_number and is_new and not progress.has_departed:
            progress.received = instance - 1
            tracker.record_arrival(rank, instance, Arrival(prepared, None, time.monotonic()), 0.0)
            tracker.instances[instance].started = True
        if self._reported:
            return
        if prepared.flaw:
            self._report_mismatch(instance, prepared.flaw)
        elif self._segment.watcher.decided()[2] == core.MISMATCH and self._have_all_come(instance):
            self._report_mismatch(instance)

    def _have_all_come(self, instance: int) -> bool:
        known = self._tracker.instances.get(instance)
        return known is not None and len(known.arrivals) == len(self._tracker.progress)

    def _report_mismatch(self, instance: int, text: str = "") -> None:
        self._patience, self._reported = None, True
        self._reporter.report_fault(ReportKind.MISMATCH, instance, text=text)

    def has_open(self, before: int) -> bool:
        """Whether a rank has submitted an instance before that one of which the tracker does not know yet."""
        return False

    def _on_knock(self) -> None:
        self.look()

    def look(self) -> None:
        """Take in what the ranks have done, and report why the generation is over, if it is."""
        now = time.monotonic()
        self._segment.watcher.review()
        if (largest := self._segment.charge()) is not None:
            why = "its sends that are not received yet take more shared memory than its worker has"
            self._doorbells.drop(self._doorbells.local_ranks[largest], why)
        complete, culprit, reason = self._take_in_completed(now)
        self._read_seats(complete, now)
        self._look_at = now + _LOOK_SECONDS if complete in self._tracker.instances else math.inf
        if reason and not self._reported:
            self._report_end(complete, culprit, reason, now)

    def _take_in_completed(self, now: float) -> tuple[int, int, int]:
        """Count, record and finish what the ranks have completed; returns the segment's word."""
        totals = self._segment.read_totals(self._segment.ranks[0])
        complete, culprit, reason = self._read_word()
        self._count(totals, complete, now)
        self._recall(complete, now)
        tracker = self._tracker
        for number in [known for known in tracker.instances if known < complete]:
            waited = tracker.instances[number]
            tracker.finish(waited, now)
            self._reporter.on_completed(number)
            if waited.stalled:
                self._reporter.report_resumed(number)
        tracker.next_number = max(tracker.next_number, complete)
        return complete, culprit, reason

    def _read_word(self) -> tuple[int, int, int]:
        """(complete, culprit, reason). A number that no group can reach is nonsense that a member wrote."""
        complete, culprit, reason = self._segment.watcher.decided()
        if complete < _MOST_INSTANCES:
            return complete, culprit, reason
        return self._tracker.next_number, core.WORKER_SEAT, core.NONSENSE

    def _count(self, totals: list[Total], complete: int, now: float) -> None:
        """Count what has completed since the last look, in the words of the first rank."""
        for gained in self._totals.take(totals, complete):
            self._record(gained, now)
        self._count_messages()
        if self._tracker.progress[self._segment.ranks[0]].has_departed:
            self._settle_totals(complete, now)

    def _count_messages(self) -> None:
        """Count the sends and receives that the ranks have carried out by themselves since the last look."""
        for rank, seat in self._segment.seats.items():
            for gained in self._messages.take(seat, self._segment.read_totals(rank)):
                nbytes = gained.bytes if gained.operation == core.SENDS else 0  # they count once
                self._records.counters.count_many(
                    _MESSAGES[gained.operation], POINT_TO_POINT, gained.calls, nbytes, gained.nanoseconds / NS
                )

    def _settle_totals(self, complete: int, now: float) -> None:
        """Count what the first rank did not live to count: the last instance, which it has described all the same."""
        missing = self._totals.settle(complete)
        if missing:
            self._record(Total(self._segment.read_seat(self._segment.ranks[0]).description, 0, missing, 0, 0), now)

    def _recall(self, complete: int, now: float, is_over: bool = False) -> None:
        """Record the latest of what has completed, as the ranks remember it."""
        first, ranks = self._history.find_first(complete), self._doorbells.local_ranks
        if first == complete:
            return
        pasts = {rank: self._segment.read_history(rank, first, complete) for rank in self._segment.ranks}
        for past in self._history.take(pasts, complete, now, is_over):
            described = [ranks[one.rank].prepared.get(one.description) for one in past.arrivals]
            self._records.record_past(self._tracker.generation, past, described)
            if described[0] is not None:
                arrived = {one.rank: one.at for one in past.arrivals}
                self._tracker.count_waits(described[0].collective.operation, arrived, past.ended_at)

    def _record(self, gained: Total, now: float) -> None:
        known = self._doorbells.local_ranks[self._segment.ranks[0]].prepared.get(gained.description)
        op, nbytes = _OPERATIONS.get(gained.operation, "barrier"), gained.bytes
        if known is not None:
            op = OPERATIONS[type(known.collective.operation)]
            if not known.collective.open:  # else what came says how much it was
                nbytes = gained.calls * sum(known.leaf_bytes)
        factor = BUS_FACTORS.get(op, BUS_FACTORS["barrier"]).compute(len(self._segment.ranks))
        self._records.record_many(
            gained.calls, OperationLoad(op, nbytes, nbytes * factor), gained.nanoseconds / NS, now
        )

    def _read_seats(self, complete: int, now: float) -> None:
        """Update the tracker: how far each rank is, and which ranks have come to the open instance."""
        tracker = self._tracker
        come: list[tuple[float, int, PreparedCollective, SeatState]] = []
        for rank, progress in tracker.progress.items():
            seat = self._segment.read_seat(rank)
            if seat.instance > self._start:  # else what it did last was in an earlier generation
                progress.finished = max(progress.finished, min(complete, seat.instance) - 1)
            if complete > self._start or seat.instance > self._start:  # complete instances have been submitted by all
                progress.submitted = max(progress.submitted, complete - 1, min(seat.instance, complete + 1) - 1)
            has_come = seat.instance > complete or (seat.instance == complete and seat.ticks > 0)
            prepared = self._doorbells.local_ranks[rank].prepared.get(seat.description)
            if prepared is not None and seat.record_instance <= complete:
                progress.op, progress.site = prepared.op, prepared.collective.site
                progress.active_at = max(progress.active_at, min(now, seat.began / NS))
            known = tracker.instances.get(complete)
            if progress.has_departed or not has_come or seat.record_instance != complete or prepared is None:
                progress.received = max(progress.received, progress.submitted)
                continue
            if known is None or rank not in known.arrivals:
                come.append((min(max(self._began, seat.began / NS), now), rank, prepared, seat))
        for began, rank, prepared, seat in sorted(come, key=lambda one: one[0]):
            known = tracker.instances.get(complete)
            at = began if known is None else max(began, known.last_arrival.arrived_at)  # others may count from there
            remaining = seat.deadline / NS - at if seat.deadline else 0.0
            tracker.progress[rank].received = complete - 1
            self._record_arrival(rank, complete, Arrival(prepared, None, at), remaining, seat.asked / NS)

    def _record_arrival(self, rank: int, number: int, arrival: Arrival, remaining: float, asked: float) -> None:
        self._tracker.record_arrival(rank, number, arrival, remaining, asked)
        self._tracker.instances[number].started = True  # by the ranks themselves

    def _report_end(self, instance: int, culprit: int, reason: int, now: float) -> None:
        rank = self._find_rank(culprit)
        if reason == core.MISMATCH and self._have_all_come(instance):
            self._report_mismatch(instance)
        elif reason == core.DEADLINE:
            # A report of a rank that has come meanwhile goes first: that its worker did not answer, because it was
            # stopped.
            self._patience = self._patience or Patience(0.0, now, steps=1)
        elif reason == core.WORKER and not any(one.has_departed for one in self._tracker.progress.values()):
            # Ranks say so of a worker that is silent, before they close their doorbells. One that was let go says so of
            # its own doorbell, and the others are not lost.
            self._reported = True
            self._reporter.report_local_ranks_lost("its worker has not answered when asked whether it lives", instance)
        elif reason == core.NONSENSE and rank >= 0:
            self._reported = True
            self._doorbells.drop(self._doorbells.local_ranks[rank], "it has written nonsense into shared memory")
        elif reason in (core.MISMATCH, core.NONSENSE) or (reason in _ENDED_BY_A_RANK and rank >= 0):
            # Ranks say more in a moment.
            self._patience = self._patience or Patience(_EXPLAIN_SECONDS, now, steps=4)

    def lost(self, rank: int) -> None:
        """A rank's process is gone; instances that it has published wholly may still complete."""
        first = self._segment.watcher.lost(self._segment.seats[rank])
        self._settle(rank, first)

    def left(self, rank: int) -> None:
        """A rank has left in order."""
        first = self._segment.watcher.left(self._segment.seats[rank])
        self._settle(rank, first)

    def _settle(self, rank: int, first: int) -> None:
        self.look()
        self._tracker.progress[rank].submitted = first - 1

    def abort(self, rank: int) -> None:
        """A rank ends the generation."""
        self._segment.watcher.abort(core.ABORTED, self._segment.seats[rank])
        self._patience, self._reported = None, True
        self.look()

    def apply_verdict(self, verdict: Verdict) -> None:
        """Nothing that a verdict covers completes any more."""
        self._reported = self._reported or not verdict.orderly
        self._patience = None
        reason = core.LEFT if verdict.orderly else core.STOPPED
        self._segment.watcher.limit(verdict.from_instance, reason, core.WORKER_SEAT)
        self.look()

    def set_waiting(self, waiting: int) -> None:
        """So many processes wait to join the group: all ranks see it with the same instance."""
        self._segment.watcher.set_waiting(waiting)

    def next_deadline(self) -> float:
        return self._look_at if self._patience is None else min(self._look_at, self._patience.at)

    def on_timer(self, now: float) -> None:
        """Look again, and do what is due."""
        if self._tracker.next_deadline() <= now or self.next_deadline() <= now:
            self.look()
        self._expire(now)
        if self._patience is not None and self._patience.is_over(now):
            self._explain()

    def _expire(self, now: float) -> None:
        """End what has not come in time, before that is reported."""
        instance = self._tracker.instances.get(self._tracker.next_number)
        if instance is not None and instance.deadline <= now and not instance.expired:
            self._reported |= self._segment.watcher.expire(instance.number)
            self.look()

    def _explain(self) -> None:
        """Report the end of the generation for ranks that have not said more about it."""
        self._patience = None
        complete, culprit, reason = self._read_word()
        rank = self._find_rank(culprit)
        if reason == core.DEADLINE:
            self._reported = True
            self._reporter.report_expired(complete)
        elif reason == core.MISMATCH:
            self._report_mismatch(complete)
        elif rank < 0:  # a member has written the word since it was read: it is not known which one
            self._report_mismatch(complete, "their shared memory says what no rank could have written in order")
        else:
            self._reported = True
            text = "it could not go on, and did not say why"
            self._reporter.report_fault(ReportKind.ABORT, complete, rank=rank, text=text)

    def _find_rank(self, culprit: int) -> int:
        """The rank in that seat, -1 where it is the worker's or none."""
        return self._segment.ranks[culprit] if culprit < len(self._segment.ranks) else -1

    def close(self) -> None:
        """Count what is complete by now, and let go of the memory."""
        now, totals = time.monotonic(), self._segment.read_totals(self._segment.ranks[0])
        complete, _, _ = self._read_word()
        self._count(totals, complete, now)
        self._settle_totals(complete, now)
        self._recall(complete, now, is_over=True)
        self._segment.close()
