"""An instance under way: its tasks by channel, stepped whenever what they wait for is there."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from collectived_runtime.device.gpus import Region
from collectived_runtime.engine.base.arenas import ResultSlot
from collectived_runtime.engine.clients.result_parts import ResultParts
from collectived_runtime.engine.compile.program import CompiledCollective, PackTask
from collectived_runtime.engine.record.flight_recorder import MOST_MARKS, PRELUDE, STRAND
from collectived_runtime.engine.run.links import Links
from collectived_runtime.engine.run.schedule import Wait
from collectived_runtime.engine.run.task import CompletionEvent
from collectived_runtime.engine.submit.tracker import Instance
from collectived_runtime.transport.link import Link

TaskFactory = Callable[[PackTask, dict[int, Link]], Iterator[Wait]]


@dataclass(slots=True)
class _ActiveTask:
    task: PackTask
    generator: Iterator[Wait]
    links: frozenset[Link]  # its own as long as it runs: no other task reads or writes them
    started_at: float
    wait: Wait = ()


@dataclass(frozen=True, slots=True)
class ResultDelivery:
    """Where the results of an instance go on this worker.

    Attributes:
        readers: the ranks that read the result in `slot`; all other ranks that receive one have it written into memory
            of their own.
        memory: of the slot, behind its header.
        outputs: that memory of their own, on GPUs.
        rows_outputs: the same of operations that cut values or join them: by rank, of each leaf, in order of packs.
        is_on_device: whether any value or result lies on a GPU.
        completion_event: notifies ranks that go on in stream order; None where none does.
        parts: notifies ranks of parts of the result; None where none asked for that.
        is_shared: whether the ranks take the result out of their segment, and need no message.
    """

    readers: tuple[int, ...] = ()
    slot: ResultSlot | None = None
    memory: NDArray[np.uint8] | None = None
    outputs: tuple[Region, ...] = ()
    is_on_device: bool = False
    completion_event: CompletionEvent | None = None
    parts: ResultParts | None = None
    is_shared: bool = False
    rows_outputs: Mapping[int, tuple[Region, ...]] = field(default_factory=dict)


_NOTHING = ResultDelivery()


class Execution:
    """A program under way for an instance.

    Args:
        start: makes the generator of a task once its links are there.
        is_prelude: this is a phase before the program itself.
    """

    def __init__(
        self,
        instance: Instance,
        program: CompiledCollective,
        start: TaskFactory,
        delivery: ResultDelivery = _NOTHING,
        is_prelude: bool = False,
    ) -> None:
        self.instance = instance
        self.program = program
        self.delivery = delivery
        self.is_prelude = is_prelude
        self.reported = False  # of a pack
        self._tasks_left = dict(program.tasks_per_pack)  # how many of each pack have not ended
        self._task_factory = start
        self._queues = {channel: list(queue) for channel, queue in program.queues}
        self._active_tasks: dict[int, _ActiveTask] = {}

    def step(self, links: Links) -> tuple[list[PackTask], bool]:
        """Steps what can go on.

        Returns the tasks that ended, and whether anything wants to be stepped again at once.

        Raises:
            LinkBroken: a peer is gone.
        """
        ended: list[PackTask] = []
        again = False
        for channel, queue in self._queues.items():
            active = self._active_tasks.get(channel)
            if active is None:
                if not queue or (found := links.get(queue[-1].peers, channel)) is None:
                    continue
                task = queue.pop()
                active = self._active_tasks[channel] = _ActiveTask(
                    task, self._task_factory(task, found), frozenset(found.values()), time.monotonic()
                )
            elif active.wait and not any(
                one in links.ready if isinstance(one, Link) else one.done for one, _ in active.wait
            ):
                continue
            try:
                active.wait = next(active.generator)
            except StopIteration:
                del self._active_tasks[channel]
                ended.append(active.task)
                self._record_mark(active)
                again |= bool(queue)
            else:
                again |= not active.wait
        return ended, again

    def _record_mark(self, active: _ActiveTask) -> None:
        marks = self.instance.marks
        if len(marks) < MOST_MARKS:
            kind = PRELUDE if self.is_prelude else STRAND
            task = active.task
            marks.append((kind, task.pack_number, task.shard, 0, -1, active.started_at, time.monotonic()))

    @property
    def awaited_peers(self) -> tuple[int, ...]:
        """The workers from which something is to come; may be read from any thread."""
        waits = [one for active in list(self._active_tasks.values()) for one in active.wait]
        return tuple(sorted({one.peer for one, event in waits if isinstance(one, Link) and event & select.POLLIN}))

    def complete_task(self, task: PackTask) -> tuple[bool, bool]:
        """Take note of a task's end: whether its pack is complete, and whether that was the last pack."""
        self._tasks_left[task.pack_number] -= 1
        if self._tasks_left[task.pack_number]:
            return False, False
        del self._tasks_left[task.pack_number]
        if not self._tasks_left:
            self._close_completion_event()
        return True, not self._tasks_left

    @property
    def is_told(self) -> bool:
        """Whether its receivers know of the slot: they hold it from then on until they release it."""
        return self.reported or (self.delivery.parts is not None and self.delivery.parts.is_told)

    def _close_completion_event(self) -> None:
        if self.delivery.completion_event is not None:
            self.delivery.completion_event.close()

    @property
    def packs_left(self) -> int:
        """May be read from any thread."""
        return len(self._tasks_left)

    def link_events(self) -> dict[Link, int]:
        """The links of the tasks that run, with the poll events that each is waited for with (0: none now).

        A task that wants to be stepped again may be amid a frame of any of its links: no other code may read there.
        """
        events: dict[Link, int] = {}
        for active in self._active_tasks.values():
            events.update(dict.fromkeys(active.links, 0 if active.wait else select.POLLIN))
            for one, event in active.wait:
                if isinstance(one, Link):
                    events[one] |= event
        return events

    def stop(self) -> set[Link]:
        """Stops what runs; the links that it held, perhaps amid a frame."""
        held: set[Link] = set()
        self._close_completion_event()
        for active in self._active_tasks.values():
            held |= active.links
            active.generator.close()  # type: ignore[attr-defined]
        self._active_tasks.clear()
        self._queues.clear()
        return held
