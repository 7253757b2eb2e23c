"""The watch of a group loop over the segment of its ranks, where other workers have ranks of the group, too.

The ranks bring small values there. This worker takes them, or their partial sums, to the other workers and brings the
results; it has a seat of its own, without which nothing completes. So it knows of every instance, as where ranks submit
over the doorbell: deadlines are watched, contracts compared and verdicts reached as there, and the segment's word says
no more than that the generation is over. Larger values go over the doorbell, in one order with small ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from collectived_native import core
from collectived_proto.across import meets_in_segment, moves_across
from collectived_proto.ipc import messages
from collectived_proto.types import Collective, Layout, Verdict
from collectived_runtime.engine.base.memory_budget import MemoryBudget
from collectived_runtime.engine.base.poller import Poller
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.failure.reporter import FaultReporter
from collectived_runtime.engine.failure.segment_watch import SegmentWatch
from collectived_runtime.engine.record.group_records import GroupRecords
from collectived_runtime.engine.run.crossing import WorkerSeat
from collectived_runtime.engine.submit.contracts import PreparedCollective
from collectived_runtime.engine.submit.tracker import Arrival, Instance, InstanceTracker

_LOOK_SECONDS = 0.02  # after which the tracker gets the ranks that have come, if not all have

Fail = Callable[[LocalRank, int, Verdict], None]


@dataclass(slots=True, eq=False)
class _Early:
    """A submission over the doorbell whose turn has not come: what is before it is yet to be seen in the segment."""

    local_rank: LocalRank
    submission: messages.Submit
    fail: Fail
    deadline: float  # inf: none, or it has ended the open instance


class SpanningWatch(SegmentWatch):
    """Follows one generation's segment, and has a seat in it.

    Args:
        submit: takes a submission once those before it are known.
    """

    spans_hosts = True

    def __init__(
        self,
        poller: Poller,
        tracker: InstanceTracker,
        reporter: FaultReporter,
        doorbells: Doorbells,
        records: GroupRecords,
        budget: MemoryBudget,
        submit: Callable[[LocalRank, messages.Submit], None],
    ) -> None:
        super().__init__(poller, tracker, reporter, doorbells, records, budget)
        self._submit = submit
        self._early: list[_Early] = []
        try:
            self.seat = WorkerSeat(self._segment.take_seat(), reporter.topology)
        except BaseException:
            self._segment.close()
            raise
        self.attend()

    def carries(self, prepared: PreparedCollective | None) -> bool:
        """Whether a rank brings it to the segment."""
        if prepared is None:
            return False
        return self._is_small(prepared.collective, prepared.layout)

    def _is_small(self, collective: Collective, layout: Layout) -> bool:
        return meets_in_segment(collective, layout, self._segment.most_in_a_tick, self.seat.local)

    def brings(self, instance: Instance) -> bool:
        """Whether the ranks take the results out of the segment: all come there, and what comes is small.

        Else their worker sends them over the doorbell where the results lie.
        """
        if self._is_mixed(instance) or len(set(instance.rows)) > 1:
            return False
        if not instance.open_ranks:
            return True
        is_small = self._is_small(instance.collective, self.seat.find_layout(instance))
        return is_small and len(self.seat.encode_blob(instance)) <= core.MAX_BLOB

    def _is_mixed(self, instance: Instance) -> bool:
        """Whether a rank submits it over the doorbell: it is large for some, and others do not know, or have little."""
        return not all(self.carries(one.prepared) for one in instance.arrivals.values())

    # Submissions over the doorbell

    def answer(
        self, local_rank: LocalRank, prepared: PreparedCollective, submission: messages.Submit, fail: Fail
    ) -> bool:
        if submission.instance < self._tracker.next_number and local_rank.get_outcomes(submission.instance):
            return False  # it has missed them, and gets them again
        if self.carries(prepared):
            return super().answer(local_rank, prepared, submission, fail)
        progress = self._tracker.progress[local_rank.rank]
        if submission.instance > progress.received + 1:
            self.look()
        if not progress.received + 1 < submission.instance <= progress.received + messages.MAX_OUTSTANDING:
            if moves_across(prepared.collective):
                self._attend_others(submission.instance)
            return False
        if any(one.local_rank is local_rank and one.submission.instance == submission.instance for one in self._early):
            raise messages.MalformedMessage(f"instance {submission.instance} twice")
        deadline = time.monotonic() + submission.remaining if submission.remaining else math.inf
        early = _Early(local_rank, submission, fail, deadline)
        verdict = self._tracker.find_verdict(submission.instance)
        if verdict is None:
            self._early.append(early)
        else:
            self._fail_early(early, verdict)
        return True

    def _attend_others(self, number: int) -> None:
        """Attend an instance for other ranks: those with small values, or without a value, may come to the segment."""
        if number == self._tracker.next_number and number not in self._tracker.instances:
            self.seat.engine.attend(number, True)
            self._take_arrivals()

    def _take_description(self, rank: int, prepared: PreparedCollective, instance: int) -> None:
        if instance == self._tracker.next_number and not self._read_word()[2]:
            raise messages.MalformedMessage(f"{prepared.op} by a message, for which its ranks meet in shared memory")
        super()._take_description(rank, prepared, instance)  # of a later one a rank may know that it cannot complete

    def _take_early(self) -> None:
        """Take submissions whose turn has come; also of a rank that has just been lost, for they are its last ones."""
        for early in tuple(self._early):
            progress = self._tracker.progress[early.local_rank.rank]
            is_due = early.submission.instance <= progress.received + 1
            if early in self._early and (is_due or progress.has_departed):  # else it was taken meanwhile
                self._early.remove(early)
                if not progress.has_departed:
                    submit = partial(self._submit, early.local_rank, early.submission)
                    self._doorbells.carry_out(early.local_rank, submit)

    def _fail_early(self, early: _Early, verdict: Verdict) -> None:
        progress = self._tracker.progress[early.local_rank.rank]
        progress.received = max(progress.received, early.submission.instance)
        early.fail(early.local_rank, early.submission.instance, verdict)

    def has_open(self, before: int) -> bool:
        return any(early.submission.instance < before for early in self._early)

    # The ranks in the segment

    def _on_knock(self) -> None:
        if self._read_word()[2]:
            self.look()
            return
        number = self._tracker.next_number
        instance = self._tracker.instances.get(number)
        if instance is None or not instance.started:
            is_mixed = instance is not None and self._is_mixed(instance)
            if self.seat.engine.attend(number, is_mixed) or is_mixed:
                self._take_arrivals()
            else:  # most likely the others come in a moment
                self._look_at = min(self._look_at, time.monotonic() + _LOOK_SECONDS)

    def attend(self) -> None:
        """Have this worker rung when all local ranks have come to what is next; take it in if they have."""
        if self.seat.engine.attend(self._tracker.next_number, False):
            self._take_arrivals()

    def _take_arrivals(self) -> None:
        complete, _, reason = self._read_word()
        if reason:
            self.look()
        else:
            self._read_seats(complete, time.monotonic())
            self._take_early()

    def look(self) -> None:
        super().look()
        self._take_early()

    def _take_in_completed(self, now: float) -> tuple[int, int, int]:
        self._count_messages()
        return self._read_word()  # the group loop knows itself what else has been done

    def _read_word(self) -> tuple[int, int, int]:
        """The same, as far as it agrees with what this worker knows: nothing completes without it."""
        number = self._tracker.next_number
        complete, culprit, reason = self._segment.watcher.decided()
        if complete == number or (reason and complete < number):
            return number, culprit, reason
        return number, core.WORKER_SEAT, core.NONSENSE

    def _record_arrival(self, rank: int, number: int, arrival: Arrival, remaining: float, asked: float) -> None:
        if not self._tracker.record_arrival(rank, number, arrival, remaining, asked):
            self._report_mismatch(number, arrival.prepared.flaw)

    @property
    def knocker(self) -> int:
        """The descriptor by which this worker is rung."""
        return self._segment.knocker

    def reserve(self, nbytes: int) -> None:
        """Count memory that is taken to serve these ranks; raise MemoryExhausted where that is too much."""
        self._segment.reserve(nbytes)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits for its turn, and the generation goes on."""
        return not self._early and not self._read_word()[2]

    def resume(self, is_late: bool) -> None:
        """Go on where the native core has watched the ranks; `is_late`: some have not come for a while."""
        if is_late:
            self.look()
        self.attend()

    def finish(self, instance: Instance, is_brought: bool) -> None:
        """Say in the segment that an instance is complete if its results are elsewhere, and go on to the next."""
        if not is_brought:
            self._segment.watcher.complete(instance.number)
        self.attend()

    # The end

    def on_stopped(self) -> None:
        """The segment did not let an instance go on: it says why, or what no rank could have written."""
        self._segment.watcher.abort(core.NONSENSE, core.WORKER_SEAT)  # which counts if it says nothing
        self._look_at = time.monotonic()

    def apply_verdict(self, verdict: Verdict) -> None:
        super().apply_verdict(verdict)
        covered = [early for early in self._early if early.submission.instance >= verdict.from_instance]
        self._early = [early for early in self._early if early not in covered]
        for early in covered:
            self._fail_early(early, verdict)

    def _settle(self, rank: int, first: int) -> None:
        self.look()
        instance, progress = self._tracker.instances.get(first), self._tracker.progress[rank]
        if instance is not None and self.carries(instance.reference):  # its value has not come wholly
            progress.submitted = min(progress.submitted, first - 1)

    def next_deadline(self) -> float:
        return min(super().next_deadline(), min((early.deadline for early in self._early), default=math.inf))

    def _expire(self, now: float) -> None:
        """End the open instance at the deadline of a submission that waits for its turn.

        The verdict ends all others.
        """
        due = [early for early in self._early if early.deadline <= now]
        for early in due:
            early.deadline = math.inf
        if due and not self._reported:
            self._segment.watcher.expire(self._tracker.next_number)
            self.look()

    def close(self) -> None:
        self._count_messages()
        self._segment.watcher.abort(core.STOPPED, core.WORKER_SEAT)  # a rank that comes now asks why
        self.seat.close()
        self._segment.close()
