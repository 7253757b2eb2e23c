"""Stream order: a rank may get a message when all work of an instance is on the device, before an event.

Its own streams wait for that event, and its caller goes on while the device is still at it. An event must not be
recorded again while a rank may yet make a stream wait for it: so a rank has a few, and gives them back as it releases
result slots. A rank that has none left gets its message only when the instance is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from collectived_proto.ipc import messages
from collectived_runtime.device.cuda.driver import CudaError
from collectived_runtime.device.gpus import Gpu, Region
from collectived_runtime.device.launch_thread import Launch
from collectived_runtime.engine.run.task import CompletionEvent

log = logging.getLogger("collectived.group_loop")

MOST_EVENTS = 8  # of one rank on one GPU


@dataclass(frozen=True, slots=True)
class _Event:
    number: int
    gpu: Gpu
    event: int
    handle: bytes


@dataclass(slots=True)
class _RankEvents:
    free: dict[Gpu, list[_Event]] = field(default_factory=dict)  # the one used last stands last: it is open there
    lent: dict[int, _Event] = field(default_factory=dict)
    made: dict[Gpu, int] = field(default_factory=dict)


class StreamOrder:
    """Lends events of GPUs to ranks that go on in stream order. Used in the thread of one group loop.

    Args:
        call_soon_threadsafe: has something called in that thread, from any thread.
        send: sends a message to a rank.
    """

    def __init__(
        self, call_soon_threadsafe: Callable[[Callable[[], None]], object], send: Callable[[int, bytes], object]
    ) -> None:
        self._call_soon_threadsafe = call_soon_threadsafe
        self._send = send
        self._ranks: dict[int, _RankEvents] = {}
        self._numbers = count(messages.WORKER_EVENT_BASE)

    def create_completion_event(self, instance: int, outputs: Mapping[int, Region], tasks: int) -> CompletionEvent:
        """The event of an instance whose results are written to `outputs`, by rank that goes on in stream order."""
        return CompletionEvent(instance, outputs, tasks, self._record_event)

    def release(self, rank: int, number: int) -> None:
        """Take an event back for which no stream will wait any more.

        A number that the rank does not have is ignored.
        """
        known = self._ranks.get(rank)
        event = known.lent.pop(number, None) if known is not None else None
        if known is not None and event is not None:
            known.free.setdefault(event.gpu, []).append(event)

    def remove_rank(self, rank: int) -> None:
        """Free the events of a rank that has gone, each when it is over: its streams may still wait for it."""
        known = self._ranks.pop(rank, None)
        if known is None:
            return
        for event in [*known.lent.values(), *(event for free in known.free.values() for event in free)]:
            event.gpu.submit(partial(_end, event), lambda: None, (event.event,))

    def close(self) -> None:
        for rank in list(self._ranks):
            self.remove_rank(rank)

    def _record_event(self, finale: CompletionEvent, rank: int, gpu: Gpu) -> None:
        event = self._acquire_event(rank, gpu)
        if event is None:
            return

        def begun() -> None:
            self._call_soon_threadsafe(lambda: self._on_recorded(finale, rank, event, launch))

        launch = gpu.submit(partial(gpu.cuda.record, event.event), lambda: None, begun=begun)

    def _on_recorded(self, finale: CompletionEvent, rank: int, event: _Event, launch: Launch) -> None:
        if finale.is_healthy and launch.error is None:
            self._send(rank, messages.Launched(finale.instance, event.number, event.handle).encode())
        else:
            self.release(rank, event.number)

    def _acquire_event(self, rank: int, gpu: Gpu) -> _Event | None:
        known = self._ranks.setdefault(rank, _RankEvents())
        free = known.free.get(gpu)
        if free:
            event = free.pop()
        elif known.made.get(gpu, 0) < MOST_EVENTS:
            try:
                made = gpu.cuda.create_shared_event(gpu.device.number)
            except CudaError as error:
                log.warning(
                    "GPU:%d has no events for other processes, so calls return when their work there is over: %s",
                    gpu.index,
                    error,
                )
                known.made[gpu] = MOST_EVENTS
                return None
            known.made[gpu] = known.made.get(gpu, 0) + 1
            event = _Event(next(self._numbers), gpu, *made)
        else:
            return None
        known.lent[event.number] = event
        return event


def _end(event: _Event, _: int) -> None:
    event.gpu.cuda.destroy_event(event.event)
