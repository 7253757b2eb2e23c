"""Draining: running collectives may finish, new ones are refused, and the caller gets a list of those that were cut.

All ranks of a group must see the same end, so it is found as newcomers are: the coordinator *proposes*, the workers
*promise* to start nothing for a moment and say how far their ranks have submitted. Instances that any rank has
submitted run, and ranks that are still to come may come to them; from the next instance on one verdict refuses
everything. It counts as orderly: sends and receives go on until the worker ends. Then workers are *ordered* to report
when nothing runs any more, or the instances that did not finish in time, which another verdict cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from collectived_proto.cause import Cause
from collectived_proto.errors import Code
from collectived_proto.report.phrases import collective_text, format_seconds, ranks_text
from collectived_proto.types import unscoped_name
from collectived_runtime.coordinator.core import delivery, verdicts
from collectived_runtime.coordinator.core.events import (
    AbandonedCollective,
    DrainDone,
    DrainOrder,
    DrainRequested,
    Effect,
    JoinRefused,
    Log,
    Promised,
    Propose,
    SendToWorker,
    WaitingCount,
    WorkerDrained,
)
from collectived_runtime.coordinator.core.registry import (
    Drain,
    GenerationRecord,
    PendingJoin,
    Proposal,
    Registry,
)
from collectived_runtime.coordinator.core.scaling import PROMISE_TIMEOUT_SECONDS
from collectived_runtime.coordinator.core.timers import (
    DrainRetry,
    DrainTimeout,
    ProposalTimeout,
)
from collectived_runtime.verdicts.decisions import Decision

RETRY_SECONDS = 0.25  # while workers of a generation are awaited after a restart, or promise for another drain
ANSWER_GRACE_SECONDS = 5.0  # after its timeout a worker that has not answered is not waited for


def handle_drain_request(registry: Registry, event: DrainRequested, now: float) -> Iterator[Effect]:
    """Begin to drain workers or a group."""
    tasks = _tasks(registry, event)
    concerned = [
        one for one in registry.generations.values() if not one.is_over and _is_affected(one, tasks, event.group)
    ]
    forming = [
        one for one in registry.forming.values() if event.group and event.group in (one.name, unscoped_name(one.name))
    ]
    if not (tasks or concerned or forming):
        yield DrainDone(event.request, error=_no_target_text(registry, event))
        return
    drain = Drain(event.request, _target(registry, tasks, event), tasks, event.timeout_seconds, event.stay, event.group)
    registry.drains[drain.request] = drain
    registry.add_timer(now + drain.timeout_seconds + ANSWER_GRACE_SECONDS, DrainTimeout(drain.request))
    yield Log("info", f"{drain.target} is being drained, within {format_seconds(drain.timeout_seconds)}")
    for task in tasks:
        registry.workers[task].draining = True
    yield from _refuse_pending_joins(registry, drain)
    drain.generations = [one.info.generation for one in concerned]
    drain.undecided_generations = set(drain.generations)
    for generation in concerned:
        yield from _propose_drain(registry, drain, generation, now)
    yield from _send_orders_if_decided(registry, drain, now)


def refusal_reason(registry: Registry, task: int, name: str) -> str:
    """Why a join of a group at that worker cannot be granted now; '' where it can."""
    worker = registry.workers[task]
    if worker.draining:
        return (
            f"worker {task} (host {worker.hello.host}) is draining and takes no new ranks: connect to another worker, "
            "or wait until it has been started again"
        )
    if any(drain.group and drain.group in (name, unscoped_name(name)) for drain in registry.drains.values()):
        return f"group {unscoped_name(name)!r} is draining and takes no new ranks: join it again when that is over"
    return ""


def is_drain_proposal(registry: Registry, proposal: int) -> bool:
    """Return whether a proposal was made for a drain."""
    known = registry.proposals.get(proposal)
    return known is not None and known.drain != 0


def handle_promise(registry: Registry, event: Promised, now: float) -> Iterator[Effect]:
    """Take a worker's promise; the last one says what runs."""
    proposal = registry.proposals[event.proposal]
    if event.task in proposal.pending_workers:
        proposal.pending_workers.discard(event.task)
        proposal.from_instance = max(proposal.from_instance, event.from_instance, event.next_instance)
        if not proposal.pending_workers:
            yield from _conclude_proposal(registry, event.proposal, now)


def on_proposal_timeout(registry: Registry, timer: ProposalTimeout, now: float) -> Iterator[Effect]:
    """Not all have answered in time: decided by what is known."""
    yield from _conclude_proposal(registry, timer.proposal, now)


def on_retry_timer(registry: Registry, timer: DrainRetry, now: float) -> Iterator[Effect]:
    """Look again whether a generation can be decided about."""
    drain, generation = registry.drains.get(timer.request), registry.generations.get(timer.generation)
    if drain is not None and timer.generation in drain.undecided_generations:
        if generation is None or generation.is_over:
            drain.undecided_generations.discard(timer.generation)
        else:
            yield from _propose_drain(registry, drain, generation, now)
        yield from _send_orders_if_decided(registry, drain, now)


def handle_worker_drained(registry: Registry, event: WorkerDrained, now: float) -> Iterator[Effect]:
    """A worker reports that nothing runs there any more, or what it had to cut."""
    drain = registry.drains.get(event.request)
    if drain is None or event.task not in drain.pending_workers:
        return
    drain.pending_workers.discard(event.task)
    registry.workers[event.task].drained = event.task in drain.tasks
    for cut in event.abandoned:
        generation = registry.generations.get(cut.generation)
        if generation is not None:
            yield from _record_abandoned(registry, drain, generation, cut, now)
    if not drain.pending_workers:
        yield _finish_drain(registry, drain)


def handle_worker_loss(registry: Registry, task: int, why: str) -> Iterator[Effect]:
    """A worker that was to be drained is lost, or has ended."""
    for drain in list(registry.drains.values()):
        if not drain.is_ordered and task in drain.tasks:
            drain.notes.append(f"worker {task} went before it was known what runs there: {why}")
            if not any(other in registry.workers for other in drain.tasks):
                yield _finish_drain(registry, drain)
        elif task in drain.pending_workers:
            drain.pending_workers.discard(task)
            drain.notes.append(f"it is not known whether everything finished on worker {task}: {why}")
            if not drain.pending_workers and not drain.undecided_generations:
                yield _finish_drain(registry, drain)


def on_drain_timeout(registry: Registry, timer: DrainTimeout) -> Iterator[Effect]:
    """Wait no longer for workers that have not answered by now."""
    drain = registry.drains.get(timer.request)
    if drain is not None:
        waited = format_seconds(drain.timeout_seconds + ANSWER_GRACE_SECONDS)
        for task in sorted(drain.pending_workers):
            drain.notes.append(f"worker {task} has not answered for {waited}")
        if not drain.is_ordered:
            drain.notes.append(f"{drain.target} was not drained: its workers did not say within {waited} what runs")
            for worker in (registry.workers[task] for task in drain.tasks if task in registry.workers):
                worker.draining = False
            drain.tasks, drain.generations = [], []
        yield _finish_drain(registry, drain)


# Whom it concerns


def _tasks(registry: Registry, event: DrainRequested) -> list[int]:
    if event.group:
        return []
    if event.host:
        return [task for task, worker in sorted(registry.workers.items()) if worker.hello.host == event.host]
    return [event.task] if event.task in registry.workers else []


def _is_affected(generation: GenerationRecord, tasks: Iterable[int], group: str) -> bool:
    name = generation.info.name
    return group in (name, unscoped_name(name)) if group else any(generation.active_ranks(task) for task in tasks)


def _target(registry: Registry, tasks: list[int], event: DrainRequested) -> str:
    if event.group:
        return f"group {event.group!r}"
    if len(tasks) == 1:
        return f"worker {tasks[0]} (host {registry.workers[tasks[0]].hello.host})"
    return f"host {event.host} (workers {', '.join(map(str, tasks))})"


def _no_target_text(registry: Registry, event: DrainRequested) -> str:
    if event.group:
        names = sorted({unscoped_name(one.info.name) for one in registry.generations.values() if not one.is_over})
        return f"no group {event.group!r} runs; groups: {', '.join(names) or 'none'}"
    if event.host:
        hosts = sorted({worker.hello.host for worker in registry.workers.values()})
        return f"no worker is on host {event.host!r}; hosts: {', '.join(hosts) or 'none'}"
    return f"worker {event.task} is not attached"


def _refuse_pending_joins(registry: Registry, drain: Drain) -> Iterator[Effect]:
    """Join that wait at workers that go, or for a group that ends."""
    for forming in list(registry.forming.values()):
        gone = [
            waiting
            for waiting in forming.pending_joins.values()
            if refusal_reason(registry, waiting.task, forming.name)
        ]
        for waiting in gone:
            text = refusal_reason(registry, waiting.task, forming.name)
            yield SendToWorker(waiting.task, JoinRefused(waiting.ask.request, Code.UNAVAILABLE, text))
            _remove_join(registry, forming.name, waiting)


def _remove_join(registry: Registry, name: str, gone: PendingJoin) -> None:
    forming = registry.forming[name]
    del forming.pending_joins[gone.task, gone.ask.request]
    if gone.ask.rank is not None:
        del forming.joins_by_rank[gone.ask.rank]
    if len(forming.pending_joins) < forming.min_size:
        forming.complete_at = None
    if not forming.pending_joins:
        del registry.forming[name]
        registry.discard_unused_key(name)


# Running collectives


def _propose_drain(registry: Registry, drain: Drain, generation: GenerationRecord, now: float) -> Iterator[Effect]:
    """Ask the workers of a generation how far their ranks have submitted."""
    number = generation.info.generation
    if generation.drained_from is not None:  # by an earlier drain
        drain.undecided_generations.discard(number)
        return
    # One proposal at a time: what another drain is asking about the same generation is an answer for this one too.
    if generation.awaited_workers or is_drain_proposal(registry, generation.proposal):
        registry.add_timer(now + RETRY_SECONDS, DrainRetry(drain.request, number))
        return
    registry.proposals.pop(generation.proposal, None)  # one about newcomers has become idle
    generation.proposal = registry.new_id()
    asked = {
        task for task in generation.ranks_by_worker if generation.active_ranks(task) and registry.is_connected(task)
    }
    registry.proposals[generation.proposal] = Proposal(number, asked, drain=drain.request)
    registry.add_timer(now + PROMISE_TIMEOUT_SECONDS, ProposalTimeout(generation.proposal, number))
    registry.add_timer(
        now + PROMISE_TIMEOUT_SECONDS + RETRY_SECONDS, DrainRetry(drain.request, number)
    )  # should it end amid that
    for task in sorted(asked):
        yield SendToWorker(task, Propose(generation.info.key, number, generation.proposal))


def _conclude_proposal(registry: Registry, number: int, now: float) -> Iterator[Effect]:
    proposal = registry.proposals.pop(number, None)
    generation = registry.generations.get(proposal.generation) if proposal else None
    if proposal is None or generation is None:
        return
    drain = registry.drains.get(proposal.drain)
    generation.proposal = 0
    if drain is not None:
        known = max((generation.last_submitted(rank) for rank in range(generation.info.size)), default=-1)
        yield from _deliver_drain_verdict(registry, drain, generation, max(proposal.from_instance, known + 1), now)
    free = WaitingCount(generation.info.key, proposal.generation, number, -1, generation.waiting_count)
    for task in generation.ranks_by_worker:
        if registry.is_connected(task) and generation.active_ranks(task):
            yield SendToWorker(task, free)
    if drain is not None:
        drain.undecided_generations.discard(proposal.generation)
        yield from _send_orders_if_decided(registry, drain, now)


def _deliver_drain_verdict(
    registry: Registry, drain: Drain, generation: GenerationRecord, start: int, now: float
) -> Iterator[Effect]:
    """From here on nothing begins, the same for all ranks."""
    what = "it" if drain.group else f"group {unscoped_name(generation.info.name)!r}"
    text = (
        f"{drain.target} is draining: {what} begins nothing from #{start} on; "
        f"{'join it again when that is over' if drain.group else 'join it again at workers that stay'}"
    )
    verdict = verdicts.make_verdict(generation, Decision(Cause.DRAINED, text), start, now, instance=-1)
    generation.drained_from = start
    yield from delivery.deliver(registry, generation, replace(verdict, orderly=True, op=""), now, fault=False)


def _send_orders_if_decided(registry: Registry, drain: Drain, now: float) -> Iterator[Effect]:
    if drain.undecided_generations or drain.is_ordered:
        return
    drain.is_ordered = True
    tasks = [task for task in drain.tasks if registry.is_connected(task)]
    if drain.group:
        found = (registry.generations.get(number) for number in drain.generations)
        tasks = sorted({task for one in found if one for task in one.ranks_by_worker if one.active_ranks(task)})
        tasks = [task for task in tasks if registry.is_connected(task)]
    drain.pending_workers = set(tasks)
    order = DrainOrder(drain.request, drain.timeout_seconds, tuple(drain.generations), not drain.group, drain.stay)
    for task in tasks:
        yield SendToWorker(task, order)
    if not tasks:
        yield _finish_drain(registry, drain)


# Collectives that were cut


def _record_abandoned(
    registry: Registry, drain: Drain, generation: GenerationRecord, cut: AbandonedCollective, now: float
) -> Iterator[Effect]:
    known = any((one.generation, one.instance) == (cut.generation, cut.instance) for one in drain.abandoned)
    if cut.instance < 0:
        drain.abandoned.append(replace(cut, group=unscoped_name(generation.info.name)))
        return
    if known:
        return
    op = cut.op or verdicts.describe_operation(generation, cut.instance)
    site = cut.site or _site(generation, cut.instance)
    told = replace(cut, group=unscoped_name(generation.info.name), op=op, site=site, missing=_missing(generation, cut))
    drain.abandoned.append(told)
    absent = f", {ranks_text(told.missing)} did not come to it" if told.missing else ""
    text = (
        f"{drain.target} was drained: {collective_text(cut.instance, op, generation.info.name)} did not finish within "
        f"{format_seconds(drain.timeout_seconds)}{absent}"
    )
    decision = Decision(Cause.DRAINED, text, told.missing)
    verdict = verdicts.make_verdict(generation, decision, cut.instance, now, instance=cut.instance)
    yield from delivery.deliver(registry, generation, replace(verdict, op=op), now)


def _site(generation: GenerationRecord, instance: int) -> str:
    """A source line of ranks that wait in it, where one is known."""
    evidence = generation.evidence.get(instance)
    return next((known.site for known in evidence.positions.values() if known.site), "") if evidence else ""


def _missing(generation: GenerationRecord, cut: AbandonedCollective) -> tuple[int, ...]:
    """Ranks that have not come, where all workers have answered; else those of the reporting worker."""
    if cut.instance not in generation.evidence:
        return cut.missing
    ranks = range(generation.info.size)
    return tuple(rank for rank in ranks if not generation.has_submitted(rank, cut.instance))


def _finish_drain(registry: Registry, drain: Drain) -> DrainDone:
    registry.drains.pop(drain.request, None)
    found = (registry.generations.get(number) for number in drain.generations)
    names = tuple(dict.fromkeys(unscoped_name(generation.info.name) for generation in found if generation))
    return DrainDone(drain.request, tuple(drain.tasks), names, tuple(drain.abandoned), tuple(drain.notes))
