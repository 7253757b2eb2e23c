"""Inquiries: how far all ranks are at an instance that waits, has expired or differs, and the verdict.

An *inquiry* asks the workers of a generation how far their ranks are at one instance; it ends when all have answered
or after 80 ms, and then the instance is *judged*, earlier ones first. Where ranks differ and those that are known are
alike, the others are waited for ten times as long. A failure of NCCL does not name a culprit: there the inquiry goes on
while a worker is silent and may yet be found to be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from collectived_proto.cause import Cause
from collectived_proto.types import Report, ReportKind
from collectived_runtime.coordinator.core import verdicts
from collectived_runtime.coordinator.core.delivery import deliver, record
from collectived_runtime.coordinator.core.events import Effect, Log, PositionQuery, QueryAnswered, SendToWorker
from collectived_runtime.coordinator.core.registry import (
    INQUIRY_RETRY_SECONDS,
    INQUIRY_SECONDS,
    MAX_EVIDENCE,
    REFUSED_INQUIRY_SECONDS,
    UNNAMED_INQUIRY_SECONDS,
    Evidence,
    GenerationRecord,
    Inquiry,
    Registry,
)
from collectived_runtime.coordinator.core.timers import InquiryRetry, InquiryTimeout

WARN_BACKOFF = (
    1.9  # times as long a wait: group loops report it again after twice the time, and not all in the same moment
)
FIRST_CALL_SECONDS = 5.0  # of waiting for ranks that have called no collective in this generation yet, before a warning
# Of two reports on one instance the graver decides how it is judged.
_SEVERITY = {
    ReportKind.PENDING: 0,
    ReportKind.LINK: 0,
    ReportKind.NATIVE: 0,
    ReportKind.EXPIRED: 1,
    ReportKind.MISMATCH: 2,
}


def handle_instance_report(
    registry: Registry, generation: GenerationRecord, task: int, report: Report, now: float
) -> Iterator[Effect]:
    known = generation.find_verdict(report.instance)
    if known is not None:
        # The verdict has not reached the reporter yet. A departure in order of a rank that others wait for is a fault
        # after all.
        yield SendToWorker(task, known)
        yield from record(registry, generation, known, now)
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
        # All workers have been asked already; the report of this worker is compared with what is known.
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
        if report.cause is Cause.LINK_REFUSED:
            inquiry.deadline = now + REFUSED_INQUIRY_SECONDS
        registry.inquiries[inquiry.query] = inquiry
        registry.add_timer(inquiry.deadline, InquiryTimeout(inquiry.query))
        yield from _send_queries(registry, generation, inquiry, task)
    else:
        inquiry.pending_workers.discard(task)
        if link and report.cause is not Cause.LINK_REFUSED and inquiry.deadline > now + INQUIRY_SECONDS:
            inquiry.deadline = now + INQUIRY_SECONDS
            registry.add_timer(inquiry.deadline, InquiryTimeout(inquiry.query))
    if link:
        _add_link_report(inquiry, task, report)
    elif _SEVERITY[report.kind] >= _SEVERITY[inquiry.kind]:
        inquiry.kind, inquiry.timeout_seconds = report.kind, report.timeout_seconds
        inquiry.text = report.text or inquiry.text
    if report.kind is ReportKind.EXPIRED:
        if inquiry.is_extended:
            inquiry.deadline = min(inquiry.deadline, now + INQUIRY_SECONDS)
            registry.add_timer(inquiry.deadline, InquiryTimeout(inquiry.query))
        inquiry.is_extended = True  # its ranks have no more time
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


def _get_or_create_evidence(generation: GenerationRecord, instance: int, now: float) -> Evidence:
    if instance not in generation.evidence:
        while len(generation.evidence) >= MAX_EVIDENCE:
            del generation.evidence[min(generation.evidence)]
        generation.evidence[instance] = Evidence(now, dict(generation.departed_positions.get(instance, {})))
    return generation.evidence[instance]


def _waited_seconds(registry: Registry, evidence: Evidence, now: float) -> float:
    return registry.stall_seconds + max(0.0, now - evidence.since)


def _is_warning_due(registry: Registry, evidence: Evidence, now: float) -> bool:
    return _waited_seconds(registry, evidence, now) >= WARN_BACKOFF * evidence.warned_after_seconds


def _find_inquiry(registry: Registry, generation: GenerationRecord, instance: int, peer: int = -1) -> Inquiry | None:
    wanted = (generation.info.generation, instance, peer)
    for inquiry in registry.inquiries.values():
        if (inquiry.generation, inquiry.instance, inquiry.peer) == wanted and inquiry.kind is not ReportKind.NATIVE:
            return inquiry
    return None


def _find_native_inquiry(registry: Registry, generation: GenerationRecord) -> Inquiry | None:
    """The inquiry since NCCL failed. There is one for all instances with such a report."""
    number = generation.info.generation
    return next((i for i in registry.inquiries.values() if (i.generation, i.kind) == (number, ReportKind.NATIVE)), None)


def _send_queries(
    registry: Registry, generation: GenerationRecord, inquiry: Inquiry, reporter: int = -1
) -> Iterator[Effect]:
    """Ask the other workers; about a broken link only the one at its other end.

    That one's word matters because it sends in order: had it left, its ranks' departure would arrive before its answer.
    """
    tasks = list(generation.ranks_by_worker) if inquiry.peer < 0 else [inquiry.peer]
    message = PositionQuery(generation.info.key, inquiry.generation, inquiry.instance, inquiry.query)
    for task in tasks:
        if task != reporter and registry.is_connected(task) and generation.active_ranks(task):
            inquiry.pending_workers.add(task)
            yield SendToWorker(task, message)


def ask_for_stacks(registry: Registry, generation: GenerationRecord, reporter: int, instance: int) -> Iterator[Effect]:
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
    """Judge after all have answered, unless ranks that decide the majority, or a loss, are still to come."""
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
    elif not any(_precedes(other, inquiry) for other in registry.inquiries.values()):
        yield from _judge(registry, inquiry, now)


def _precedes(first: Inquiry, second: Inquiry) -> bool:
    """Whether one is judged before the other: a verdict on an earlier instance covers the later one too."""
    is_of_instance = first.peer < 0 and first.kind is not ReportKind.NATIVE
    return is_of_instance and first.generation == second.generation and first.instance < second.instance


def resend_queries(registry: Registry, task: int) -> Iterator[Effect]:
    """A worker has come back: what it was asked on its former stream, or could not be asked, it is asked again."""
    for inquiry in registry.inquiries.values():
        if inquiry.kind is ReportKind.NATIVE and task in inquiry.pending_workers:
            key = registry.generations[inquiry.generation].info.key
            yield SendToWorker(task, PositionQuery(key, inquiry.generation, inquiry.instance, inquiry.query))


def discard_departed_worker(
    registry: Registry, generation: GenerationRecord, task: int, now: float
) -> Iterator[Effect]:
    """A rank has announced that it leaves. A worker without any other rank may have no group loop left that answers."""
    inquiry = _find_native_inquiry(registry, generation)
    if inquiry is not None and task in inquiry.pending_workers and not generation.active_ranks(task):
        inquiry.pending_workers.discard(task)
        if not inquiry.pending_workers:
            yield from _judge_or_wait(registry, inquiry, now)


def on_inquiry_retry(registry: Registry, query: int, now: float) -> Iterator[Effect]:
    """Ask all workers again, in case the missing ranks have come."""
    inquiry = registry.inquiries.get(query)
    if inquiry is not None and inquiry.kind is ReportKind.NATIVE and not inquiry.pending_workers:
        yield from _judge_or_wait(registry, inquiry, now)
    elif inquiry is not None and not inquiry.pending_workers:
        yield from _send_queries(registry, registry.generations[inquiry.generation], inquiry)
        if not inquiry.pending_workers:
            yield from _judge(registry, inquiry, now)


def on_inquiry_timeout(registry: Registry, query: int, now: float) -> Iterator[Effect]:
    """A worker did not answer in time: judge by what is known, as soon as that names a rank that differs."""
    inquiry = registry.inquiries.get(query)
    if inquiry is None:
        return
    may_extend = inquiry.pending_workers and not inquiry.is_extended
    if may_extend and verdicts.are_known_ranks_alike(registry.generations[inquiry.generation], inquiry):
        inquiry.is_extended, inquiry.deadline = True, now + UNNAMED_INQUIRY_SECONDS - INQUIRY_SECONDS
        registry.add_timer(inquiry.deadline, InquiryTimeout(query))
    else:
        yield from _judge(registry, inquiry, now)


def handle_resumed(registry: Registry, generation: GenerationRecord, instance: int) -> Iterator[Effect]:
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
        # It could not have completed even with all ranks: the deadline only ends the search for a lost rank.
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
        yield _log_pending(registry, generation, inquiry.instance, silent, now)
    elif inquiry.kind is not ReportKind.PENDING:
        generation.evidence.pop(inquiry.instance, None)  # it has ended after all
    if decision is None:
        later = [other for other in registry.inquiries.values() if _precedes(inquiry, other)]
        for other in sorted(later, key=lambda one: one.instance):
            if not other.pending_workers and other.query in registry.inquiries:
                yield from _judge_or_wait(registry, other, now)


def _log_pending(
    registry: Registry, generation: GenerationRecord, instance: int, silent: Mapping[int, str], now: float
) -> Log:
    """A warning, but no hurry where the missing ranks have yet to make their first call: programs load before that."""
    missing = generation.missing_ranks(instance)
    if not missing:
        return Log("debug", f"instance {instance} is slow: its data is moving")
    evidence = generation.evidence[instance]
    text = verdicts.pending_warning(generation, instance, missing, silent, registry.stall_seconds, now)
    loads = not silent and all(generation.last_submitted(rank) < 0 for rank in missing)
    if generation.idle or (loads and evidence.warned_after_seconds < FIRST_CALL_SECONDS):
        return Log("debug", text)
    evidence.warned_of = missing
    return Log("warning", text)


def _describe_silence(registry: Registry, task: int) -> str:
    if not registry.is_connected(task):
        return f"worker {task} is not connected to the coordinator"
    return f"worker {task} does not answer"
