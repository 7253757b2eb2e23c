"""A task that cuts a leaf apart or joins leaves whose values lie in the memory of GPUs.

Where all ranks are on one GPU of one worker, it copies rows from where they are to where they belong, or folds for
every rank its own piece, straight into that rank's result. Else values come into pinned memory of the host, the task
runs there as for values of the host, and each rank's rows are copied to its GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_proto.ipc.result_header import Pieces
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.cuda.kernels import MOST_SOURCES
from collectived_runtime.device.gpus import Gpu, Region
from collectived_runtime.device.launch_thread import Work
from collectived_runtime.engine.clients.local_rank import HostOrGpuBytes
from collectived_runtime.engine.compile.partition import Partition
from collectived_runtime.engine.gpu.gpu_task import GpuTask, address_of, make_fold_spec
from collectived_runtime.engine.gpu.spreading import plan_copies
from collectived_runtime.engine.run import host_task
from collectived_runtime.engine.run.schedule import Wait
from collectived_runtime.engine.run.task import TaskContext


class HostLeaf:
    """The contribution of a rank, on the host; a task reads it like `InputBuffers`."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory

    def contiguous_pack(self, pack_number: int) -> NDArray[np.uint8]:
        return self._memory


class RowsTask(GpuTask):
    """See the module."""

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        assert context.task.partition is not None, "it is of an operation that cuts leaves apart or joins them"
        self.cut: Partition = context.task.partition
        number = context.task.pack_number
        self.targets = {rank: leaves[number] for rank, leaves in context.rows_outputs.items()}

    def carry_out(self) -> Iterator[Wait]:
        contributed = locate_leaves(self.context)
        gpu = self._find_only_gpu(contributed)
        if gpu is None:
            yield from self._run_by_host(contributed)
            return
        how = self.arithmetic
        steps = self._list_copies(gpu, contributed) if how is None else self._list_folds(gpu, how, contributed)
        self.submit(gpu, partial(_run_steps, steps, (contributed, self.targets)))
        self.finish_submission()
        yield from self.wait_all()

    # All on one GPU

    def _find_only_gpu(self, contributed: Mapping[int, HostOrGpuBytes]) -> Gpu | None:
        """The GPU on which all of it lies, if that is so."""
        if self.context.result is not None or not self.context.program.is_single_worker:
            return None
        if self.arithmetic is not None and len(contributed) > MOST_SOURCES:
            return None
        memory = [*contributed.values(), *self.targets.values()]
        gpus = {one.gpu if isinstance(one, Region) else None for one in memory}
        return gpus.pop() if len(gpus) == 1 else None

    def _list_folds(self, gpu: Gpu, how: Arithmetic, contributed: Mapping[int, HostOrGpuBytes]) -> list[Work]:
        """Each rank's own piece, folded by one kernel in rank order."""
        pack, cut = self.task.pack, self.cut
        fold = make_fold_spec(how, widen=True, finish=True)
        size, result_size = pack.dtype.itemsize, pack.result_dtype.itemsize
        regions = list(contributed.values())
        parts = [part for part in cut.outgoing if part.rank == next(iter(contributed))]  # all leaves are cut alike
        found: list[Work] = []
        for rank, target in self.targets.items():
            for part in cut.trace_result(rank, parts):
                sources = [address_of(region) + part.start * size for region in regions]
                out, count = target.address + part.target * result_size, part.stop - part.start
                found.append(partial(gpu.cuda.fold, fold, sources, [out], count))
        self.context.tools.counters.folded_bytes += sum(map(len, regions))
        return found

    def _list_copies(self, gpu: Gpu, contributed: Mapping[int, HostOrGpuBytes]) -> list[Work]:
        """Each rank's rows, from where they lie; those of equal results, as of an all_gather, are read once for all."""
        size = self.task.pack.dtype.itemsize
        alike: dict[Pieces, list[int]] = {}
        for rank in self.targets:
            alike.setdefault(self.cut.pieces[rank], []).append(rank)
        found: list[Work] = []
        for ranks in alike.values():
            for part in self.cut.trace_result(ranks[0], self.cut.local_copies):
                source = address_of(contributed[part.rank]) + part.start * size
                into = [self.targets[rank].address + part.target * size for rank in ranks]
                found += plan_copies(gpu.cuda, source, into, (part.stop - part.start) * size)
        self.context.tools.counters.copied_bytes += sum(map(len, self.targets.values()))
        return found

    # By way of the host

    def _run_by_host(self, contributed: Mapping[int, HostOrGpuBytes]) -> Iterator[Wait]:
        sources = [HostLeaf(self.fetch_to_host(memory)) for memory in contributed.values()]
        yield from self.wait_all()
        task, result = self.task, self.context.result
        if result is None:
            task = replace(task, pack=replace(task.pack, result_offset=0))
            gpu = next((target.gpu for target in self.targets.values()), None)
            result = self.allocate_host(gpu, task.result_slice.stop)
        carried: Any = sources
        yield from host_task.run(replace(self.context, task=task, sources=carried, result=result))
        self.deliver_rows(result[task.result_slice])
        self.finish_submission()
        yield from self.wait_all()

    def fetch_to_host(self, memory: HostOrGpuBytes) -> NDArray[np.uint8]:
        """The same on the host, when all that is under way has ended."""
        if not isinstance(memory, Region):
            return memory
        found = self.allocate_host(memory.gpu, len(memory))
        if len(memory):
            self.fetch(memory, found)
        return found

    def deliver_rows(self, result: NDArray[np.uint8]) -> None:
        """Copies to each rank that has its result on a GPU its rows, from what the host has of this worker's ranks."""
        for rank, target in self.targets.items():
            self._copy_pieces_to_gpu(result, self.cut.pieces[rank], target)

    def _copy_pieces_to_gpu(self, result: NDArray[np.uint8], pieces: Sequence[tuple[int, int]], target: Region) -> None:
        size = self.task.pack.result_dtype.itemsize

        def work(stream: int) -> None:  # keeps both, whatever becomes of the task
            at = target.address
            for start, rows in pieces:
                nbytes = rows * self.cut.width * size
                if nbytes:
                    target.gpu.cuda.copy(at, result.ctypes.data + start * size, nbytes, stream)
                at += nbytes

        self.submit(target.gpu, work)


def locate_leaves(context: TaskContext) -> dict[int, HostOrGpuBytes]:
    """The contribution of each local rank to a leaf that is cut."""
    found: dict[int, HostOrGpuBytes] = {}
    for rank, source in zip(context.program.contributors, context.sources, strict=True):
        whole = source.contiguous_pack(context.task.pack_number)
        assert whole is not None, "a leaf that is cut travels by itself"
        found[rank] = whole
    return found


def _run_steps(steps: Sequence[Work], memory: object, stream: int) -> None:
    """Put steps on a stream; `memory` is what they read and write, which is kept until they have ended."""
    for step in steps:
        step(stream)
