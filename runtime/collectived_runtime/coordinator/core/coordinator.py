"""The coordinator's core: events and the time in, effects out; no sockets, threads or clocks.

The shell (`service.py`) calls `step` with everything that happens, carries out the effects in order, and calls it with
a `Tick` at the time that `next_deadline` names. All times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from collectived_proto.types import Tier
from collectived_runtime.coordinator.core import draining, faults, inquiries, membership, rendezvous, scaling
from collectived_runtime.coordinator.core.events import (
    DrainRequested,
    Effect,
    Event,
    FaultReported,
    Heartbeat,
    JoinAsked,
    JoinCancelled,
    LinkMeasured,
    Log,
    Promised,
    QueryAnswered,
    Tick,
    WorkerAttached,
    WorkerDetached,
    WorkerDrained,
)
from collectived_runtime.coordinator.core.registry import (
    Registry,
)
from collectived_runtime.coordinator.core.timers import (
    DrainRetry,
    DrainTimeout,
    InquiryRetry,
    InquiryTimeout,
    MeasurementTimeout,
    ProgressTimer,
    ProposalTimeout,
    ReattachTimeout,
    SettleTimeout,
    Timer,
    WorkerTimeout,
)
from collectived_runtime.limits.quota_settings import NO_LIMITS, GroupLimits


class Coordinator:
    """Groups, workers and verdicts of one coordinator process.

    Args:
        epoch: milliseconds since 1970 at start, larger than that of any coordinator before.
        heartbeat_seconds: how often workers must send a heartbeat; lost after two of these.
        stall_seconds: after how long of waiting a group loop reports an instance as pending.
        tune: whether links are measured when a group forms for which no table is stored.
        stored: tables of earlier measurements, by name and shape of the group.
        link_secret: known to this job alone, for links of workers; empty: the job has a secret.

    Attributes:
        registry: what is known, for readers (`status.take_snapshot`); only `step` changes it.
    """

    def __init__(
        self,
        epoch: int,
        heartbeat_seconds: float = 5.0,
        stall_seconds: float = 1.0,
        tune: bool = False,
        stored: Mapping[str, tuple[Tier, ...]] | None = None,
        limits: GroupLimits = NO_LIMITS,
        *,
        link_secret: str = "",
    ) -> None:
        self.registry = Registry(epoch, heartbeat_seconds, stall_seconds, tune, dict(stored or {}), link_secret)
        self.registry.limits = limits

    @property
    def epoch(self) -> int:
        return self.registry.epoch

    @property
    def heartbeat_seconds(self) -> float:
        return self.registry.heartbeat_seconds

    @property
    def hosts(self) -> dict[int, str]:
        """Of the workers that are here, or may come back, by their numbers."""
        return {task: worker.hello.host for task, worker in self.registry.workers.items()}

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take in one event, and return the effects of it, in order."""
        return list(self._dispatch(event, now))

    def next_deadline(self) -> float | None:
        """When the next `Tick` is due; None: not before another event."""
        return self.registry.timers[0][0] if self.registry.timers else None

    def _dispatch(self, event: Event, now: float) -> Iterator[Effect]:
        registry = self.registry
        match event:
            case WorkerAttached():
                yield from membership.handle_attach(registry, event, now)
            case WorkerDetached():
                yield from membership.handle_detach(registry, event, now)
            case DrainRequested():
                yield from draining.handle_drain_request(registry, event, now)
            case Tick():
                yield from self._tick(now)
            case _ if event.task not in registry.workers:
                yield Log("debug", f"worker {event.task} is not attached, its {type(event).__name__} is ignored")
            case _:
                registry.workers[event.task].last_seen_at = now
                yield from self._dispatch_worker_event(event, now)

    def _dispatch_worker_event(
        self,
        event: Heartbeat
        | JoinAsked
        | JoinCancelled
        | FaultReported
        | QueryAnswered
        | LinkMeasured
        | Promised
        | WorkerDrained,
        now: float,
    ) -> Iterator[Effect]:
        registry = self.registry
        match event:
            case Heartbeat():
                membership.handle_heartbeat(registry, event, now)
            case JoinAsked(task, ask):
                yield from rendezvous.handle_join(registry, task, ask, now)
            case JoinCancelled():
                yield from rendezvous.handle_join_cancel(registry, event, now)
            case FaultReported():
                yield from faults.handle_report(registry, event, now)
            case QueryAnswered():
                yield from inquiries.handle_query_answer(registry, event, now)
            case LinkMeasured():
                yield from rendezvous.handle_measurement(registry, event)
            case WorkerDrained():
                yield from draining.handle_worker_drained(registry, event, now)
            case Promised() if draining.is_drain_proposal(registry, event.proposal):
                yield from draining.handle_promise(registry, event, now)
            case Promised():
                yield from scaling.handle_promise(registry, event, now)

    def _tick(self, now: float) -> Iterator[Effect]:
        due = self.next_deadline()
        if due is not None:
            membership.compensate_pause(self.registry, now - due, now)
        for _, timer in self.registry.pop_due_timers(now):
            yield from self._fire(timer, now)

    def _fire(self, timer: Timer, now: float) -> Iterator[Effect]:
        registry = self.registry
        match timer:
            case WorkerTimeout():
                yield from membership.on_worker_timeout(registry, timer, now)
            case InquiryTimeout(query):
                yield from inquiries.on_inquiry_timeout(registry, query, now)
            case InquiryRetry(query):
                yield from inquiries.on_inquiry_retry(registry, query, now)
            case SettleTimeout():
                yield from rendezvous.on_settle_timeout(registry, timer, now)
            case ProgressTimer(name):
                yield from rendezvous.on_progress_timer(registry, name, now)
            case ReattachTimeout(number):
                yield from membership.on_reattach_timeout(registry, number, now)
            case MeasurementTimeout(number):
                yield from rendezvous.finish_measurement(registry, number)
            case DrainRetry():
                yield from draining.on_retry_timer(registry, timer, now)
            case DrainTimeout():
                yield from draining.on_drain_timeout(registry, timer)
            case ProposalTimeout() if draining.is_drain_proposal(registry, timer.proposal):
                yield from draining.on_proposal_timeout(registry, timer, now)
            case ProposalTimeout():
                yield from scaling.on_proposal_timeout(registry, timer, now)
