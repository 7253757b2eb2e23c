"""The coordinator's mind: events and the time in, effects out; no sockets, threads or clocks.

The shell (`service.py`) calls `step` with everything that happens, carries out the effects in order, and calls it with
a `Tick` at the time that `next_wakeup` names. All times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from collectived_proto.types import Tier
from collectived_runtime.coordinator import completion, draining, faults, joins, newcomers, workers
from collectived_runtime.coordinator.census import Census, census
from collectived_runtime.coordinator.events import (
    Beat,
    DrainAsked,
    DrainedBy,
    Effect,
    Event,
    JoinAsked,
    JoinCancelled,
    Log,
    Measured,
    Positioned,
    Promised,
    Reported,
    Tick,
    WorkerAttached,
    WorkerGone,
)
from collectived_runtime.coordinator.registry import (
    DrainLate,
    DrainTurn,
    NoReturn,
    Progress,
    Registry,
    Settled,
    Silence,
    Timer,
    Unanswered,
    Undecided,
    Unmeasured,
    Unpromised,
)
from collectived_runtime.coordinator.snapshot import Snapshot, snapshot


class Coordinator:
    """Groups, workers and verdicts of one coordinator process.

    Args:
        epoch: milliseconds since 1970 at start, larger than that of any coordinator before.
        heartbeat_seconds: how often workers are to be heard; lost after two of these.
        stall_seconds: after how long of waiting a lane reports an instance as pending.
        tune: whether links are measured when a group forms for which no table is stored.
        stored: tables of earlier measurements, by name and shape of the group.
        link_secret: that nobody else has, for links of workers; empty: the job has a secret.
    """

    def __init__(
        self,
        epoch: int,
        heartbeat_seconds: float = 5.0,
        stall_seconds: float = 1.0,
        tune: bool = False,
        stored: Mapping[str, tuple[Tier, ...]] | None = None,
        most_groups: int = 0,
        most_ranks: int = 0,
        *,
        link_secret: str = "",
    ) -> None:
        self._book = Registry(epoch, heartbeat_seconds, stall_seconds, tune, dict(stored or {}), link_secret)
        self._book.most_groups, self._book.most_ranks = most_groups, most_ranks

    @property
    def epoch(self) -> int:
        return self._book.epoch

    @property
    def heartbeat_seconds(self) -> float:
        return self._book.heartbeat_seconds

    @property
    def hosts(self) -> dict[int, str]:
        """Of the workers that are here, or may come back, by their numbers."""
        return {task: worker.hello.host for task, worker in self._book.workers.items()}

    def step(self, event: Event, now: float) -> list[Effect]:
        """Takes in one event; what is to be done about it, in order."""
        return list(self._effects(event, now))

    def next_wakeup(self) -> float | None:
        """When the next `Tick` is due; None: not before another event."""
        return self._book.timers[0][0] if self._book.timers else None

    def snapshot(self, now: float) -> Snapshot:
        """What everybody may know, as values."""
        return snapshot(self._book, now)

    def census(self, now: float) -> Iterator[Census | None]:
        """What is counted: see `census.census`."""
        return census(self._book, now)

    def _effects(self, event: Event, now: float) -> Iterator[Effect]:
        book = self._book
        match event:
            case WorkerAttached(hello, clock):
                yield from workers.attached(book, hello, clock, now)
            case WorkerGone():
                yield from workers.gone(book, event, now)
            case DrainAsked():
                yield from draining.asked(book, event, now)
            case Tick():
                yield from self._tick(now)
            case _ if event.task not in book.workers:
                yield Log("debug", f"worker {event.task} is not attached, its {type(event).__name__} is ignored")
            case _:
                book.workers[event.task].heard_at = now
                yield from self._heard(event, now)

    def _heard(
        self,
        event: Beat | JoinAsked | JoinCancelled | Reported | Positioned | Measured | Promised | DrainedBy,
        now: float,
    ) -> Iterator[Effect]:
        book = self._book
        match event:
            case Beat():
                workers.beat(book, event, now)
            case JoinAsked(task, ask):
                yield from joins.asked(book, task, ask, now)
            case JoinCancelled():
                yield from joins.cancelled(book, event, now)
            case Reported():
                yield from faults.reported(book, event, now)
            case Positioned():
                yield from faults.positioned(book, event, now)
            case Measured():
                yield from completion.measured(book, event)
            case DrainedBy():
                yield from draining.answered(book, event, now)
            case Promised() if draining.concerns(book, event.proposal):
                yield from draining.promised(book, event, now)
            case Promised():
                yield from newcomers.promised(book, event, now)

    def _tick(self, now: float) -> Iterator[Effect]:
        due = self.next_wakeup()
        if due is not None:
            workers.slept(self._book, now - due, now)
        for _, timer in self._book.due(now):
            yield from self._fire(timer, now)

    def _fire(self, timer: Timer, now: float) -> Iterator[Effect]:
        book = self._book
        match timer:
            case Silence():
                yield from workers.silent(book, timer, now)
            case Unanswered(query):
                yield from faults.unanswered(book, query, now)
            case Undecided(query):
                yield from faults.undecided(book, query, now)
            case Settled():
                yield from joins.settled(book, timer, now)
            case Progress(name):
                yield from joins.progress_due(book, name, now)
            case NoReturn(number):
                yield from workers.not_returned(book, number, now)
            case Unmeasured(number):
                yield from completion.conclude(book, number)
            case DrainTurn():
                yield from draining.turn(book, timer, now)
            case DrainLate():
                yield from draining.late(book, timer)
            case Unpromised() if draining.concerns(book, timer.proposal):
                yield from draining.lapsed(book, timer, now)
            case Unpromised():
                yield from newcomers.lapsed(book, timer, now)
