"""Faults: what group loops report, what is asked about it, and the verdict that follows.

An *inquiry* asks the workers of a generation how far their ranks are at one instance; it ends when all have answered
or after 0.1 s, and then the instance is *judged*. That NCCL failed does not say who is at fault: there it goes on for
as long as somebody is silent and may yet be found to be lost. A verdict covers all instances from `from_instance` on;
an instance fails with the first verdict that covers it, so later ones matter only where they reach further back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from collectived_proto.cause import Cause
from collectived_proto.errors import CODE_BY_CAUSE, Code
from collectived_proto.types import RankPosition, Report, ReportKind, Verdict, unscoped_name
from collectived_runtime.coordinator.core import verdicts
from collectived_runtime.coordinator.core.events import (
    Effect,
    FaultReported,
    Level,
    Log,
    PositionQuery,
    QueryAnswered,
    SendToWorker,
)
from collectived_runtime.coordinator.core.registry import (
    INQUIRY_RETRY_SECONDS,
    INQUIRY_SECONDS,
    MAX_EVIDENCE,
    Departure,
    Evidence,
    GroupRun,
    Inquiry,
    Registry,
)
from collectived_runtime.coordinator.core.timers import (
    InquiryRetry,
    InquiryTimeout,
)
from collectived_runtime.verdicts import decisions

_RANK_REPORTS = (ReportKind.LOST, ReportKind.ABORT, ReportKind.LEFT, ReportKind.EXHAUSTED)
_P2P_REPORTS = (ReportKind.OVERDUE, ReportKind.UNANSWERED, ReportKind.UNCLAIMED)
_INSTANCE_REPORTS = (ReportKind.PENDING, ReportKind.EXPIRED, ReportKind.MISMATCH, ReportKind.LINK, ReportKind.NATIVE)
WARN_BACKOFF = (
    1.9  # times as long a wait: group loops report it again after twice the time, and not all in the same moment
)
# Of two reports on one instance the graver decides how it is judged.
_SEVERITY = {
    ReportKind.PENDING: 0,
    ReportKind.LINK: 0,
    ReportKind.NATIVE: 0,
    ReportKind.EXPIRED: 1,
    ReportKind.MISMATCH: 2,
}


def handle_report(registry: Registry, event: FaultReported, now: float) -> Iterator[Effect]:
    task, report = event.task, event.report
    generation = registry.generations.get(report.generation)
    if generation is None:
        yield from _answer_unknown_generation(task, report)
    elif generation.awaited_workers:
        # After a restart somebody may still bring a verdict that the earlier coordinator gave.
        generation.deferred_reports.append(event)
    elif task not in generation.ranks_by_worker or (
        report.kind in (*_RANK_REPORTS, *_P2P_REPORTS) and report.rank not in generation.ranks_by_worker[task]
    ):
        yield Log(
            "warning",
            f"worker {task} reports {report.kind.name} of rank {report.rank} of group "
            f"{unscoped_name(generation.info.name)!r}, which is not its own: ignored",
        )
    else:
        generation.update_progress(task, -1, report.ranks, now)
        if report.kind in _RANK_REPORTS:
            yield from _handle_rank_report(registry, generation, report, now)
            yield from _discard_departed_worker(registry, generation, task, now)
        elif report.kind in _P2P_REPORTS:
            yield from _handle_p2p_report(registry, generation, task, report, now)
        elif report.kind is ReportKind.NEAR:
            yield from _ask_for_stacks(registry, generation, task, report.instance)
        elif report.kind is ReportKind.RESUMED:
            yield from _handle_resumed(registry, generation, report.instance)
        else:
            yield from _handle_instance_report(registry, generation, task, report, now)


def _answer_unknown_generation(task: int, report: Report) -> Iterator[Effect]:
    """Nothing is known about this generation: it ended long ago. A group loop that waits must not wait for ever."""
    yield Log("debug", f"worker {task} reports {report.kind.name} of generation {report.generation}, long forgotten")
    if report.kind in _INSTANCE_REPORTS:
        yield SendToWorker(task, _make_forgotten_verdict(report))


def _make_forgotten_verdict(report: Report) -> Verdict:
    cause = Cause.FORGOTTEN
    text = "the coordinator does not know this group any more: join it again"
    return Verdict("", report.key, report.generation, CODE_BY_CAUSE[cause], text, 0, cause=cause)


# Faults of one rank: decided at once.


def _handle_rank_report(registry: Registry, generation: GroupRun, report: Report, now: float) -> Iterator[Effect]:
    rank, last = report.rank, report.instance
    generation.update_last_submitted(rank, last, now)
    generation.record_submissions(rank, report.last)
    match report.kind:
        case ReportKind.LOST:
            yield from mark_rank_lost(registry, generation, rank, last + 1, report.text, now)
        case ReportKind.LEFT:
            yield from _mark_rank_left(registry, generation, rank, last, now)
        case ReportKind.ABORT:
            decision = decisions.judge_abort(generation.member(rank, now), report.text, report.cause)
            # A rank that gives up because it has not heard of a failure yet is no second failure.
            if _is_uncovered(generation, max(last, 0)):
                yield from deliver(registry, generation, verdicts.make_verdict(generation, decision, 0, now), now)
            successor = registry.get_successor(generation)
            if successor:
                yield from deliver(registry, successor, verdicts.make_verdict(successor, decision, 0, now), now)
        case _:
            decision = decisions.judge_exhaustion(generation.member(rank, now), report.text)
            yield from deliver(
                registry, generation, verdicts.make_verdict(generation, decision, max(last, 0), now), now
            )


def _handle_p2p_report(
    registry: Registry, generation: GroupRun, task: int, report: Report, now: float
) -> Iterator[Effect]:
    """A send or recv waits: too long, or for a rank of whose departure that worker has not heard."""
    if report.kind is not ReportKind.UNANSWERED:
        yield from deliver(registry, generation, verdicts.judge_p2p(generation, report, now), now)
    elif report.peer in generation.departed:
        start = generation.verdicts[-1].from_instance if generation.verdicts else 0
        decision = decisions.judge_departure([generation.member(report.peer, now)], None)
        gone = verdicts.make_verdict(generation, decision, start, now)
        yield SendToWorker(task, replace(gone, orderly=True))
    else:
        level: Level = "debug" if generation.idle else "warning"
        yield Log(level, verdicts.p2p_wait_warning(generation, report, now))


def mark_rank_lost(
    registry: Registry, generation: GroupRun, rank: int, from_instance: int, why: str, now: float
) -> Iterator[Effect]:
    """A rank's client is gone: what it had fully submitted may still complete, nothing later can."""
    if rank not in generation.departed:
        generation.departed[rank] = Departure.LOST
        if _is_uncovered(generation, from_instance):
            decision = verdicts.judge_lost_rank(generation, rank, why, now)
            verdict = verdicts.make_verdict(generation, decision, from_instance, now)
            yield from deliver(registry, generation, verdict, now)
        registry.retire_if_over(generation)
    successor = registry.get_successor(generation)
    if successor:
        yield from mark_rank_lost(registry, successor, rank, successor.first_instance, why, now)


def _mark_rank_left(registry: Registry, generation: GroupRun, rank: int, last: int, now: float) -> Iterator[Effect]:
    """A rank left in order: a fault only for those who submit beyond its last instance."""
    if rank not in generation.departed:
        decision = decisions.judge_departure([generation.member(rank, now)], last)
        generation.departed[rank] = Departure.LEFT
        yield Log("debug", f"group {unscoped_name(generation.info.name)!r}: {decision.text}")
        size = generation.info.size
        if len(generation.departed) < size and _is_uncovered(generation, last + 1, orderly=True):
            others = (other for other in range(size) if other not in generation.departed)
            waiting = any(generation.last_submitted(other) > last for other in others)
            verdict = verdicts.make_verdict(generation, decision, last + 1, now)
            yield from deliver(registry, generation, replace(verdict, orderly=True), now, fault=waiting)
        registry.retire_if_over(generation)
    successor = registry.get_successor(generation)
    if successor:
        yield from _mark_rank_left(registry, successor, rank, successor.first_instance - 1, now)


def mark_workers_lost(
    registry: Registry, generation: GroupRun, tasks: Iterable[int], why: str, from_instance: int, now: float
) -> Iterator[Effect]:
    """All ranks of these workers that had not departed are lost together."""
    ranks = sorted(rank for task in tasks for rank in generation.active_ranks(task))
    if ranks:
        decision = verdicts.judge_lost(generation, ranks, Cause.LOST_WORKER, why, now)
        generation.departed |= dict.fromkeys(ranks, Departure.LOST)
        verdict = verdicts.make_verdict(generation, decision, from_instance, now)
        yield from deliver(registry, generation, verdict, now)
        registry.retire_if_over(generation)


# Faults of an instance: judged when it is known how far everybody is.


def _handle_instance_report(
    registry: Registry, generation: GroupRun, task: int, report: Report, now: float
) -> Iterator[Effect]:
    known = generation.find_verdict(report.instance)
    if known is not None:
        # The reporter has not heard of it yet; and a departure in order that somebody runs into is a fault after all.
        yield SendToWorker(task, known)
        yield from _record(registry, generation, known, now)
        return
    link, native = report.kind is ReportKind.LINK, report.kind is ReportKind.NATIVE
    if link and not generation.active_ranks(report.worker):
        return  # that worker left in order, and its links with it
    evidence = _get_or_create_evidence(generation, report.instance, now)
    generation.update_progress(task, report.instance, report.ranks, now)
    peer = report.worker if link else -1
    inquiry = (
        _find_native_inquiry(registry, generation)
        if native
        else _find_inquiry(registry, generation, report.instance, peer)
    )
    if inquiry is None and report.kind is ReportKind.PENDING and evidence.warned_after_seconds:
        # Everybody has been asked already; what this worker adds is compared with what is known.
        known_so_far = Inquiry(0, report.generation, report.instance, report.kind, set())
        if (
            not _is_warning_due(registry, evidence, now)
            or verdicts.judge(generation, known_so_far, {}, now) is not None
        ):
            yield from _judge(registry, known_so_far, now)
            return
    if inquiry is None:
        inquiry = Inquiry(registry.new_id(), report.generation, report.instance, report.kind, set())
        inquiry.peer = report.worker if link else -1
        # A stream that breaks with what broke NCCL breaks a moment later, and as much later is its worker lost.
        inquiry.deadline = now + INQUIRY_SECONDS + (registry.worker_timeout if native else 0.0)
        registry.inquiries[inquiry.query] = inquiry
        registry.add_timer(inquiry.deadline, InquiryTimeout(inquiry.query))
        yield from _send_queries(registry, generation, inquiry, task)
    else:
        inquiry.pending_workers.discard(task)
    if link:
        _add_link_report(inquiry, task, report)
    elif _SEVERITY[report.kind] >= _SEVERITY[inquiry.kind]:
        inquiry.kind, inquiry.timeout_seconds = report.kind, report.timeout_seconds
        inquiry.text = report.text or inquiry.text
    if native:
        inquiry.native_errors.setdefault(task, report.text or "NCCL failed")
        inquiry.instance = min(inquiry.instance, report.instance)
    if not inquiry.pending_workers:
        yield from _judge_or_wait(registry, inquiry, now)


def _add_link_report(inquiry: Inquiry, task: int, report: Report) -> None:
    """That a link broke weighs more than that another one was refused."""
    is_refused = report.cause is Cause.LINK_REFUSED
    if inquiry.reporter < 0 or not is_refused:
        inquiry.reporter, inquiry.is_refused = task, is_refused
        inquiry.text = report.text or "no details given"


def _get_or_create_evidence(generation: GroupRun, instance: int, now: float) -> Evidence:
    if instance not in generation.evidence:
        while len(generation.evidence) >= MAX_EVIDENCE:
            del generation.evidence[min(generation.evidence)]
        generation.evidence[instance] = Evidence(now, dict(generation.departed_positions.get(instance, {})))
    return generation.evidence[instance]


def _waited_seconds(registry: Registry, evidence: Evidence, now: float) -> float:
    return registry.stall_seconds + max(0.0, now - evidence.since)


def _is_warning_due(registry: Registry, evidence: Evidence, now: float) -> bool:
    return _waited_seconds(registry, evidence, now) >= WARN_BACKOFF * evidence.warned_after_seconds


def _find_inquiry(registry: Registry, generation: GroupRun, instance: int, peer: int = -1) -> Inquiry | None:
    wanted = (generation.info.generation, instance, peer)
    for inquiry in registry.inquiries.values():
        if (inquiry.generation, inquiry.instance, inquiry.peer) == wanted and inquiry.kind is not ReportKind.NATIVE:
            return inquiry
    return None


def _find_native_inquiry(registry: Registry, generation: GroupRun) -> Inquiry | None:
    """What is asked since NCCL failed, once for all instances of which that is reported."""
    number = generation.info.generation
    return next((i for i in registry.inquiries.values() if (i.generation, i.kind) == (number, ReportKind.NATIVE)), None)


def _send_queries(registry: Registry, generation: GroupRun, inquiry: Inquiry, reporter: int = -1) -> Iterator[Effect]:
    """Ask the other workers; about a broken link only the one at its other end.

    That one's word matters because it sends in order: had it left, its ranks' departure would arrive before its answer.
    """
    tasks = list(generation.ranks_by_worker) if inquiry.peer < 0 else [inquiry.peer]
    message = PositionQuery(generation.info.key, inquiry.generation, inquiry.instance, inquiry.query)
    for task in tasks:
        if task != reporter and registry.is_connected(task) and generation.active_ranks(task):
            inquiry.pending_workers.add(task)
            yield SendToWorker(task, message)


def _ask_for_stacks(registry: Registry, generation: GroupRun, reporter: int, instance: int) -> Iterator[Effect]:
    """Have the other workers find out what their ranks do that have not come, before they are asked for good."""
    message = PositionQuery(generation.info.key, generation.info.generation, instance, 0)
    for task in generation.ranks_by_worker:
        if task != reporter and registry.is_connected(task) and generation.active_ranks(task):
            yield SendToWorker(task, message)


def handle_query_answer(registry: Registry, event: QueryAnswered, now: float) -> Iterator[Effect]:
    inquiry = registry.inquiries.get(event.query)
    if inquiry is None:
        return
    registry.generations[inquiry.generation].update_progress(event.task, inquiry.instance, event.positions, now)
    inquiry.pending_workers.discard(event.task)
    if not inquiry.pending_workers:
        yield from _judge_or_wait(registry, inquiry, now)


def _judge_or_wait(registry: Registry, inquiry: Inquiry, now: float) -> Iterator[Effect]:
    """All have answered: judged, unless more is to come: ranks that decide who the majority is, or who is lost."""
    generation = registry.generations[inquiry.generation]
    if now >= inquiry.deadline:
        yield from _judge(registry, inquiry, now)
    elif inquiry.kind is ReportKind.NATIVE:
        away = {
            task
            for task in generation.ranks_by_worker
            if generation.active_ranks(task) and not registry.is_connected(task)
        }
        links = [
            one.deadline
            for one in registry.inquiries.values()
            if one.generation == inquiry.generation and one.peer >= 0
        ]
        inquiry.pending_workers |= away  # they come back and are asked, or are lost
        if links and not away:
            registry.add_timer(max(links), InquiryRetry(inquiry.query))
        elif not away:
            yield from _judge(registry, inquiry, now)
    elif verdicts.is_majority_undecided(generation, inquiry.instance):
        registry.add_timer(min(inquiry.deadline, now + INQUIRY_RETRY_SECONDS), InquiryRetry(inquiry.query))
    else:
        yield from _judge(registry, inquiry, now)


def resend_queries(registry: Registry, task: int) -> Iterator[Effect]:
    """A worker has come back: what it was asked on its former stream, or could not be asked, it is asked again."""
    for inquiry in registry.inquiries.values():
        if inquiry.kind is ReportKind.NATIVE and task in inquiry.pending_workers:
            key = registry.generations[inquiry.generation].info.key
            yield SendToWorker(task, PositionQuery(key, inquiry.generation, inquiry.instance, inquiry.query))


def _discard_departed_worker(registry: Registry, generation: GroupRun, task: int, now: float) -> Iterator[Effect]:
    """A rank has told that it goes: a worker without any other may have no group loop left that answers."""
    inquiry = _find_native_inquiry(registry, generation)
    if inquiry is not None and task in inquiry.pending_workers and not generation.active_ranks(task):
        inquiry.pending_workers.discard(task)
        if not inquiry.pending_workers:
            yield from _judge_or_wait(registry, inquiry, now)


def on_inquiry_retry(registry: Registry, query: int, now: float) -> Iterator[Effect]:
    """Ask everybody again, in case the missing ranks have come."""
    inquiry = registry.inquiries.get(query)
    if inquiry is not None and inquiry.kind is ReportKind.NATIVE and not inquiry.pending_workers:
        yield from _judge_or_wait(registry, inquiry, now)
    elif inquiry is not None and not inquiry.pending_workers:
        yield from _send_queries(registry, registry.generations[inquiry.generation], inquiry)
        if not inquiry.pending_workers:
            yield from _judge(registry, inquiry, now)


def on_inquiry_timeout(registry: Registry, query: int, now: float) -> Iterator[Effect]:
    """Somebody did not answer in time: judged by what is known."""
    if query in registry.inquiries:
        yield from _judge(registry, registry.inquiries[query], now)


def _handle_resumed(registry: Registry, generation: GroupRun, instance: int) -> Iterator[Effect]:
    generation.evidence.pop(instance, None)
    inquiry = _find_inquiry(registry, generation, instance)
    if inquiry and inquiry.kind is ReportKind.PENDING:
        del registry.inquiries[inquiry.query]
    yield from ()


def _judge(registry: Registry, inquiry: Inquiry, now: float) -> Iterator[Effect]:
    registry.inquiries.pop(inquiry.query, None)
    generation = registry.generations[inquiry.generation]
    native = _find_native_inquiry(registry, generation)
    if inquiry.kind is ReportKind.EXPIRED and native is not None and native.instance <= inquiry.instance:
        # It could not have completed, whoever came: the deadline only ends the search for somebody who is lost.
        yield from _judge(registry, native, now)
        return
    evidence = _get_or_create_evidence(generation, inquiry.instance, now)
    silent = {task: _describe_silence(registry, task) for task in inquiry.pending_workers}
    silent |= {
        task: _describe_silence(registry, task)
        for task in generation.ranks_by_worker
        if not registry.is_connected(task)
    }
    decision = verdicts.judge(generation, inquiry, silent, now)
    if decision is not None:
        if decision.cause is Cause.MISMATCH and generation.drained_from is None:
            decision = verdicts.with_successor(decision, registry.new_id())
        yield from deliver(registry, generation, decision, now)
    elif inquiry.kind is ReportKind.PENDING and _is_warning_due(registry, evidence, now):
        evidence.warned_after_seconds = _waited_seconds(registry, evidence, now)
        text = verdicts.pending_warning(generation, inquiry.instance, silent, registry.stall_seconds, now)
        yield Log(
            "warning" if text and not generation.idle else "debug",
            text or f"instance {inquiry.instance} is slow: its data is moving",
        )
    elif inquiry.kind is not ReportKind.PENDING:
        generation.evidence.pop(inquiry.instance, None)  # it has ended after all


def _describe_silence(registry: Registry, task: int) -> str:
    if not registry.is_connected(task):
        return f"worker {task} is not connected to the coordinator"
    return f"worker {task} does not answer"


# Verdicts


def deliver(
    registry: Registry, generation: GroupRun, verdict: Verdict, now: float, fault: bool = True
) -> Iterator[Effect]:
    """Send a verdict to all workers of a generation, unless an earlier one covers all that it covers.

    One that only says that a rank has left does not: sends and receives between others went on. Without `fault` it only
    announces that a rank left in order.
    """
    if _is_uncovered(generation, verdict.from_instance, verdict.orderly):
        generation.verdicts.append(verdict)
        for inquiry in list(registry.inquiries.values()):
            if (inquiry.generation, inquiry.instance >= verdict.from_instance) == (verdict.generation, True):
                del registry.inquiries[inquiry.query]
        for instance in [instance for instance in generation.evidence if instance >= verdict.from_instance]:
            del generation.evidence[instance]
        for task in generation.ranks_by_worker:
            if registry.is_connected(task) and not (generation.departed and _has_worker_left(generation, task)):
                yield SendToWorker(task, verdict)
        expected = generation.drained_from is not None and verdict.from_instance >= generation.drained_from
        if fault and not expected:
            yield from _record(registry, generation, verdict, now)
        if verdict.successor:
            _create_successor(registry, generation, verdict)
    registry.retire_if_over(generation)


def _is_uncovered(generation: GroupRun, from_instance: int, orderly: bool = False) -> bool:
    """Whether a verdict from there on would be news. Asked before one is made: thousands of ranks may go at once."""
    covering = [known for known in generation.verdicts if known.from_instance <= from_instance]
    return not covering or (not orderly and all(known.orderly for known in covering))


def _has_worker_left(generation: GroupRun, task: int) -> bool:
    return all(generation.departed.get(rank) is Departure.LEFT for rank in generation.ranks_by_worker[task])


def _record(registry: Registry, generation: GroupRun, verdict: Verdict, now: float) -> Iterator[Effect]:
    """The first fault of a generation is what people want to read; its echoes are not."""
    group = unscoped_name(generation.info.name)
    if generation.failed:
        yield Log("debug", f"group {group!r}, failed already: {verdict.message}")
        return
    generation.failed = True
    registry.record_failure(verdict, now)
    registry.counts.verdicts[verdict.code] = registry.counts.verdicts.get(verdict.code, 0) + 1
    yield Log("info", f"group {group!r} failed with {Code(verdict.code).name}: {verdict.message}", verdict)
    registry.retire_if_over(generation)


def _create_successor(registry: Registry, generation: GroupRun, verdict: Verdict) -> None:
    """The group goes on in the successor: same ranks, numbers and last calls; nothing submitted yet."""
    info = replace(generation.info, generation=verdict.successor)
    successor = GroupRun(info, generation.peers, generation.table, first_instance=verdict.next_instance)
    last = verdict.next_instance - 1  # at which all ranks have arrived, or do before they go on
    for rank, known in generation.progress.items():
        position, submitted = known.position, min(known.position.submitted, last)
        moved = RankPosition(rank, submitted, position.finished, position.last_op, position.last_site)
        successor.progress[rank] = replace(known, position=replace(moved, idle_seconds=position.idle_seconds))
    successor.idle = generation.idle
    successor.predecessor = generation.info.generation
    successor.departed = dict(generation.departed)
    generation.successor = verdict.successor
    registry.generations[verdict.successor] = successor
    registry.latest_generations[generation.info.name] = verdict.successor
    before = registry.generations.get(generation.predecessor)
    if before is not None:
        # Everybody has gone on twice since: nothing of that one can still be running.
        before.departed |= {rank: Departure.MOVED for rank in range(before.info.size) if rank not in before.departed}
