"""Reports of a group loop to the coordinator about faults, and its own decisions when no answer comes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from collectived_proto.cause import Cause
from collectived_proto.deadline import Patience
from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.report.phrases import peer_text
from collectived_proto.types import ANY_SOURCE, Report, ReportKind, Verdict, unscoped_name
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.failure import local_verdict
from collectived_runtime.engine.failure.verdict_agreement import BY_COORDINATOR
from collectived_runtime.engine.submit.contracts import receives_from_all
from collectived_runtime.engine.submit.tracker import Instance, InstanceTracker
from collectived_runtime.logs import log_fields, verdict_fields
from collectived_runtime.transport.link import LinkBroken, LinkRefused

log = logging.getLogger("collectived.group_loop")

_DEPARTURES = (ReportKind.LEFT, ReportKind.LOST, ReportKind.ABORT)
_EARLY_SECONDS = 0.05  # by which a deadline may be taken for passed before it has, for ranks count theirs themselves
_ANY = -1  # the instance that comes next
DECIDE_ALONE_SECONDS = 0.1  # how long a group loop waits for the coordinator's verdict before it decides for itself
DECIDE_ALONE_STEPS = 2  # with those of a listening fewer than a client's, which is to be late no less often
MISMATCH_DECIDE_ALONE_SECONDS = 1.0  # the same where the wait is only for the ranks that differ
REFUSED_DECIDE_ALONE_SECONDS = 1.0  # the same where the coordinator finds out whether the worker at the other end lives
NCCL_DECIDE_ALONE_SECONDS = (
    1.0  # the same where NCCL failed, after the time in which the coordinator finds out which ranks are lost
)


@dataclass(frozen=True, slots=True)
class CoordinatorAccess:
    """How group loops reach the coordinator; may be used from any thread.

    Attributes:
        report: sends a report.
        worker_timeout: seconds in which the coordinator finds out that a silent worker is lost.
        is_connected: whether the coordinator can be reached.
    """

    report: Callable[[Report], None]
    worker_timeout: float = 10.0
    is_connected: Callable[[], bool] = lambda: True


@dataclass(slots=True)
class _Departure:
    """A rank that has left in order, of which the coordinator has said nothing yet.

    Attributes:
        patience: with the coordinator, until it is looked whether that is still there.
        give_up_at: when this worker decides alone, though the coordinator is there.
        question: what the coordinator was asked for a send or receive that waits for the rank.
    """

    patience: Patience
    give_up_at: float
    question: Report | None = None


class FaultReporter:
    """Reports the faults of one generation, and has its worker decide about them where the coordinator does not answer.

    Args:
        worker: this worker's name, for verdicts that it makes alone.
        apply_verdict: takes a verdict that this worker made alone.
        sample_stacks: asks where the threads of some local ranks are, for the tracker.
    """

    def __init__(
        self,
        topology: GroupTopology,
        tracker: InstanceTracker,
        worker: str,
        coordinator: CoordinatorAccess,
        apply_verdict: Callable[[Verdict], None],
        sample_stacks: Callable[[list[int]], None] = lambda ranks: None,
    ) -> None:
        self._sample_stacks = sample_stacks
        self.topology = topology
        self._tracker = tracker
        self._worker = worker
        self._send_report = coordinator.report
        self._apply_verdict = apply_verdict
        self._lost_after = coordinator.worker_timeout
        self._is_connected = coordinator.is_connected
        self._departures: list[Report] = []
        self._failure_logged = False
        self._late_instances: set[int] = set()  # instances that some local rank will not submit
        self._pending_decisions: dict[
            int, tuple[Patience, Report]
        ] = {}  # first instance concerned -> until when the coordinator may decide it
        self._departed_from: dict[
            int, int
        ] = {}  # ranks known to have left in order, and the first instance without them
        self._pending_departures: dict[int, _Departure] = {}  # of these, by rank

    def report_fault(self, kind: ReportKind, instance: int, *, rank: int = 0, worker: int = 0, text: str = "") -> None:
        """Reports what needs a verdict."""
        report = self._tracker.make_report(kind, instance, rank=rank, worker=worker, text=text)
        self._raise_fault(self._record_departure(report))

    def report_link(self, instance: int, error: LinkBroken) -> None:
        """The link to a worker has broken, or cannot be had."""
        cause = Cause.LINK_REFUSED if isinstance(error, LinkRefused) else Cause.LOST_LINK
        report = self._tracker.make_report(ReportKind.LINK, instance, worker=error.peer, text=str(error))
        self._raise_fault(replace(report, cause=cause))

    def report_local_ranks_lost(self, text: str, first: int = 0) -> None:
        """No local rank goes beyond what it has finished, or beyond what all have, before instance `first`."""
        for rank, standing in self._tracker.progress.items():
            if not standing.has_departed:
                self.report_fault(ReportKind.LOST, max(standing.finished, first - 1), rank=rank, text=text)

    def report_exhausted(self, instance: Instance, error: Exception, held: Mapping[int, int]) -> None:
        """There is no memory for the results of an instance; `held`: bytes of results, by the ranks that hold them."""
        rank = max(held, key=lambda r: held[r]) if held else next(iter(instance.arrivals))
        instance.bar()
        text = f"no memory for the results of {instance.collective.operation} #{instance.number}: {error}"
        if held:
            text += f"; rank {rank} holds {held[rank]} bytes of results: release them"
        self.report_fault(ReportKind.EXHAUSTED, instance.number, rank=rank, text=text)

    def report_nccl_failure(self, instance: Instance, error: Exception) -> None:
        """Report that NCCL has failed.

        NCCL names no culprit, not even where another rank is gone: no rank is accused.
        """
        instance.bar()
        log.info("group %s: %s", unscoped_name(self.topology.group.name), error)
        self.report_fault(ReportKind.NATIVE, instance.number, text=str(error))

    def add_missing_ranks(self, verdict: Verdict) -> Verdict:
        """Return another worker's verdict with the ranks of this one that it waited for."""
        absent = [rank for rank in self._tracker.progress if not self._tracker.has_come(rank, verdict.instance)]
        if verdict.code != Code.DEADLINE_EXCEEDED or verdict.missing or not absent:
            return verdict
        return local_verdict.with_missing(self.topology, self._worker, verdict, absent)

    def report_expired(self, instance: int) -> None:
        """An instance has not completed by its deadline; said once."""
        waiting = self._tracker.instances.get(instance)
        if waiting is None or not waiting.expired:
            timeout = 0.0 if waiting is None else _find_waited_seconds(waiting, time.monotonic())
            if waiting is not None:
                waiting.expired = True
            self._raise_fault(self._tracker.make_report(ReportKind.EXPIRED, instance, timeout=timeout))

    def report_abort(self, instance: int, rank: int, reason: str, cause: Cause) -> None:
        """A local rank ends the generation for all; see `decisions.judge_abort`."""
        report = self._tracker.make_report(ReportKind.ABORT, instance, rank=rank, text=reason)
        self._raise_fault(self._record_departure(replace(report, cause=cause)))

    def report_late(self, instance: int, rank: int, op: str, timeout: float) -> None:
        """A local rank has not submitted an instance by its own deadline, and will not."""
        self._late_instances.add(instance)
        report = self._tracker.make_report(ReportKind.EXPIRED, instance, timeout=timeout)
        ranks = tuple(replace(known, op=op) if known.rank == rank else known for known in report.ranks)
        self._raise_fault(replace(report, ranks=ranks))

    def report_overdue(self, rank: int, peer: int, timeout: float, text: str) -> None:
        """A send or recv of `rank` has waited for `peer` beyond its deadline."""
        report = self._tracker.make_report(ReportKind.OVERDUE, -1, rank=rank, text=text, timeout=timeout)
        report = replace(report, peer=peer)
        self._pending_decisions.setdefault(_ANY, (_wait_for_coordinator(), report))
        self._send_report(report)

    def report_unclaimed(self, rank: int, peer: int, text: str) -> None:
        """There is no memory for what rank `peer` has sent to `rank`, which has not asked for it."""
        report = replace(self._tracker.make_report(ReportKind.UNCLAIMED, -1, rank=rank, text=text), peer=peer)
        self._pending_decisions.setdefault(_ANY, (_wait_for_coordinator(), report))
        self._send_report(report)

    def report_unanswered(self, rank: int, peer: int, waited: float, text: str) -> None:
        """A send or recv of `rank` has waited for `peer` for some seconds, which may be a mistake."""
        if not self.topology.idle:
            group = unscoped_name(self.topology.group.name)
            log.log(
                self._stall_level,
                "group %s: %s of rank %d has been waiting for %s for %.1f s",
                group,
                text,
                rank,
                peer_text(peer),
                waited,
            )
        report = self._tracker.make_report(ReportKind.UNANSWERED, -1, rank=rank, text=text, timeout=waited)
        self._send_report(replace(report, peer=peer))

    def report_resumed(self, instance: int) -> None:
        """Report that a pending instance has completed."""
        self._send_report(self._tracker.make_report(ReportKind.RESUMED, instance))

    def log_verdict(self, verdict: Verdict, failing: bool) -> None:
        """Log a verdict once. Clients get it by their exceptions. A departure in order is no failure."""
        news = not self._failure_logged and (failing or not verdict.orderly)
        self._failure_logged |= news
        level, name = logging.INFO if news else logging.DEBUG, unscoped_name(self.topology.group.name)
        log.log(level, "group %s: %s", name, verdict.message, extra=verdict_fields(verdict))

    def report_mismatch(self, instance: Instance, worker: int) -> None:
        """Ranks differ in an instance, or in one just before it in which no local rank has received from all others.

        Those before it are reported first: the coordinator compares the submissions, and goes by the first that
        differs. `worker`: whose frame shows it.
        """
        instance.bar()
        first = instance.number
        while (one := self._tracker.find(first - 1)) is not None and one.finished:
            if any(receives_from_all(one.collective.operation, rank) for rank in one.arrivals):
                break
            first -= 1
        for number in range(first, instance.number):
            self._send_report(self._tracker.make_report(ReportKind.PENDING, number))
        self.report_fault(ReportKind.MISMATCH, instance.number, worker=worker)

    def report_left(self, rank: int, last: int) -> None:
        """A local rank has left in order, after that instance: ranks that go on without it must know."""
        self.report_gone(rank, last)
        self._add_departures([rank], last + 1)

    def report_gone(self, rank: int, last: int) -> None:
        """Report a local rank that is gone. No rank waits for that: it left in order, or its generation had failed."""
        self._send_report(self._record_departure(self._tracker.make_report(ReportKind.LEFT, last, rank=rank)))

    def report_worker_left(self, task: int, instance: int) -> None:
        """A worker has said goodbye, and this instance waits for it.

        All its ranks have left in order, as it reports to the coordinator itself.
        """
        self._add_departures(self._find_ranks(task), instance)

    def mark_worker_gone(self, task: int) -> None:
        """A worker has said goodbye; which instance is the first without its ranks is not known, but no letter will go
        to them, or come, any more."""
        for rank in self._find_ranks(task):
            self._departed_from.setdefault(rank, messages.P2P_BASE)

    def report_if_departed(self, rank: int, peer: int, text: str) -> None:
        """A send or recv of `rank` waits for `peer`, in vain where that has left: the coordinator knows by now."""
        if peer == ANY_SOURCE:
            gone = self._departed_from.keys() - {rank}
            if len(gone) == self.topology.group.size - 1:
                for one in gone:
                    self.report_if_departed(rank, one, text)
            return
        if peer not in self._departed_from or self._is_announced(peer):
            return
        departure = self._pending_departures.setdefault(peer, self._await_departure())
        if departure.question is None:
            report = self._tracker.make_report(ReportKind.UNANSWERED, -1, rank=rank, text=text)
            departure.question = replace(report, peer=peer)
            self._send_report(departure.question)

    def _await_departure(self) -> _Departure:
        return _Departure(_wait_for_coordinator(), time.monotonic() + self._lost_after)

    def _add_departures(self, ranks: Iterable[int], first: int) -> None:
        for rank in ranks:
            self._departed_from[rank] = min(first, self._departed_from.get(rank, first))
            if self._tracker.find_verdict(first) is None:
                self._pending_departures.setdefault(rank, self._await_departure())

    def _find_ranks(self, task: int) -> tuple[int, ...]:
        return next(peer.ranks for peer in self.topology.peers if peer.task == task)

    def _is_announced(self, rank: int) -> bool:
        """Whether the ranks that wait for this rank alone, or all ranks, have its verdict."""
        known = self._tracker.verdicts
        return any(not verdict.orderly or rank in [one.rank for one in verdict.missing] for verdict in known)

    def _decide_departures(self, now: float) -> None:
        """Says which ranks have left, where the coordinator has not: those before the same instance together.

        An orderly departure does no harm: a coordinator that is connected and only late is waited for.
        """
        due = [(rank, one) for rank, one in self._pending_departures.items() if one.patience.is_over(now)]
        together: dict[int, list[int]] = {}
        for rank, departure in due:
            first = self._departed_from[rank]
            # A verdict about letters alone does not reach ranks that wait for an instance.
            waits = (
                self._tracker.find_verdict(first) is None
                if first < messages.P2P_BASE
                else departure.question is not None and not self._is_announced(rank)
            )
            if waits and self._is_connected() and now < departure.give_up_at:
                departure.patience = _wait_for_coordinator()
                if departure.question is not None:  # which may have come before the rank's own leave, without an answer
                    self._send_report(departure.question)
                continue
            del self._pending_departures[rank]
            if waits:
                together.setdefault(first, []).append(rank)
        for first, ranks in sorted(together.items()):
            self._apply_departure(first, ranks)

    def _apply_departure(self, first: int, ranks: Iterable[int]) -> None:
        instance = self._tracker.instances.get(first)
        op = str(instance.collective.operation) if instance else ""
        self._apply_verdict(
            local_verdict.make_departure_verdict(
                self.topology, self._worker, self._tracker.generation, first, op, sorted(ranks)
            )
        )

    def report_stranded(self, verdict: Verdict, failing: Sequence[Instance]) -> None:
        """Report to the coordinator that a departure has made instances fail, so that it records a failure.

        Only a worker that has received the goodbye itself does so: not all of a large group.
        """
        heard = any(member.rank in self._departed_from for member in verdict.missing)
        if verdict.orderly and failing and heard and verdict.decided_by == BY_COORDINATOR:
            self._send_report(self._tracker.make_report(ReportKind.PENDING, failing[0].number))

    def _record_departure(self, report: Report) -> Report:
        """Where a rank goes, the report says what it submitted last too, and is kept."""
        if report.kind in _DEPARTURES:
            report = replace(report, last=self._tracker.last_submissions(report.rank))
            self._departures.append(report)
        return report

    def resend(self) -> None:
        """Report departures and pending failures of NCCL once more.

        A coordinator that went away may not have received them, or not decided.
        """
        for report in self._departures:
            self._send_report(report)
        for _, report in self._pending_decisions.values():
            if report.kind is ReportKind.NATIVE:
                self._send_report(report)

    def on_completed(self, instance: int) -> None:
        """An instance completed after all."""
        if self._pending_decisions:
            self._pending_decisions.pop(instance, None)

    @property
    def is_awaiting_verdict(self) -> bool:
        """Whether a verdict is still to come on something that was reported.

        The coordinator, as long as it is there, reports ranks that have left to those that wait.
        """
        if self._pending_departures and not self._is_connected():
            return True
        tracker = self._tracker
        verdicts = [
            tracker.fault if first == _ANY else tracker.find_verdict(first) for first in self._pending_decisions
        ]
        return any(verdict is None or verdict.orderly for verdict in verdicts)

    def next_deadline(self) -> float:
        """When `on_timer` has something to do; inf where nothing is to come."""
        due = self._tracker.next_deadline()
        if self._pending_departures:
            due = min(due, *(one.patience.at for one in self._pending_departures.values()))
        if self._pending_decisions:
            due = min(due, *(patience.at for patience, _ in self._pending_decisions.values()))
        return due

    def on_timer(self) -> None:
        """Report deadlines and stalls that have come, and decide alone about reports without an answer."""
        now = time.monotonic()
        if self._tracker.next_deadline() <= now:
            for report in self._tracker.collect_due_reports(now):
                if report.kind is ReportKind.EXPIRED:
                    self._raise_fault(report)
                    continue
                self._sample_stacks(self._tracker.seek(report.instance))
                if report.kind is ReportKind.PENDING and not self.topology.idle:
                    self._warn_stalled(report, now)
                if report.kind is ReportKind.PENDING or len(self.topology.peers) > 1:
                    self._send_report(report)
        for first, (patience, report) in list(self._pending_decisions.items()):
            if patience.is_over(now):
                del self._pending_decisions[first]
                self._decide_alone(first, report)
        if self._pending_departures:
            self._decide_departures(now)

    def _raise_fault(self, report: Report) -> None:
        first = report.instance + 1 if report.kind is ReportKind.LOST else max(0, report.instance)
        known = self._tracker.find_verdict(first)
        if known is None or known.orderly:
            patience, counts = _wait_for_coordinator(self._decision_delay(report)), report
            if first in self._pending_decisions:
                earlier_patience, earlier = self._pending_decisions[first]
                patience = min(earlier_patience, patience, key=lambda one: one.end)
                counts = report if _is_more_specific(report, earlier) else earlier
            self._pending_decisions[first] = (patience, counts)
        self._send_report(report)

    def _decision_delay(self, report: Report) -> float:
        match report.kind:
            case ReportKind.LINK if report.cause is Cause.LINK_REFUSED:
                return REFUSED_DECIDE_ALONE_SECONDS
            case ReportKind.MISMATCH:
                return MISMATCH_DECIDE_ALONE_SECONDS
            case ReportKind.NATIVE:
                return self._lost_after + NCCL_DECIDE_ALONE_SECONDS
        return DECIDE_ALONE_SECONDS

    def _decide_alone(self, first: int, report: Report) -> None:
        tracker = self._tracker
        known = tracker.fault if first == _ANY else tracker.find_verdict(first)
        if known is not None and not known.orderly:
            return
        waits = first == _ANY or report.kind in _DEPARTURES or any(one.number >= first for one in tracker.list_open())
        waits = waits or first in self._late_instances
        if known is not None and report.kind not in _DEPARTURES and first != _ANY:
            return
        if not waits:  # it has completed after all
            return
        first = max(0, first)
        if report.kind is ReportKind.EXPIRED:
            gone = [rank for rank, start in self._departed_from.items() if start <= first]
            if gone:  # it could not have completed, whatever else was waited for
                self._apply_departure(min(self._departed_from[rank] for rank in gone), gone)
                return
        instance = tracker.instances.get(first)
        op = str(instance.collective.operation) if instance else ""
        self._apply_verdict(
            local_verdict.make_verdict(self.topology, self._worker, tracker.generation, first, op, report)
        )

    @property
    def _stall_level(self) -> int:
        """The coordinator warns of what waits, and names those who have not come, as long as it is there."""
        return logging.INFO if self._is_connected() else logging.WARNING

    def _warn_stalled(self, report: Report, now: float) -> None:
        instance = self._tracker.instances[report.instance]
        missing = self._tracker.missing_ranks(instance)
        log.log(
            self._stall_level,
            "group %s: %s #%d has been waiting for %.1f s%s (submitted at %s)",
            unscoped_name(self.topology.group.name),
            instance.collective.operation,
            instance.number,
            now - instance.first_arrival.arrived_at,
            f"; local ranks {missing} have not come" if missing else "",
            instance.collective.site or "an unknown place",
            extra=log_fields(
                event="stall",
                group=unscoped_name(self.topology.group.name),
                key=self._tracker.key,
                generation=self._tracker.generation,
                instance=instance.number,
                op=str(instance.collective.operation),
                site=instance.collective.site,
                missing=missing,
                seconds=round(now - instance.first_arrival.arrived_at, 3),
            ),
        )


def _wait_for_coordinator(seconds: float | None = None) -> Patience:
    """From now on."""
    return Patience(DECIDE_ALONE_SECONDS if seconds is None else seconds, time.monotonic(), DECIDE_ALONE_STEPS)


def _is_more_specific(report: Report, earlier: Report) -> bool:
    """Whether a report says more than an earlier one: a failure of NCCL gives way to a report with a culprit."""
    return earlier.kind is ReportKind.NATIVE and report.kind not in (ReportKind.NATIVE, ReportKind.EXPIRED)


def _find_waited_seconds(waiting: Instance, now: float) -> float:
    """Within what time it has not completed: its timeout, or less where a later instance's deadline has ended it."""
    if waiting.deadline <= now + _EARLY_SECONDS:
        return waiting.timeout
    return math.ceil((now - waiting.first_arrival.arrived_at) * 100) / 100
