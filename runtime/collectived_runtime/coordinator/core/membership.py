"""Membership: workers come, fall silent, come back, and go.

A worker is *connected* while its stream stands. A broken stream is no loss: a worker that comes back within two
heartbeat intervals goes on where it was. One that says goodbye has gone at once. After a restart of the coordinator
the groups that workers bring are *adopted*; nothing is decided about one until all its workers are back, or until two
heartbeat intervals have passed, for any of them may bring a verdict that was given before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from collectived_proto.errors import Code
from collectived_proto.report.phrases import format_seconds
from collectived_proto.types import RankPosition, Verdict
from collectived_runtime.coordinator.core import draining, faults, inquiries, rendezvous, stragglers
from collectived_runtime.coordinator.core.events import (
    AttachedGroup,
    Disconnect,
    Effect,
    Heartbeat,
    Log,
    SendToWorker,
    Shutdown,
    Welcome,
    WorkerAttached,
    WorkerDetached,
    WorkerHello,
)
from collectived_runtime.coordinator.core.registry import (
    Departure,
    GenerationRecord,
    Registry,
    ReportedProgress,
    WorkerRecord,
)
from collectived_runtime.coordinator.core.timers import (
    ReattachTimeout,
    WorkerTimeout,
)

DAY_MS = 24 * 3600 * 1000


def handle_attach(registry: Registry, event: WorkerAttached, now: float) -> Iterator[Effect]:
    """A worker comes, or comes back."""
    hello, clock = event.hello, event.clock
    if hello.highest_epoch > max(registry.epoch, clock) + DAY_MS:
        why = (
            f"{hello} is refused: it obeys a coordinator of epoch {hello.highest_epoch}, more than a day ahead of this "
            f"one's clock, {max(registry.epoch, clock)}; an epoch is the time at which a coordinator was started, in "
            "milliseconds since 1970: start that worker again, or set this host's clock"
        )
        yield Disconnect(hello.task, hello.incarnation, Code.INVALID_ARGUMENT, why)
        yield Log("warning", why)
        return
    if hello.highest_epoch > registry.epoch:
        yield Shutdown(
            f"{hello} obeys a coordinator of epoch {hello.highest_epoch}, later than this one's {registry.epoch}: "
            "two coordinators must not run for the same job, and the later one is obeyed"
        )
        return
    old = registry.workers.get(hello.task)
    if old and old.hello.incarnation != hello.incarnation:
        if old.connected:
            why = (
                f"{hello} is refused: {old.hello} is attached and last reported "
                f"{format_seconds(now - old.last_seen_at)} ago; "
                "give each worker its own task number, or wait until the other one has ended"
            )
            yield Disconnect(hello.task, hello.incarnation, Code.ALREADY_EXISTS, why)
            yield Log("warning", why)
            return
        yield from remove_worker(registry, hello.task, f"{old.hello} ended, and {hello} has taken its place", now)
    back = hello.task in registry.workers
    registry.counts.attached += 1
    registry.workers[hello.task] = WorkerRecord(hello, now, draining=hello.draining)
    if not back:  # else its timer runs already
        registry.add_timer(now + registry.worker_timeout, WorkerTimeout(hello.task, hello.incarnation))
    secret = _adopt_link_secret(registry, hello)
    yield SendToWorker(hello.task, Welcome(registry.epoch, registry.heartbeat_seconds, registry.stall_seconds, secret))
    yield Log("info", f"{hello} {'is back' if back else 'is here'}")
    yield from _adopt_all(registry, event, now)
    if back:
        yield from _resend_join_answers(registry, hello, event.generations)
        yield from inquiries.resend_queries(registry, hello.task)


def _adopt_link_secret(registry: Registry, hello: WorkerHello) -> str:
    """The secret with which a worker's links are proved where the job has none.

    The first worker after a restart brings the one that an earlier coordinator gave, so that running groups still dial.
    """
    if not registry.link_secret_given and len(hello.link_secret) == len(registry.link_secret):
        registry.link_secret = hello.link_secret
    registry.link_secret_given = True
    return registry.link_secret


def handle_detach(registry: Registry, event: WorkerDetached, now: float) -> Iterator[Effect]:
    worker = registry.workers.get(event.task)
    if worker is None or worker.hello.incarnation != event.incarnation:
        return
    worker.connected = False
    if event.orderly:
        how = f": {event.goodbye_reason}" if event.goodbye_reason else " in order"
        yield from remove_worker(registry, event.task, f"worker {event.task} went away{how}", now, orderly=True)
        return
    worker.last_seen_at = now  # so much longer it may stay away
    yield Log(
        "info",
        f"{worker.hello} is disconnected ({event.reason}); lost in "
        f"{format_seconds(registry.worker_timeout)} unless it is back",
    )


def on_worker_timeout(registry: Registry, timer: WorkerTimeout, now: float) -> Iterator[Effect]:
    """Declare a worker lost that has sent no heartbeat in time."""
    worker = registry.workers.get(timer.task)
    if worker is None or worker.hello.incarnation != timer.incarnation:
        return
    due = worker.last_seen_at + registry.worker_timeout
    if due > now:
        registry.add_timer(due, timer)
    else:
        how = "sent no heartbeat" if worker.connected else "been disconnected"
        yield from remove_worker(
            registry, timer.task, f"worker {timer.task} has {how} for {format_seconds(registry.worker_timeout)}", now
        )


def remove_worker(registry: Registry, task: int, why: str, now: float, orderly: bool = False) -> Iterator[Effect]:
    """A worker is gone for good, and with it its joins and ranks."""
    worker = registry.workers.pop(task)
    registry.counts.lost += not orderly
    yield Log("info" if orderly else "warning", f"{worker.hello} is {'gone' if orderly else 'lost'}: {why}")
    if worker.connected:
        text = f"{worker.hello} was given up: {why}; attach again"
        yield Disconnect(task, worker.hello.incarnation, Code.UNAVAILABLE, text)
    yield from rendezvous.remove_worker_joins(registry, task, now)
    yield from draining.handle_worker_loss(registry, task, why)
    for generation in list(registry.generations.values()):
        if task in generation.ranks_by_worker and generation.awaited_workers:
            generation.absent_workers.add(task)
        elif task in generation.ranks_by_worker:
            # A drained worker that goes in order takes nothing with it that was still to finish.
            start = generation.drained_from or 0 if orderly and worker.drained else 0
            yield from faults.mark_workers_lost(registry, generation, [task], why, start, now)
            yield from rendezvous.finish_measurement(registry, generation.info.generation)


def handle_heartbeat(registry: Registry, event: Heartbeat, now: float) -> None:
    """Note that a worker lives, and where its ranks stand."""
    registry.counts.heartbeats += 1
    worker = registry.workers[event.task]
    if not event.more:
        worker.synced_at = now
    for number, positions in event.progress:
        generation = registry.generations.get(number)
        if generation is not None:
            generation.update_progress(event.task, -1, positions, now, worker)
            stragglers.update_wait_stats(generation, event.task, positions, now)


def compensate_pause(registry: Registry, late: float, now: float) -> None:
    """After this process itself was stopped for a while no worker is judged: what they sent is still unread."""
    if late > registry.heartbeat_seconds / 2:
        for worker in registry.workers.values():
            worker.last_seen_at = max(worker.last_seen_at, now - registry.heartbeat_seconds)


# Coming back


def _adopt_all(registry: Registry, event: WorkerAttached, now: float) -> Iterator[Effect]:
    hello, listed = event.hello, event.generations
    for item in event.groups:
        yield from _adopt(registry, hello, item, now)
        for verdict in item.verdicts:
            if verdict.successor and verdict.successor not in listed:
                info = replace(item.group, generation=verdict.successor)
                yield from _adopt(registry, hello, AttachedGroup(info, item.ranks, idle=item.idle), now)
    for generation in list(registry.generations.values()):
        if hello.task in generation.awaited_workers and generation.info.generation not in listed:
            generation.awaited_workers.discard(hello.task)
            generation.absent_workers.add(hello.task)
            yield from _resume_if_complete(registry, generation, now)


def _resend_join_answers(registry: Registry, hello: WorkerHello, listed: frozenset[int]) -> Iterator[Effect]:
    """Send answers to joins again that were sent while the worker was away."""
    for (task, request), number in list(registry.generation_by_join.items()):
        generation = registry.generations[number]
        if task != hello.task or number in listed or generation.is_over:
            continue
        if generation.requests[task, request] not in generation.departed:
            yield from rendezvous.resend_join_answer(registry, task, request)


def _adopt(registry: Registry, hello: WorkerHello, item: AttachedGroup, now: float) -> Iterator[Effect]:
    info = item.group
    in_order = all(member.rank == rank for rank, member in enumerate(info.members))
    if not in_order or not any(member.worker == hello.task for member in info.members):
        yield Log("warning", f"{hello} brings group {info.name!r}, of which it is no part: ignored")
        return
    generation = registry.generations.get(info.generation)
    if generation is None:
        generation = _restore_generation(registry, item, now)
    generation.idle = generation.idle or item.idle
    for member in info.members:
        if member.worker == hello.task and member.rank not in generation.progress and member.last_instance >= 0:
            last = member.last_instance
            position = RankPosition(member.rank, last, last, member.last_op, member.last_site, member.idle_seconds)
            generation.progress[member.rank] = ReportedProgress(position, now)
    yield from _compare_verdicts(registry, generation, hello.task, item.verdicts, now)
    generation.awaited_workers.discard(hello.task)
    generation.absent_workers.discard(hello.task)
    yield from _resume_if_complete(registry, generation, now)


def _restore_generation(registry: Registry, item: AttachedGroup, now: float) -> GenerationRecord:
    """A generation of an earlier coordinator; its workers that attached already and did not bring it are absent."""
    info = item.group
    generation = GenerationRecord(info)
    generation.awaited_workers = {task for task in generation.ranks_by_worker if task not in registry.workers}
    generation.absent_workers = {task for task in generation.ranks_by_worker if task in registry.workers}
    registry.generations[info.generation] = generation
    registry.keys.setdefault(info.name, info.key)
    if info.generation > registry.latest_generations.get(info.name, 0):
        registry.latest_generations[info.name] = info.generation
    registry.add_timer(now + registry.worker_timeout, ReattachTimeout(info.generation))
    return generation


def _compare_verdicts(
    registry: Registry, generation: GenerationRecord, task: int, brought: tuple[Verdict, ...], now: float
) -> Iterator[Effect]:
    """Adopt verdicts that only the worker knows, and send it those that only the coordinator knows."""
    known = list(generation.verdicts)
    for verdict in sorted(brought, key=lambda verdict: -verdict.from_instance):
        if generation.find_verdict(verdict.from_instance) is not None:
            continue
        generation.verdicts.append(verdict)
        departure = Departure.LEFT if verdict.code == Code.ABORTED else Departure.LOST
        if verdict.code in (Code.ABORTED, Code.UNAVAILABLE):
            generation.departed |= {m.rank: departure for m in verdict.missing if m.rank < generation.info.size}
        generation.successor = generation.successor or verdict.successor
        if verdict.code != Code.ABORTED or verdict.from_instance == 0:
            generation.failed = True
            registry.record_failure(verdict, now)
        for other in generation.ranks_by_worker:
            if other != task and registry.is_connected(other):
                yield SendToWorker(other, verdict)
    registry.retire_if_over(generation)
    for verdict in known:
        if verdict not in brought:
            yield SendToWorker(task, verdict)


def on_reattach_timeout(registry: Registry, number: int, now: float) -> Iterator[Effect]:
    """Two heartbeat intervals have passed since a generation was adopted: a worker that is not back is lost."""
    generation = registry.generations.get(number)
    if generation is not None and generation.awaited_workers:
        generation.absent_workers |= generation.awaited_workers
        generation.awaited_workers.clear()
        yield from _resume_if_complete(registry, generation, now)


def _resume_if_complete(registry: Registry, generation: GenerationRecord, now: float) -> Iterator[Effect]:
    """Once all workers are back, or will not come, handle the reports that came meanwhile."""
    if generation.awaited_workers:
        return
    if generation.absent_workers:
        # With a verdict at hand their absence is no news: they may have ended their part in order.
        start = generation.verdicts[-1].from_instance if generation.verdicts else 0
        names = ", ".join(map(str, sorted(generation.absent_workers)))
        why = f"worker {names} did not come back with this group after the coordinator was restarted"
        yield from faults.mark_workers_lost(registry, generation, generation.absent_workers, why, start, now)
    generation.absent_workers.clear()
    held, generation.deferred_reports = generation.deferred_reports, []
    for event in held:
        yield from faults.handle_report(registry, event, now)
