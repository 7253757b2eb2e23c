"""The context of a task: the program that it belongs to, memory, links, and the tools of its group loop.

A task is a generator: it yields what it waits for, and is closed to stop it. Seven executors carry tasks out:
`run/host_task.py`, `run/lent_task.py`, and in `gpu/` `gpu_task.py`, `rows_task.py`, `nccl_task.py`,
`nccl_rows_task.py` and `hierarchical_task.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.gpus import Gpu, Region
from collectived_runtime.device.launch_thread import Launch
from collectived_runtime.engine.base.arenas import Workspace
from collectived_runtime.engine.base.poller import Timers
from collectived_runtime.engine.clients.deferred_release import DeferredReleases
from collectived_runtime.engine.clients.local_rank import InputBuffers
from collectived_runtime.engine.clients.result_parts import ResultParts
from collectived_runtime.engine.compile.program import CompiledCollective, PackTask
from collectived_runtime.engine.record.counters import Counters
from collectived_runtime.engine.record.flight_recorder import FOLD, MOST_MOVES
from collectived_runtime.engine.run.fold_pool import PoolClient
from collectived_runtime.engine.run.schedule import PlanTransport


@dataclass(frozen=True, slots=True)
class TaskTools:
    """The tools that the tasks of a group loop share.

    Attributes:
        workspace: scratch memory.
        pool_client: helps to fold what is large.
        counters: count what is folded and copied.
        wake: wakes the group loop, from any thread.
        deferred_releases: keep the memory that GPUs still use for tasks that were stopped.
        timers: wake the group loop when a time has come.
    """

    workspace: Workspace
    pool_client: PoolClient
    counters: Counters
    wake: Callable[[], object]
    deferred_releases: DeferredReleases
    timers: Timers = field(default_factory=Timers)


@dataclass(frozen=True, slots=True)
class TaskContext:
    """One task of a running instance: everything that its executor needs.

    Attributes:
        sources: the submissions of the contributing local ranks, in rank order.
        result: the instance's result slot behind its header; None where no local rank reads the result there.
        outputs: memory of GPUs where the result is written, one region per rank that wants it there.
        rows_outputs: the same where every rank has a result of its own: by rank, of each leaf, in order of packs.
        parts: notifies the local ranks of parts of the result; None: no rank asks for that.
        partials: of each pack, where the local ranks have folded it themselves.
        completion_event: takes the launches submitted to GPUs; None where no rank goes on in stream order.
    """

    program: CompiledCollective
    task: PackTask
    sources: Sequence[InputBuffers]
    result: NDArray[np.uint8] | None
    tools: TaskTools
    transport: PlanTransport
    outputs: Sequence[Region] = ()
    completion_event: CompletionEvent | None = None
    partials: Sequence[NDArray[np.uint8]] = ()
    parts: ResultParts | None = None
    rows_outputs: Mapping[int, tuple[Region, ...]] = field(default_factory=dict)

    @property
    def arithmetic(self) -> Arithmetic | None:
        """How elements are folded; None: they are moved as they are."""
        return self.program.arithmetic[self.task.pack_number]

    def mark_fold(self, began: float) -> None:
        """Marks for the flight recorder that the local ranks have been folded, since `began`."""
        marks = self.transport.marks
        if marks is not None and len(marks) < MOST_MOVES:
            marks.append((FOLD, self.task.pack_number, self.task.shard, 0, -1, began, time.monotonic()))


class CompletionEvent:
    """Notifies ranks that go on in stream order when all tasks of an instance have been submitted to GPUs.

    Args:
        outputs: by such a rank, where its result is written.
        tasks: how many the instance has.
        record_event: sends a rank an event behind all work submitted to that GPU until now.
    """

    def __init__(
        self,
        instance: int,
        outputs: Mapping[int, Region],
        tasks: int,
        record_event: Callable[[CompletionEvent, int, Gpu], object],
    ) -> None:
        self.instance = instance
        self.closed = False
        self._gpus = {rank: output.gpu for rank, output in outputs.items()}
        self._remaining_tasks = tasks
        self._record_event = record_event
        self._launches: list[Launch] = []

    def add_launches(self, launches: Sequence[Launch]) -> None:
        """Note that one more task has submitted all that remains of it."""
        self._launches += launches
        self._remaining_tasks -= 1
        if not self._remaining_tasks:
            for rank, gpu in self._gpus.items():
                self._record_event(self, rank, gpu)

    @property
    def is_healthy(self) -> bool:
        """Whether the instance still runs, and nothing of it has been refused."""
        return not self.closed and all(launch.error is None for launch in self._launches)

    def close(self) -> None:
        """Send no more messages: the instance has ended, well or not."""
        self.closed = True
        self._launches.clear()
