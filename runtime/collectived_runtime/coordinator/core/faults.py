"""Faults: what group loops report of ranks, sends and receives, and the verdict that follows at once.

A report about an instance leads to questions first: `inquiries`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from collectived_proto.cause import Cause
from collectived_proto.errors import CODE_BY_CAUSE
from collectived_proto.types import Report, ReportKind, Verdict, unscoped_name
from collectived_runtime.coordinator.core import inquiries, verdicts
from collectived_runtime.coordinator.core.delivery import deliver, is_uncovered
from collectived_runtime.coordinator.core.events import (
    Effect,
    FaultReported,
    Level,
    Log,
    SendToWorker,
)
from collectived_runtime.coordinator.core.registry import (
    Departure,
    GenerationRecord,
    Registry,
)
from collectived_runtime.verdicts import decisions

_RANK_REPORTS = (ReportKind.LOST, ReportKind.ABORT, ReportKind.LEFT, ReportKind.EXHAUSTED)
_P2P_REPORTS = (ReportKind.OVERDUE, ReportKind.UNANSWERED, ReportKind.UNCLAIMED)
_INSTANCE_REPORTS = (ReportKind.PENDING, ReportKind.EXPIRED, ReportKind.MISMATCH, ReportKind.LINK, ReportKind.NATIVE)


def handle_report(registry: Registry, event: FaultReported, now: float) -> Iterator[Effect]:
    task, report = event.task, event.report
    generation = registry.generations.get(report.generation)
    if generation is None:
        yield from _answer_unknown_generation(task, report)
    elif generation.awaited_workers:
        # After a restart a worker may still bring a verdict that the earlier coordinator gave.
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
            yield from inquiries.discard_departed_worker(registry, generation, task, now)
        elif report.kind in _P2P_REPORTS:
            yield from _handle_p2p_report(registry, generation, task, report, now)
        elif report.kind is ReportKind.NEAR:
            yield from inquiries.ask_for_stacks(registry, generation, task, report.instance)
        elif report.kind is ReportKind.RESUMED:
            yield from inquiries.handle_resumed(registry, generation, report.instance)
        else:
            yield from inquiries.handle_instance_report(registry, generation, task, report, now)


def _answer_unknown_generation(task: int, report: Report) -> Iterator[Effect]:
    """Nothing is known about this generation: it ended long ago. A group loop that waits must not wait forever."""
    yield Log("debug", f"worker {task} reports {report.kind.name} of generation {report.generation}, long forgotten")
    if report.kind in _INSTANCE_REPORTS:
        yield SendToWorker(task, _make_forgotten_verdict(report))


def _make_forgotten_verdict(report: Report) -> Verdict:
    cause = Cause.FORGOTTEN
    text = "the coordinator does not know this group any more: join it again"
    return Verdict("", report.key, report.generation, CODE_BY_CAUSE[cause], text, 0, cause=cause)


# Faults of one rank: decided at once.


def _handle_rank_report(
    registry: Registry, generation: GenerationRecord, report: Report, now: float
) -> Iterator[Effect]:
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
            # A rank that gives up because a failure has not reached it yet is no second failure.
            if is_uncovered(generation, max(last, 0)):
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
    registry: Registry, generation: GenerationRecord, task: int, report: Report, now: float
) -> Iterator[Effect]:
    """A send or recv waits: too long, or for a rank whose departure that worker does not know."""
    if report.kind is not ReportKind.UNANSWERED:
        yield from deliver(registry, generation, verdicts.judge_p2p(generation, report, now), now)
    elif report.peer in generation.departed:
        start = generation.verdicts[-1].from_instance if generation.verdicts else 0
        decision = verdicts.judge_departure(generation, report.peer, None, now)
        gone = verdicts.make_verdict(generation, decision, start, now)
        yield SendToWorker(task, replace(gone, orderly=True))
    else:
        # A worker may ask about a rank that has said goodbye before the report of that rank's own worker has come.
        level: Level = "warning" if report.timeout_seconds and not generation.idle else "debug"
        yield Log(level, verdicts.p2p_wait_warning(generation, report, now))


def mark_rank_lost(
    registry: Registry, generation: GenerationRecord, rank: int, from_instance: int, why: str, now: float
) -> Iterator[Effect]:
    """A rank's client is gone: what it had fully submitted may still complete, nothing later can."""
    if rank not in generation.departed:
        generation.departed[rank] = Departure.LOST
        if is_uncovered(generation, from_instance):
            decision = verdicts.judge_lost_rank(generation, rank, why, now)
            verdict = verdicts.make_verdict(generation, decision, from_instance, now)
            yield from deliver(registry, generation, verdict, now)
        registry.retire_if_over(generation)
    successor = registry.get_successor(generation)
    if successor:
        yield from mark_rank_lost(registry, successor, rank, successor.first_instance, why, now)


def _mark_rank_left(
    registry: Registry, generation: GenerationRecord, rank: int, last: int, now: float
) -> Iterator[Effect]:
    """A rank left in order: a fault only for those who submit beyond its last instance."""
    if rank not in generation.departed:
        decision = verdicts.judge_departure(generation, rank, last, now)
        generation.departed[rank] = Departure.LEFT
        yield Log("debug", f"group {unscoped_name(generation.info.name)!r}: {decision.text}")
        size = generation.info.size
        if len(generation.departed) < size and is_uncovered(generation, last + 1, orderly=True):
            others = (other for other in range(size) if other not in generation.departed)
            waiting = any(generation.last_submitted(other) > last for other in others)
            verdict = verdicts.make_verdict(generation, decision, last + 1, now)
            yield from deliver(registry, generation, replace(verdict, orderly=True), now, fault=waiting)
        registry.retire_if_over(generation)
    successor = registry.get_successor(generation)
    if successor:
        yield from _mark_rank_left(registry, successor, rank, successor.first_instance - 1, now)


def mark_workers_lost(
    registry: Registry, generation: GenerationRecord, tasks: Iterable[int], why: str, from_instance: int, now: float
) -> Iterator[Effect]:
    """All ranks of these workers that had not departed are lost together."""
    ranks = sorted(rank for task in tasks for rank in generation.active_ranks(task))
    if ranks:
        decision = verdicts.judge_lost(generation, ranks, Cause.LOST_WORKER, why, now)
        generation.departed |= dict.fromkeys(ranks, Departure.LOST)
        verdict = verdicts.make_verdict(generation, decision, from_instance, now)
        yield from deliver(registry, generation, verdict, now)
        registry.retire_if_over(generation)
