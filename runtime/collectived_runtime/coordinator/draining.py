"""Draining: what runs may finish, nothing new begins, and whoever asked hears what was cut.

All ranks of a group must see the same end, so it is found as newcomers are: the coordinator *proposes*, the workers
*promise* to start nothing for a moment and say how far their ranks have submitted. What any rank has submitted runs,
and ranks that are still to come may come to it; from the next instance on one verdict refuses everything. It counts as
orderly: sends and receives go on until the worker ends. Then workers are *ordered* to tell when nothing runs any more,
or what did not finish in time, which another verdict cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from collectived_proto.errors import Code
from collectived_proto.types import shown_name
from collectived_proto.wording import ranks_text, seconds, subject
from collectived_runtime.coordinator import faults, judgement
from collectived_runtime.coordinator.events import (
    Cut,
    DrainAsked,
    DrainDone,
    DrainedBy,
    DrainOrder,
    Effect,
    JoinRefused,
    Log,
    Newcomers,
    Promised,
    Propose,
    Send,
)
from collectived_runtime.coordinator.newcomers import PROMISED_WITHIN_SECONDS
from collectived_runtime.coordinator.registry import (
    Drain,
    DrainLate,
    DrainTurn,
    Generation,
    Proposal,
    Registry,
    Unpromised,
    Waiting,
)

AGAIN_SECONDS = 0.25  # while workers of a generation are awaited after a restart, or promise for another drain
LATE_SECONDS = 5.0  # after its timeout a worker that has not answered is not waited for


def asked(book: Registry, event: DrainAsked, now: float) -> Iterator[Effect]:
    """Somebody wants workers, or a group, drained."""
    tasks = _tasks(book, event)
    concerned = [one for one in book.generations.values() if not one.over and _concerned(one, tasks, event.group)]
    forming = [one for one in book.forming.values() if event.group and event.group in (one.name, shown_name(one.name))]
    if not (tasks or concerned or forming):
        yield DrainDone(event.request, error=_nobody(book, event))
        return
    drain = Drain(event.request, _target(book, tasks, event), tasks, event.timeout_seconds, event.stay, event.group)
    book.drains[drain.request] = drain
    book.arm(now + drain.timeout_seconds + LATE_SECONDS, DrainLate(drain.request))
    yield Log("info", f"{drain.target} is being drained, within {seconds(drain.timeout_seconds)}")
    for task in tasks:
        book.workers[task].draining = True
    yield from _turn_away(book, drain)
    drain.generations = [one.info.generation for one in concerned]
    drain.undecided = set(drain.generations)
    for generation in concerned:
        yield from _decide(book, drain, generation, now)
    yield from _order_if_decided(book, drain, now)


def refusal(book: Registry, task: int, name: str) -> str:
    """Why a join of a group at that worker cannot be granted now; '' where it can."""
    worker = book.workers[task]
    if worker.draining:
        return (
            f"worker {task} (host {worker.hello.host}) is draining and takes no new ranks: connect to another worker, "
            "or wait until it has been started again"
        )
    if any(drain.group and drain.group in (name, shown_name(name)) for drain in book.drains.values()):
        return f"group {shown_name(name)!r} is draining and takes no new ranks: join it again when that is over"
    return ""


def concerns(book: Registry, proposal: int) -> bool:
    """Whether a proposal is one of ours."""
    known = book.proposals.get(proposal)
    return known is not None and known.drain != 0


def promised(book: Registry, event: Promised, now: float) -> Iterator[Effect]:
    """A worker answers; the last answer says what runs."""
    proposal = book.proposals[event.proposal]
    if event.task in proposal.asked:
        proposal.asked.discard(event.task)
        proposal.from_instance = max(proposal.from_instance, event.from_instance, event.next_instance)
        if not proposal.asked:
            yield from _settle(book, event.proposal, now)


def lapsed(book: Registry, timer: Unpromised, now: float) -> Iterator[Effect]:
    """Not all have answered in time: decided by what is known."""
    yield from _settle(book, timer.proposal, now)


def turn(book: Registry, timer: DrainTurn, now: float) -> Iterator[Effect]:
    """Looks again whether a generation can be decided about."""
    drain, generation = book.drains.get(timer.request), book.generations.get(timer.generation)
    if drain is not None and timer.generation in drain.undecided:
        if generation is None or generation.over:
            drain.undecided.discard(timer.generation)
        else:
            yield from _decide(book, drain, generation, now)
        yield from _order_if_decided(book, drain, now)


def answered(book: Registry, event: DrainedBy, now: float) -> Iterator[Effect]:
    """A worker tells that nothing runs there any more, or what it had to cut."""
    drain = book.drains.get(event.request)
    if drain is None or event.task not in drain.waiting:
        return
    drain.waiting.discard(event.task)
    book.workers[event.task].drained = event.task in drain.tasks
    for cut in event.cut:
        generation = book.generations.get(cut.generation)
        if generation is not None:
            yield from _cut(book, drain, generation, cut, now)
    if not drain.waiting:
        yield _done(book, drain)


def worker_gone(book: Registry, task: int, why: str) -> Iterator[Effect]:
    """A worker that was to be drained is lost, or has ended."""
    for drain in list(book.drains.values()):
        if not drain.ordered and task in drain.tasks:
            drain.notes.append(f"worker {task} went before it was known what runs there: {why}")
            if not any(other in book.workers for other in drain.tasks):
                yield _done(book, drain)
        elif task in drain.waiting:
            drain.waiting.discard(task)
            drain.notes.append(f"worker {task} did not tell whether all finished: {why}")
            if not drain.waiting and not drain.undecided:
                yield _done(book, drain)


def late(book: Registry, timer: DrainLate) -> Iterator[Effect]:
    """Whoever has not answered by now is not waited for."""
    drain = book.drains.get(timer.request)
    if drain is not None:
        waited = seconds(drain.timeout_seconds + LATE_SECONDS)
        for task in sorted(drain.waiting):
            drain.notes.append(f"worker {task} has not answered for {waited}")
        if not drain.ordered:
            drain.notes.append(f"{drain.target} was not drained: its workers did not say within {waited} what runs")
            for worker in (book.workers[task] for task in drain.tasks if task in book.workers):
                worker.draining = False
            drain.tasks, drain.generations = [], []
        yield _done(book, drain)


# Whom it concerns


def _tasks(book: Registry, event: DrainAsked) -> list[int]:
    if event.group:
        return []
    if event.host:
        return [task for task, worker in sorted(book.workers.items()) if worker.hello.host == event.host]
    return [event.task] if event.task in book.workers else []


def _concerned(generation: Generation, tasks: Iterable[int], group: str) -> bool:
    name = generation.info.name
    return group in (name, shown_name(name)) if group else any(generation.present(task) for task in tasks)


def _target(book: Registry, tasks: list[int], event: DrainAsked) -> str:
    if event.group:
        return f"group {event.group!r}"
    if len(tasks) == 1:
        return f"worker {tasks[0]} (host {book.workers[tasks[0]].hello.host})"
    return f"host {event.host} (workers {', '.join(map(str, tasks))})"


def _nobody(book: Registry, event: DrainAsked) -> str:
    if event.group:
        names = sorted({shown_name(one.info.name) for one in book.generations.values() if not one.over})
        return f"no group {event.group!r} runs; groups: {', '.join(names) or 'none'}"
    if event.host:
        hosts = sorted({worker.hello.host for worker in book.workers.values()})
        return f"no worker is on host {event.host!r}; hosts: {', '.join(hosts) or 'none'}"
    return f"worker {event.task} is not attached"


def _turn_away(book: Registry, drain: Drain) -> Iterator[Effect]:
    """Joins that wait at workers that go, or for a group that ends."""
    for forming in list(book.forming.values()):
        gone = [waiting for waiting in forming.waiting.values() if refusal(book, waiting.task, forming.name)]
        for waiting in gone:
            text = refusal(book, waiting.task, forming.name)
            yield Send(waiting.task, JoinRefused(waiting.ask.request, Code.UNAVAILABLE, text))
            _forget(book, forming.name, waiting)


def _forget(book: Registry, name: str, gone: Waiting) -> None:
    forming = book.forming[name]
    del forming.waiting[gone.task, gone.ask.request]
    if gone.ask.rank is not None:
        del forming.taken[gone.ask.rank]
    if len(forming.waiting) < forming.min_size:
        forming.complete_at = None
    if not forming.waiting:
        del book.forming[name]
        book.forget_name(name)


# What runs


def _decide(book: Registry, drain: Drain, generation: Generation, now: float) -> Iterator[Effect]:
    """Asks the workers of a generation how far their ranks have submitted."""
    number = generation.info.generation
    if generation.refused_from is not None:  # by an earlier drain
        drain.undecided.discard(number)
        return
    # One proposal at a time: what another drain is asking about the same generation is an answer for this one too.
    if generation.awaited or concerns(book, generation.proposal):
        book.arm(now + AGAIN_SECONDS, DrainTurn(drain.request, number))
        return
    book.proposals.pop(generation.proposal, None)  # one about newcomers has become idle
    generation.proposal = book.new_id()
    asked = {task for task in generation.ranks_of if generation.present(task) and book.connected(task)}
    book.proposals[generation.proposal] = Proposal(number, asked, drain=drain.request)
    book.arm(now + PROMISED_WITHIN_SECONDS, Unpromised(generation.proposal, number))
    book.arm(now + PROMISED_WITHIN_SECONDS + AGAIN_SECONDS, DrainTurn(drain.request, number))  # should it end amid that
    for task in sorted(asked):
        yield Send(task, Propose(generation.info.key, number, generation.proposal))


def _settle(book: Registry, number: int, now: float) -> Iterator[Effect]:
    proposal = book.proposals.pop(number, None)
    generation = book.generations.get(proposal.generation) if proposal else None
    if proposal is None or generation is None:
        return
    drain = book.drains.get(proposal.drain)
    generation.proposal = 0
    if drain is not None:
        known = max((generation.submitted(rank) for rank in range(generation.info.size)), default=-1)
        yield from _refuse(book, drain, generation, max(proposal.from_instance, known + 1), now)
    free = Newcomers(generation.info.key, proposal.generation, number, -1, generation.newcomers)
    for task in generation.ranks_of:
        if book.connected(task) and generation.present(task):
            yield Send(task, free)
    if drain is not None:
        drain.undecided.discard(proposal.generation)
        yield from _order_if_decided(book, drain, now)


def _refuse(book: Registry, drain: Drain, generation: Generation, start: int, now: float) -> Iterator[Effect]:
    """From here on nothing begins, the same for all ranks."""
    what = "it" if drain.group else f"group {shown_name(generation.info.name)!r}"
    text = (
        f"{drain.target} is draining: {what} begins nothing from #{start} on; "
        f"{'join it again when that is over' if drain.group else 'join it again at workers that stay'}"
    )
    verdict = judgement.verdict(generation, Code.UNAVAILABLE, text, start, now, instance=-1)
    generation.refused_from = start
    yield from faults.deliver(book, generation, replace(verdict, orderly=True, op=""), now, fault=False)


def _order_if_decided(book: Registry, drain: Drain, now: float) -> Iterator[Effect]:
    if drain.undecided or drain.ordered:
        return
    drain.ordered = True
    tasks = [task for task in drain.tasks if book.connected(task)]
    if drain.group:
        found = (book.generations.get(number) for number in drain.generations)
        tasks = sorted({task for one in found if one for task in one.ranks_of if one.present(task)})
        tasks = [task for task in tasks if book.connected(task)]
    drain.waiting = set(tasks)
    order = DrainOrder(drain.request, drain.timeout_seconds, tuple(drain.generations), not drain.group, drain.stay)
    for task in tasks:
        yield Send(task, order)
    if not tasks:
        yield _done(book, drain)


# What was cut


def _cut(book: Registry, drain: Drain, generation: Generation, cut: Cut, now: float) -> Iterator[Effect]:
    known = any((one.generation, one.instance) == (cut.generation, cut.instance) for one in drain.cut)
    if cut.instance < 0:
        drain.cut.append(replace(cut, group=shown_name(generation.info.name)))
        return
    if known:
        return
    op = cut.op or judgement.operation(generation, cut.instance)
    site = cut.site or _site(generation, cut.instance)
    told = replace(cut, group=shown_name(generation.info.name), op=op, site=site, missing=_missing(generation, cut))
    drain.cut.append(told)
    absent = f", {ranks_text(told.missing)} did not come to it" if told.missing else ""
    text = (
        f"{drain.target} was drained: {subject(cut.instance, op, generation.info.name)} did not finish within "
        f"{seconds(drain.timeout_seconds)}{absent}"
    )
    verdict = judgement.verdict(
        generation, Code.UNAVAILABLE, text, cut.instance, now, instance=cut.instance, missing=told.missing
    )
    yield from faults.deliver(book, generation, replace(verdict, op=op), now)


def _site(generation: Generation, instance: int) -> str:
    """A source line of those who wait in it, where some have told."""
    evidence = generation.evidence.get(instance)
    return next((known.site for known in evidence.positions.values() if known.site), "") if evidence else ""


def _missing(generation: Generation, cut: Cut) -> tuple[int, ...]:
    """Ranks that have not come, where everybody has been asked; else what the worker that tells knows of its own."""
    if cut.instance not in generation.evidence:
        return cut.missing
    ranks = range(generation.info.size)
    return tuple(rank for rank in ranks if not generation.arrived(rank, cut.instance))


def _done(book: Registry, drain: Drain) -> DrainDone:
    book.drains.pop(drain.request, None)
    found = (book.generations.get(number) for number in drain.generations)
    names = tuple(dict.fromkeys(shown_name(generation.info.name) for generation in found if generation))
    return DrainDone(drain.request, tuple(drain.tasks), names, tuple(drain.cut), tuple(drain.notes))
