"""What a lane tells the coordinator when something is wrong, and what it does when nobody answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from collectived_proto.local import wire
from collectived_proto.types import Report, ReportKind, Verdict, shown_name
from collectived_runtime.engine import verdicts
from collectived_runtime.engine.ledger import Ledger
from collectived_runtime.engine.links import LEFT_TEXT
from collectived_runtime.engine.topology import Topology
from collectived_runtime.logs import facts

log = logging.getLogger("collectived.lane")

_DEPARTURES = (ReportKind.LEFT, ReportKind.LOST, ReportKind.ABORT)
_ANY = -1  # whatever instance comes next
DECIDE_ALONE_SECONDS = 0.12  # how long a lane waits for the coordinator's verdict before it decides for itself

MISMATCH_ALONE_SECONDS = 1.0  # the same where nothing but the truth about who differs is waited for
NATIVE_ALONE_SECONDS = 1.0  # the same where NCCL failed, after the time in which the coordinator finds out who is lost


class Reports:
    """Of one generation.

    Args:
        worker: this worker's name, for what it decides alone.
        report: sends a report to the coordinator.
        rule: takes a verdict that this worker made alone.
        lost_after: seconds in which the coordinator finds out that a silent worker is lost.
        connected: whether the coordinator can be reached.
    """

    def __init__(
        self,
        topology: Topology,
        ledger: Ledger,
        worker: str,
        report: Callable[[Report], None],
        rule: Callable[[Verdict], None],
        lost_after: float,
        connected: Callable[[], bool],
    ) -> None:
        self._topology = topology
        self._ledger = ledger
        self._worker = worker
        self._report = report
        self._rule = rule
        self._lost_after = lost_after
        self._connected = connected
        self._departures: list[Report] = []
        self._late: set[int] = set()  # instances that some local rank will not submit
        self._alone_at: dict[int, tuple[float, Report]] = {}  # first instance concerned -> when to decide it alone
        self._left: dict[int, int] = {}  # ranks known to have left in order, and the first instance without them
        self._parting: dict[int, tuple[float, bool]] = {}  # of these: when to say so alone, and whether a post waits

    def fault(self, kind: ReportKind, instance: int, *, rank: int = 0, worker: int = 0, text: str = "") -> None:
        """Reports what needs a verdict."""
        report = self._ledger.report(kind, instance, rank=rank, worker=worker, text=text)
        self._raise(self._departing(report))

    def late(self, instance: int, rank: int, op: str, timeout: float) -> None:
        """A local rank has not submitted an instance by its own deadline, and will not."""
        self._late.add(instance)
        report = self._ledger.report(ReportKind.EXPIRED, instance, timeout=timeout)
        ranks = tuple(replace(known, op=op) if known.rank == rank else known for known in report.ranks)
        self._raise(replace(report, ranks=ranks))

    def overdue(self, rank: int, peer: int, timeout: float, text: str) -> None:
        """A send or recv of `rank` has waited for `peer` beyond its deadline."""
        report = self._ledger.report(ReportKind.OVERDUE, -1, rank=rank, text=text, timeout=timeout)
        report = replace(report, peer=peer)
        self._alone_at.setdefault(_ANY, (time.monotonic() + DECIDE_ALONE_SECONDS, report))
        self._report(report)

    def unclaimed(self, rank: int, peer: int, text: str) -> None:
        """There is no memory for what rank `peer` has sent to `rank`, which has not asked for it."""
        report = replace(self._ledger.report(ReportKind.UNCLAIMED, -1, rank=rank, text=text), peer=peer)
        self._alone_at.setdefault(_ANY, (time.monotonic() + DECIDE_ALONE_SECONDS, report))
        self._report(report)

    def unanswered(self, rank: int, peer: int, waited: float, text: str) -> None:
        """A send or recv of `rank` has waited for `peer` for some seconds, which may be a mistake."""
        if not self._topology.idle:
            group = shown_name(self._topology.group.name)
            log.warning(
                "group %s: %s of rank %d has been waiting for rank %d for %.1f s", group, text, rank, peer, waited
            )
        report = self._ledger.report(ReportKind.UNANSWERED, -1, rank=rank, text=text, timeout=waited)
        self._report(replace(report, peer=peer))

    def resumed(self, instance: int) -> None:
        """What was pending has completed."""
        self._report(self._ledger.report(ReportKind.RESUMED, instance))

    def left(self, rank: int, last: int) -> None:
        """A local rank has left in order, after that instance: whoever goes on without it is to know."""
        self._report(self._departing(self._ledger.report(ReportKind.LEFT, last, rank=rank)))
        self._part([rank], last + 1)

    def parted(self, task: int, instance: int) -> None:
        """A worker has said goodbye, which this instance waits for: all its ranks have left in order."""
        self._report(self._ledger.report(ReportKind.LINK, instance, worker=task, text=LEFT_TEXT))
        self._part(self._ranks_of(task), instance)

    def gone(self, task: int) -> None:
        """A worker has said goodbye; which instance is the first without its ranks is not known, but no letter will go
        to them, or come, any more."""
        for rank in self._ranks_of(task):
            self._left.setdefault(rank, wire.POST)

    def missed(self, rank: int, peer: int, text: str) -> None:
        """A send or recv of `rank` waits for `peer`, in vain where that has left: the coordinator knows by now."""
        if peer not in self._left or self._named(peer):
            return
        at, asked = self._parting.get(peer, (time.monotonic() + DECIDE_ALONE_SECONDS, False))
        self._parting[peer] = at, True
        if not asked:
            self._report(replace(self._ledger.report(ReportKind.UNANSWERED, -1, rank=rank, text=text), peer=peer))

    def _part(self, ranks: Iterable[int], first: int) -> None:
        at = time.monotonic() + DECIDE_ALONE_SECONDS
        for rank in ranks:
            self._left[rank] = min(first, self._left.get(rank, first))
            if self._ledger.verdict_on(first) is None:
                self._parting.setdefault(rank, (at, False))

    def _ranks_of(self, task: int) -> tuple[int, ...]:
        return next(peer.ranks for peer in self._topology.peers if peer.task == task)

    def _named(self, rank: int) -> bool:
        """Whether those who wait for this rank alone have been told, or all have."""
        known = self._ledger.verdicts
        return any(not verdict.orderly or rank in [one.rank for one in verdict.missing] for verdict in known)

    def _part_alone(self, now: float) -> None:
        """Says which ranks have left, where the coordinator has not: those before the same instance together."""
        due = [(rank, post) for rank, (at, post) in self._parting.items() if at <= now]
        together: dict[int, list[int]] = {}
        for rank, post in due:
            del self._parting[rank]
            first = self._left[rank]
            # What has been said of letters alone does not reach those who wait for an instance.
            waits = self._ledger.verdict_on(first) is None if first < wire.POST else post and not self._named(rank)
            if waits:
                together.setdefault(first, []).append(rank)
        for first, ranks in sorted(together.items()):
            instance = self._ledger.instances.get(first)
            op = str(instance.collective.operation) if instance else ""
            self._rule(verdicts.left(self._topology, self._worker, self._ledger.generation, first, op, sorted(ranks)))

    def _departing(self, report: Report) -> Report:
        """Where a rank goes, the report says what it submitted last too, and is kept."""
        if report.kind in _DEPARTURES:
            report = replace(report, last=self._ledger.last_submissions(report.rank))
            self._departures.append(report)
        return report

    def again(self) -> None:
        """Says once more who has gone and that NCCL failed, on which a verdict may take long: what was said to a
        coordinator that went away may not have been heard, or not been decided."""
        for report in self._departures:
            self._report(report)
        for _, report in self._alone_at.values():
            if report.kind is ReportKind.NATIVE:
                self._report(report)

    def completed(self, instance: int) -> None:
        """An instance completed after all."""
        if self._alone_at:
            self._alone_at.pop(instance, None)

    @property
    def undecided(self) -> bool:
        """Whether a verdict is still to come on something that was reported.

        That ranks have left the coordinator says, as long as it is there, to whom it may concern.
        """
        if self._parting and not self._connected():
            return True
        ledger = self._ledger
        verdicts = [ledger.fault if first == _ANY else ledger.verdict_on(first) for first in self._alone_at]
        return any(verdict is None or verdict.orderly for verdict in verdicts)

    def wakeup(self) -> float:
        """When `due` has something to do; inf where nothing is to come."""
        due = self._ledger.wakeup()
        if self._parting:
            due = min(due, *(at for at, _ in self._parting.values()))
        return min(due, *(at for at, _ in self._alone_at.values())) if self._alone_at else due

    def due(self) -> None:
        """Reports deadlines and stalls that have come, and decides alone what nobody has answered."""
        now = time.monotonic()
        if self._ledger.wakeup() <= now:
            for report in self._ledger.due(now):
                if report.kind is ReportKind.EXPIRED:
                    self._raise(report)
                else:
                    if not self._topology.idle:
                        self._warn_stalled(report, now)
                    self._report(report)
        for first, (at, report) in list(self._alone_at.items()):
            if at <= now:
                del self._alone_at[first]
                self._decide_alone(first, report)
        if self._parting:
            self._part_alone(now)

    def _raise(self, report: Report) -> None:
        first = report.instance + 1 if report.kind is ReportKind.LOST else max(0, report.instance)
        known = self._ledger.verdict_on(first)
        if known is None or known.orderly:
            at, counts = time.monotonic() + self._hurry(report.kind), report
            if first in self._alone_at:
                earlier_at, earlier = self._alone_at[first]
                at = min(at, earlier_at)
                counts = report if _knows_more(report, earlier) else earlier
            self._alone_at[first] = (at, counts)
        self._report(report)

    def _hurry(self, kind: ReportKind) -> float:
        match kind:
            case ReportKind.MISMATCH:
                return MISMATCH_ALONE_SECONDS
            case ReportKind.NATIVE:
                return self._lost_after + NATIVE_ALONE_SECONDS
        return DECIDE_ALONE_SECONDS

    def _decide_alone(self, first: int, report: Report) -> None:
        ledger = self._ledger
        known = ledger.fault if first == _ANY else ledger.verdict_on(first)
        if known is not None and not known.orderly:
            return
        waits = first == _ANY or report.kind in _DEPARTURES or any(one.number >= first for one in ledger.open())
        waits = waits or first in self._late
        if known is not None and report.kind not in _DEPARTURES and first != _ANY:
            return
        if not waits:  # it has completed after all
            return
        first = max(0, first)
        instance = ledger.instances.get(first)
        op = str(instance.collective.operation) if instance else ""
        self._rule(verdicts.alone(self._topology, self._worker, ledger.generation, first, op, report))

    def _warn_stalled(self, report: Report, now: float) -> None:
        instance = self._ledger.instances[report.instance]
        missing = self._ledger.missing(instance)
        log.warning(
            "group %s: %s #%d has been waiting for %.1f s%s (submitted at %s)",
            shown_name(self._topology.group.name),
            instance.collective.operation,
            instance.number,
            now - instance.first.at,
            f"; local ranks {missing} have not come" if missing else "",
            instance.collective.site or "an unknown place",
            extra=facts(
                event="stall",
                group=shown_name(self._topology.group.name),
                key=self._ledger.key,
                generation=self._ledger.generation,
                instance=instance.number,
                op=str(instance.collective.operation),
                site=instance.collective.site,
                missing=missing,
                seconds=round(now - instance.first.at, 3),
            ),
        )


def _knows_more(report: Report, earlier: Report) -> bool:
    """Whether a report says more than an earlier one: that NCCL failed yields to what names who is at fault."""
    return earlier.kind is ReportKind.NATIVE and report.kind not in (ReportKind.NATIVE, ReportKind.EXPIRED)
