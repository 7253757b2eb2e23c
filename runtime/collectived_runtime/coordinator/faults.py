"""Faults: what lanes report, what is asked about it, and the verdict that follows.

An *inquiry* asks the workers of a generation how far their ranks are at one instance; it ends when all have answered
or after 0.1 s, and then the instance is *judged*. That NCCL failed does not say who is at fault: there it goes on for
as long as somebody is silent and may yet be found to be lost. A verdict covers all instances from `from_instance` on;
an instance fails with the first verdict that covers it, so later ones matter only where they reach further back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from collectived_proto.errors import Code
from collectived_proto.types import Report, ReportKind, Verdict, shown_name
from collectived_runtime.coordinator import judgement
from collectived_runtime.coordinator.events import Effect, Level, Log, Positioned, Query, Reported, Send
from collectived_runtime.coordinator.registry import (
    ASK_AGAIN_SECONDS,
    INQUIRY_SECONDS,
    KEPT_EVIDENCE,
    Departure,
    Evidence,
    Failure,
    Generation,
    Inquiry,
    Registry,
    Unanswered,
    Undecided,
)

_OF_A_RANK = (ReportKind.LOST, ReportKind.ABORT, ReportKind.LEFT, ReportKind.EXHAUSTED)
_OF_A_POST = (ReportKind.OVERDUE, ReportKind.UNANSWERED, ReportKind.UNCLAIMED)
_OF_AN_INSTANCE = (ReportKind.PENDING, ReportKind.EXPIRED, ReportKind.MISMATCH, ReportKind.LINK, ReportKind.NATIVE)
WARN_AGAIN = 1.9  # times as long a wait: lanes report it again after twice the time, and not all in the same moment
# Of two reports on one instance the graver decides how it is judged.
_GRAVITY = {
    ReportKind.PENDING: 0,
    ReportKind.LINK: 0,
    ReportKind.NATIVE: 0,
    ReportKind.EXPIRED: 1,
    ReportKind.MISMATCH: 2,
}


def reported(book: Registry, event: Reported, now: float) -> Iterator[Effect]:
    """A lane tells something about its generation."""
    task, report = event.task, event.report
    generation = book.generations.get(report.generation)
    if generation is None:
        yield from _unknown(task, report)
    elif generation.awaited:
        # After a restart somebody may still bring a verdict that the earlier coordinator gave.
        generation.held.append(event)
    elif task not in generation.ranks_of or (
        report.kind in (*_OF_A_RANK, *_OF_A_POST) and report.rank not in generation.ranks_of[task]
    ):
        yield Log(
            "warning",
            f"worker {task} reports {report.kind.name} of rank {report.rank} of group "
            f"{shown_name(generation.info.name)!r}, which is not its own: ignored",
        )
    else:
        generation.learn(task, -1, report.ranks, now)
        if report.kind in _OF_A_RANK:
            yield from _of_a_rank(book, generation, report, now)
            yield from _gone(book, generation, task, now)
        elif report.kind in _OF_A_POST:
            yield from _of_a_post(book, generation, task, report, now)
        elif report.kind is ReportKind.RESUMED:
            yield from _resumed(book, generation, report.instance)
        else:
            yield from _of_an_instance(book, generation, task, report, now)


def _unknown(task: int, report: Report) -> Iterator[Effect]:
    """Nothing is known about this generation: it ended long ago. A lane that waits must not wait for ever."""
    yield Log("debug", f"worker {task} reports {report.kind.name} of generation {report.generation}, long forgotten")
    if report.kind in _OF_AN_INSTANCE:
        text = f"generation {report.generation} is not known to this coordinator any more: join the group again"
        yield Send(task, Verdict("", report.key, report.generation, Code.UNAVAILABLE, text, 0))


# Faults of one rank: decided at once.


def _of_a_rank(book: Registry, generation: Generation, report: Report, now: float) -> Iterator[Effect]:
    rank, last = report.rank, report.instance
    generation.learn_last(rank, last, now)
    generation.remember(rank, report.last)
    match report.kind:
        case ReportKind.LOST:
            yield from rank_lost(book, generation, rank, last + 1, report.text or "its process ended", now)
        case ReportKind.LEFT:
            yield from _left(book, generation, rank, last, now)
        case ReportKind.ABORT:
            text = f"{generation.member(rank, now)} aborted the group: {report.text or 'no reason given'}"
            verdict = judgement.verdict(generation, Code.ABORTED, text, 0, now, missing=[rank])
            yield from deliver(book, generation, verdict, now)
            successor = book.successor(generation)
            if successor:
                again = judgement.verdict(successor, Code.ABORTED, text, 0, now, missing=[rank])
                yield from deliver(book, successor, again, now)
        case _:
            text = f"{generation.member(rank, now)} has no memory left: {report.text or 'no details given'}"
            start = max(last, 0)
            verdict = judgement.verdict(generation, Code.RESOURCE_EXHAUSTED, text, start, now, missing=[rank])
            yield from deliver(book, generation, verdict, now)


def _of_a_post(book: Registry, generation: Generation, task: int, report: Report, now: float) -> Iterator[Effect]:
    """A send or recv waits: too long, or for a rank of whose departure that worker has not heard."""
    if report.kind is ReportKind.OVERDUE:
        yield from deliver(book, generation, judgement.overdue(generation, report, now), now)
    elif report.kind is ReportKind.UNCLAIMED:
        yield from deliver(book, generation, judgement.unclaimed(generation, report, now), now)
    elif report.peer in generation.departed:
        start = generation.verdicts[-1].from_instance if generation.verdicts else 0
        text = f"{generation.member(report.peer, now)} has left the group"
        gone = judgement.verdict(generation, Code.ABORTED, text, start, now, missing=[report.peer])
        yield Send(task, replace(gone, orderly=True))
    else:
        level: Level = "debug" if generation.idle else "warning"
        yield Log(level, judgement.unanswered(generation, report, now))


def rank_lost(
    book: Registry, generation: Generation, rank: int, from_instance: int, why: str, now: float
) -> Iterator[Effect]:
    """A rank's client is gone: what it had fully submitted may still complete, nothing later can."""
    if rank not in generation.departed:
        generation.departed[rank] = Departure.LOST
        if _uncovered(generation, from_instance):
            text = judgement.lost_text(generation, [rank], why, now)
            verdict = judgement.verdict(generation, Code.UNAVAILABLE, text, from_instance, now, missing=[rank])
            yield from deliver(book, generation, verdict, now)
        book.settle(generation)
    successor = book.successor(generation)
    if successor:
        yield from rank_lost(book, successor, rank, 0, why, now)


def _left(book: Registry, generation: Generation, rank: int, last: int, now: float) -> Iterator[Effect]:
    """A rank left in order: a fault only for those who submit beyond its last instance."""
    if rank not in generation.departed:
        after = f"after instance {last}" if last >= 0 else "before its first instance"
        text = f"{generation.member(rank, now)} left the group {after}"
        generation.departed[rank] = Departure.LEFT
        yield Log("debug", f"group {shown_name(generation.info.name)!r}: {text}")
        size = generation.info.size
        if len(generation.departed) < size and _uncovered(generation, last + 1, orderly=True):
            others = (other for other in range(size) if other not in generation.departed)
            waiting = any(generation.submitted(other) > last for other in others)
            verdict = judgement.verdict(generation, Code.ABORTED, text, last + 1, now, missing=[rank])
            yield from deliver(book, generation, replace(verdict, orderly=True), now, fault=waiting)
        book.settle(generation)
    successor = book.successor(generation)
    if successor:
        yield from _left(book, successor, rank, -1, now)


def worker_lost(
    book: Registry, generation: Generation, tasks: Iterable[int], why: str, from_instance: int, now: float
) -> Iterator[Effect]:
    """All ranks of these workers that had not departed are lost together."""
    ranks = sorted(rank for task in tasks for rank in generation.present(task))
    if ranks:
        text = judgement.lost_text(generation, ranks, why, now)
        generation.departed |= dict.fromkeys(ranks, Departure.LOST)
        verdict = judgement.verdict(generation, Code.UNAVAILABLE, text, from_instance, now, missing=ranks)
        yield from deliver(book, generation, verdict, now)
        book.settle(generation)


# Faults of an instance: judged when it is known how far everybody is.


def _of_an_instance(book: Registry, generation: Generation, task: int, report: Report, now: float) -> Iterator[Effect]:
    known = generation.covering(report.instance)
    if known is not None:
        # The reporter has not heard of it yet; and a departure in order that somebody runs into is a fault after all.
        yield Send(task, known)
        yield from _record(book, generation, known, now)
        return
    link, native = report.kind is ReportKind.LINK, report.kind is ReportKind.NATIVE
    if link and not generation.present(report.worker):
        return  # that worker left in order, and its links with it
    evidence = _evidence(generation, report.instance, now)
    generation.learn(task, report.instance, report.ranks, now)
    peer = report.worker if link else -1
    inquiry = _of_nccl(book, generation) if native else _open_inquiry(book, generation, report.instance, peer)
    if inquiry is None and report.kind is ReportKind.PENDING and evidence.warned:
        # Everybody has been asked already; what this worker adds is compared with what is known.
        known_so_far = Inquiry(0, report.generation, report.instance, report.kind, set())
        if not _warning_due(book, evidence, now) or judgement.judge(generation, known_so_far, {}, now) is not None:
            yield from _judge(book, known_so_far, now)
            return
    if inquiry is None:
        inquiry = Inquiry(book.new_id(), report.generation, report.instance, report.kind, set())
        inquiry.peer = report.worker if link else -1
        # A stream that breaks with what broke NCCL breaks a moment later, and as much later is its worker lost.
        inquiry.until = now + INQUIRY_SECONDS + (book.patience if native else 0.0)
        book.inquiries[inquiry.query] = inquiry
        book.arm(inquiry.until, Unanswered(inquiry.query))
        yield from _ask(book, generation, inquiry, task)
    else:
        inquiry.asked.discard(task)
    if _GRAVITY[report.kind] >= _GRAVITY[inquiry.kind]:
        inquiry.kind, inquiry.timeout_seconds = report.kind, report.timeout_seconds
        inquiry.text = report.text or inquiry.text
    if link:
        inquiry.text = f"the link of worker {task} to worker {report.worker} broke: {report.text or 'no details given'}"
    if native:
        inquiry.broken.setdefault(task, report.text or "NCCL failed")
        inquiry.instance = min(inquiry.instance, report.instance)
    if not inquiry.asked:
        yield from _answered(book, inquiry, now)


def _evidence(generation: Generation, instance: int, now: float) -> Evidence:
    if instance not in generation.evidence:
        while len(generation.evidence) >= KEPT_EVIDENCE:
            del generation.evidence[min(generation.evidence)]
        generation.evidence[instance] = Evidence(now, dict(generation.parted.get(instance, {})))
    return generation.evidence[instance]


def _waited(book: Registry, evidence: Evidence, now: float) -> float:
    return book.stall_seconds + max(0.0, now - evidence.since)


def _warning_due(book: Registry, evidence: Evidence, now: float) -> bool:
    return _waited(book, evidence, now) >= WARN_AGAIN * evidence.warned


def _open_inquiry(book: Registry, generation: Generation, instance: int, peer: int = -1) -> Inquiry | None:
    wanted = (generation.info.generation, instance, peer)
    for inquiry in book.inquiries.values():
        if (inquiry.generation, inquiry.instance, inquiry.peer) == wanted and inquiry.kind is not ReportKind.NATIVE:
            return inquiry
    return None


def _of_nccl(book: Registry, generation: Generation) -> Inquiry | None:
    """What is asked since NCCL failed, once for all instances of which that is reported."""
    number = generation.info.generation
    return next((i for i in book.inquiries.values() if (i.generation, i.kind) == (number, ReportKind.NATIVE)), None)


def _ask(book: Registry, generation: Generation, inquiry: Inquiry, reporter: int = -1) -> Iterator[Effect]:
    """Asks the other workers; about a broken link only the one at its other end.

    That one's word matters because it sends in order: had it left, its ranks' departure would arrive before its answer.
    """
    tasks = list(generation.ranks_of) if inquiry.peer < 0 else [inquiry.peer]
    message = Query(generation.info.key, inquiry.generation, inquiry.instance, inquiry.query)
    for task in tasks:
        if task != reporter and book.connected(task) and generation.present(task):
            inquiry.asked.add(task)
            yield Send(task, message)


def positioned(book: Registry, event: Positioned, now: float) -> Iterator[Effect]:
    """A worker answers."""
    inquiry = book.inquiries.get(event.query)
    if inquiry is None:
        return
    book.generations[inquiry.generation].learn(event.task, inquiry.instance, event.positions, now)
    inquiry.asked.discard(event.task)
    if not inquiry.asked:
        yield from _answered(book, inquiry, now)


def _answered(book: Registry, inquiry: Inquiry, now: float) -> Iterator[Effect]:
    """All have answered: judged, unless more is to come: ranks that decide who the majority is, or who is lost."""
    generation = book.generations[inquiry.generation]
    if now >= inquiry.until:
        yield from _judge(book, inquiry, now)
    elif inquiry.kind is ReportKind.NATIVE:
        away = {task for task in generation.ranks_of if generation.present(task) and not book.connected(task)}
        links = [one.until for one in book.inquiries.values() if one.generation == inquiry.generation and one.peer >= 0]
        inquiry.asked |= away  # they come back and are asked, or are lost
        if links and not away:
            book.arm(max(links), Undecided(inquiry.query))
        elif not away:
            yield from _judge(book, inquiry, now)
    elif judgement.majority_open(generation, inquiry.instance):
        book.arm(min(inquiry.until, now + ASK_AGAIN_SECONDS), Undecided(inquiry.query))
    else:
        yield from _judge(book, inquiry, now)


def back(book: Registry, task: int) -> Iterator[Effect]:
    """A worker has come back: what it was asked on its former stream, or could not be asked, it is asked again."""
    for inquiry in book.inquiries.values():
        if inquiry.kind is ReportKind.NATIVE and task in inquiry.asked:
            key = book.generations[inquiry.generation].info.key
            yield Send(task, Query(key, inquiry.generation, inquiry.instance, inquiry.query))


def _gone(book: Registry, generation: Generation, task: int, now: float) -> Iterator[Effect]:
    """A rank has told that it goes: a worker without any other may have no lane left that answers."""
    inquiry = _of_nccl(book, generation)
    if inquiry is not None and task in inquiry.asked and not generation.present(task):
        inquiry.asked.discard(task)
        if not inquiry.asked:
            yield from _answered(book, inquiry, now)


def undecided(book: Registry, query: int, now: float) -> Iterator[Effect]:
    """Asks everybody again, in case the missing ranks have come."""
    inquiry = book.inquiries.get(query)
    if inquiry is not None and inquiry.kind is ReportKind.NATIVE and not inquiry.asked:
        yield from _answered(book, inquiry, now)
    elif inquiry is not None and not inquiry.asked:
        yield from _ask(book, book.generations[inquiry.generation], inquiry)
        if not inquiry.asked:
            yield from _judge(book, inquiry, now)


def unanswered(book: Registry, query: int, now: float) -> Iterator[Effect]:
    """Somebody did not answer in time: judged by what is known."""
    if query in book.inquiries:
        yield from _judge(book, book.inquiries[query], now)


def _resumed(book: Registry, generation: Generation, instance: int) -> Iterator[Effect]:
    generation.evidence.pop(instance, None)
    inquiry = _open_inquiry(book, generation, instance)
    if inquiry and inquiry.kind is ReportKind.PENDING:
        del book.inquiries[inquiry.query]
    yield from ()


def _judge(book: Registry, inquiry: Inquiry, now: float) -> Iterator[Effect]:
    book.inquiries.pop(inquiry.query, None)
    generation = book.generations[inquiry.generation]
    native = _of_nccl(book, generation)
    if inquiry.kind is ReportKind.EXPIRED and native is not None and native.instance <= inquiry.instance:
        # It could not have completed, whoever came: the deadline only ends the search for somebody who is lost.
        yield from _judge(book, native, now)
        return
    evidence = _evidence(generation, inquiry.instance, now)
    silent = {task: _silence(book, task) for task in inquiry.asked}
    silent |= {task: _silence(book, task) for task in generation.ranks_of if not book.connected(task)}
    decision = judgement.judge(generation, inquiry, silent, now)
    if decision is not None:
        if decision.code == Code.INVALID_ARGUMENT and generation.refused_from is None:
            decision = judgement.with_successor(decision, book.new_id())
        yield from deliver(book, generation, decision, now)
    elif inquiry.kind is ReportKind.PENDING and _warning_due(book, evidence, now):
        evidence.warned = _waited(book, evidence, now)
        text = judgement.pending(generation, inquiry.instance, silent, book.stall_seconds, now)
        yield Log(
            "warning" if text and not generation.idle else "debug",
            text or f"instance {inquiry.instance} is slow: its data is moving",
        )
    elif inquiry.kind is not ReportKind.PENDING:
        generation.evidence.pop(inquiry.instance, None)  # it has ended after all


def _silence(book: Registry, task: int) -> str:
    if not book.connected(task):
        return f"worker {task} is not connected to the coordinator"
    return f"worker {task} does not answer"


# Verdicts


def deliver(
    book: Registry, generation: Generation, verdict: Verdict, now: float, fault: bool = True
) -> Iterator[Effect]:
    """Sends a verdict to all workers of a generation, unless an earlier one covers all that it covers.

    One that only says that a rank has left does not: sends and receives between others went on. Without `fault` it only
    announces that a rank left in order.
    """
    if _uncovered(generation, verdict.from_instance, verdict.orderly):
        generation.verdicts.append(verdict)
        for inquiry in list(book.inquiries.values()):
            if (inquiry.generation, inquiry.instance >= verdict.from_instance) == (verdict.generation, True):
                del book.inquiries[inquiry.query]
        for instance in [instance for instance in generation.evidence if instance >= verdict.from_instance]:
            del generation.evidence[instance]
        for task in generation.ranks_of:
            if book.connected(task) and not (generation.departed and _all_left(generation, task)):
                yield Send(task, verdict)
        expected = generation.refused_from is not None and verdict.from_instance >= generation.refused_from
        if fault and not expected:
            yield from _record(book, generation, verdict, now)
        if verdict.successor:
            _succeed(book, generation, verdict)
    book.settle(generation)


def _uncovered(generation: Generation, from_instance: int, orderly: bool = False) -> bool:
    """Whether a verdict from there on would be news. Asked before one is made: thousands of ranks may go at once."""
    covering = [known for known in generation.verdicts if known.from_instance <= from_instance]
    return not covering or (not orderly and all(known.orderly for known in covering))


def _all_left(generation: Generation, task: int) -> bool:
    return all(generation.departed.get(rank) is Departure.LEFT for rank in generation.ranks_of[task])


def _record(book: Registry, generation: Generation, verdict: Verdict, now: float) -> Iterator[Effect]:
    """The first fault of a generation is what people want to read; its echoes are not."""
    group = shown_name(generation.info.name)
    if generation.failed:
        yield Log("debug", f"group {group!r}, failed already: {verdict.message}")
        return
    generation.failed = True
    book.failures.appendleft(Failure(now, verdict))
    book.counts.verdicts[verdict.code] = book.counts.verdicts.get(verdict.code, 0) + 1
    yield Log("warning", f"group {group!r} failed with {Code(verdict.code).name}: {verdict.message}", verdict)
    book.settle(generation)


def _succeed(book: Registry, generation: Generation, verdict: Verdict) -> None:
    """The group goes on in the successor: same ranks, nothing submitted yet."""
    info = judgement.successor_info(generation, verdict.successor)
    successor = Generation(info, generation.peers, generation.table)
    successor.idle = generation.idle
    successor.predecessor = generation.info.generation
    successor.departed = dict(generation.departed)
    generation.successor = verdict.successor
    book.generations[verdict.successor] = successor
    book.latest[generation.info.name] = verdict.successor
    before = book.generations.get(generation.predecessor)
    if before is not None:
        # Everybody has gone on twice since: nothing of that one can still be running.
        before.departed |= {rank: Departure.MOVED for rank in range(before.info.size) if rank not in before.departed}
