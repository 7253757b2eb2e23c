"""A task whose values lie in the memory of GPUs: folded there first, carried between workers by the host.

Where all that contribute and receive are on one GPU of one worker, one kernel does it all. Else ranks that follow on
each other on one GPU are folded there, in rank order; the partial sums come into pinned memory of the host, are
folded there in the order of their ranks, so that the lower one is always left, and the plan runs on them as it does
for values of the host. The result is copied to where each rank wants it. While one task is copied, others are on
the wire: a pack of a group with GPUs is cut into several.

Closing a task does not wait for GPUs: what they are at lingers, and keeps its memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_proto.numpy_types import to_numpy
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.cuda.driver import CudaError, FoldSpec
from collectived_runtime.device.cuda.kernels import MOST_OUTPUTS, MOST_SOURCES
from collectived_runtime.device.gpus import Gpu, Region, is_out_of_memory
from collectived_runtime.device.launch_thread import Launch, Work
from collectived_runtime.device.nccl.interface import NcclError
from collectived_runtime.engine.base.memory_budget import MemoryExhausted
from collectived_runtime.engine.clients.local_rank import HostOrGpuBytes
from collectived_runtime.engine.compile.partition import Window
from collectived_runtime.engine.gpu.spreading import plan_copies
from collectived_runtime.engine.run.host_task import (
    copy_in_stretches,
    copy_over,
    fold_in_stretches,
    keep_in_place,
    refuse_fold,
)
from collectived_runtime.engine.run.schedule import Buffers, Wait, execute
from collectived_runtime.engine.run.task import TaskContext
from collectived_runtime.plan.moves import Buffer

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """The contribution of one rank to elements [start, stop) of the pack."""

    start: int
    stop: int
    memory: HostOrGpuBytes


def _find_only_gpu(ranks: Sequence[Sequence[Piece]], outputs: Sequence[Region]) -> Gpu | None:
    """The GPU on which all of it lies, if that is so."""
    memory = [piece.memory for pieces in ranks for piece in pieces] + list(outputs)
    gpus = {one.gpu if isinstance(one, Region) else None for one in memory}
    return gpus.pop() if len(gpus) == 1 and outputs and 0 < len(ranks) <= MOST_SOURCES else None


class GpuTask:
    """One task under way, with what its GPUs are at and the memory that they use meanwhile.

    `run` is the same for all tasks on GPUs; a subclass says in `carry_out` what is to be done.
    """

    def __init__(self, context: TaskContext) -> None:
        self.context = context
        self.task = context.task
        self.arithmetic = context.arithmetic
        self.has_succeeded = False
        self._launches: list[tuple[Gpu, Launch]] = []
        self._pinned: list[tuple[Gpu, NDArray[np.uint8]]] = []
        self._scratch: list[tuple[Gpu, Region]] = []
        self._is_stopped = False
        self._has_ended = False
        self._release_lock = threading.Lock()

    def run(self) -> Iterator[Wait]:
        """Carries the task out.

        Raises:
            MemoryExhausted: there is no memory for what lies in between.
            CudaError: a GPU has failed. NcclError: NCCL has.
        """
        try:
            yield from self.carry_out()
            self.has_succeeded = True
        except CudaError as error:
            if is_out_of_memory(error):
                raise MemoryExhausted(f"on a GPU of this worker: {error}") from error
            raise
        finally:
            self.stop()

    def carry_out(self) -> Iterator[Wait]:
        """Folds on GPUs, runs the plan on the host and copies the result to where it is wanted."""
        context = self.context
        ranks = self.split_contributions()
        self.count_bytes(ranks)
        is_local = context.result is None and context.program.is_single_worker
        gpu = _find_only_gpu(ranks, context.outputs) if is_local else None
        if gpu is not None:
            yield from self._run_on_one_gpu(gpu, ranks)
            return
        began = time.monotonic()
        buffers = yield from self._prepare_buffers(ranks)
        context.mark_fold(began)
        yield from execute(self.task.plan, buffers, context.transport)
        if buffers.output is not None:
            yield from self._deliver(buffers.view(Buffer.OUTPUT, self.task.span))
        else:
            self.finish_submission()

    def split_contributions(self) -> list[list[Piece]]:
        """Split what each rank contributes to this task, at the same places for all."""
        itemsize, span = self.task.pack.dtype.itemsize, self.task.span
        parts = [source.parts(self.task.pack_number) for source in self.context.sources]
        by_rank = [[(at, at + len(memory) // itemsize, memory) for at, memory in one] for one in parts]
        cuts = sorted(
            {edge for one in by_rank for start, stop, _ in one for edge in (start, stop)} | {span.start, span.stop}
        )
        found: list[list[Piece]] = []
        for one in by_rank:
            pieces = []
            for first, last in zip(cuts, cuts[1:], strict=False):
                if first < span.start or last > span.stop:
                    continue
                for start, stop, memory in one:
                    if start <= first and last <= stop:
                        part = memory[(first - start) * itemsize : (last - start) * itemsize]
                        pieces.append(Piece(first, last, part))
            found.append(pieces)
        return found

    # All on one GPU

    def _run_on_one_gpu(self, gpu: Gpu, ranks: Sequence[Sequence[Piece]]) -> Iterator[Wait]:
        """One kernel reads every value once and writes every result."""
        pack, span, how = self.task.pack, self.task.span, self.arithmetic
        size, cuda = pack.result_dtype.itemsize, gpu.cuda
        targets = [output[pack.result_offset :] for output in self.context.outputs]

        def work(stream: int) -> None:
            for together in zip(*ranks, strict=True):
                start, count = together[0].start, together[0].stop - together[0].start
                addresses = [address_of(piece.memory) for piece in together]
                into = [target.address + start * size for target in targets]
                if how is None:
                    for step in plan_copies(cuda, addresses[0], into, count * size):
                        step(stream)
                else:
                    spec = make_fold_spec(how, widen=True, finish=True)
                    cuda.fold(spec, addresses, into[:MOST_OUTPUTS], count, stream)
            if how is None:
                return
            begin, nbytes = span.start * size, len(span) * size
            for target in targets[MOST_OUTPUTS:]:  # those that one kernel does not write
                cuda.copy(target.address + begin, targets[0].address + begin, nbytes, stream)

        self.submit(gpu, work)
        self.finish_submission()
        yield from self.wait_all()

    def count_bytes(self, ranks: Sequence[Sequence[Piece]]) -> None:
        counters = self.context.tools.counters
        nbytes = sum(len(piece.memory) for pieces in ranks for piece in pieces)
        if self.arithmetic is None:
            counters.copied_bytes += nbytes
        else:
            counters.folded_bytes += nbytes

    # By way of the host

    def _prepare_buffers(self, ranks: Sequence[Sequence[Piece]]) -> Generator[Wait, None, Buffers]:
        """Prepare the buffers of the plan, in memory of the host."""
        gpu, how = _find_gpu(ranks, self.context.outputs), self.arithmetic
        output, windows = self.allocate_output(gpu)
        if how is None:
            if not ranks:  # it comes over the links, to where the result is
                assert output is not None
                windows = dict.fromkeys(windows, windows[Buffer.INPUT]) if Buffer.OUTPUT in windows else {}
                return Buffers(output, output, output, refuse_fold, copy_over, keep_in_place, windows)
            (pieces,) = ranks
            mine = yield from self.copy_to_host(gpu, pieces)
            return Buffers(mine, mine, output, refuse_fold, copy_over, keep_in_place, windows)
        partials = yield from self.fold_to_host(gpu, how, ranks)
        return Buffers(partials, partials, output, how.fold, how.finish, how.finish_in_place, windows)

    def allocate_output(self, gpu: Gpu | None) -> tuple[Array | None, dict[Buffer, Window]]:
        """Where a plan leaves the result on the host, if it is wanted here, and where its buffers begin."""
        pack, span, result = self.task.pack, self.task.span, self.context.result
        window, dtype = Window(offsets=(-span.start,)), to_numpy(pack.result_dtype)
        windows = {Buffer.INPUT: window, Buffer.SCRATCH: window}  # they hold this task's span alone
        if result is not None:
            end = pack.result_offset + pack.count * dtype.itemsize
            return result[pack.result_offset : end].view(dtype), windows
        if not self.context.outputs:
            return None, windows
        windows[Buffer.OUTPUT] = window
        return self.allocate_host(gpu, len(span) * dtype.itemsize).view(dtype), windows

    def copy_to_host(self, gpu: Gpu | None, pieces: Sequence[Piece]) -> Generator[Wait, None, Array]:
        """Copy what the one rank that contributes has to the host."""
        itemsize, start = self.task.pack.dtype.itemsize, self.task.span.start
        mine = self.allocate_host(gpu, len(self.task.span) * itemsize)
        for piece in pieces:
            into = mine[(piece.start - start) * itemsize : (piece.stop - start) * itemsize]
            if isinstance(piece.memory, Region):
                self.fetch(piece.memory, into)
            else:
                yield from copy_in_stretches(_as_host_array(piece.memory), into)
        yield from self.wait_all()
        return mine.view(to_numpy(self.task.pack.dtype))

    def fold_to_host(
        self, gpu: Gpu | None, how: Arithmetic, ranks: Sequence[Sequence[Piece]]
    ) -> Generator[Wait, None, Array]:
        """Fold what these ranks have into partial sums on the host."""
        count = len(self.task.span)
        found: list[Array] = []
        for place, group in _group_by_gpu(ranks):
            partials = how.view_partials(self.allocate_host(place or gpu, count * how.partial_bytes), count)
            found.append(partials)
            if place is None:
                yield from self._fold_on_host(how, group, partials)
            else:
                self._fold_on_gpu(place, how, group, partials)
        yield from self.wait_all()

        def fold(pair: list[Array], out: Array) -> None:
            how.fold(pair[0], pair[1], out)

        total = found[0]
        for other in found[1:]:
            yield from fold_in_stretches(fold, how.partial_bytes, [total, other], total, self.context.tools)
        return total

    def _fold_on_host(self, how: Arithmetic, group: Sequence[Sequence[Piece]], partials: Array) -> Iterator[Wait]:
        """Fold the ranks whose values lie on the host."""
        dtype, start = to_numpy(self.task.pack.dtype), self.task.span.start
        for together in zip(*group, strict=True):
            arrays = [_as_host_array(piece.memory).view(dtype) for piece in together]
            into = partials[together[0].start - start : together[0].stop - start]
            yield from fold_in_stretches(how.fold_all, how.partial_bytes, arrays, into, self.context.tools)

    def _fold_on_gpu(self, gpu: Gpu, how: Arithmetic, group: Sequence[Sequence[Piece]], partials: Array) -> None:
        """Have a GPU fold its own ranks."""
        if len(group) == 1 and how.needs_no_widening:  # its elements are partial sums as they are
            start, size = self.task.span.start, how.partial_bytes
            into = partials.view(np.uint8)
            for piece in group[0]:
                self.fetch(_as_region(piece.memory), into[(piece.start - start) * size : (piece.stop - start) * size])
            return
        scratch = gpu.scratch.acquire(partials.nbytes)
        self._scratch.append((gpu, scratch))
        fold, first, size, cuda = (
            make_fold_spec(how, widen=True),
            self.task.span.start,
            how.partial_bytes,
            gpu.cuda,
        )
        to, nbytes = partials.ctypes.data, partials.nbytes

        def work(stream: int) -> None:
            for together in zip(*group, strict=True):
                addresses = [address_of(piece.memory) for piece in together]
                start, count = together[0].start, together[0].stop - together[0].start
                cuda.fold(fold, addresses, [scratch.address + (start - first) * size], count, stream)
            cuda.copy(to, scratch.address, nbytes, stream)

        self.submit(gpu, work)

    def fetch(self, source: Region, into: NDArray[np.uint8]) -> None:
        """Copies from a GPU to the host."""
        target = into.ctypes.data
        self.submit(source.gpu, lambda stream: source.gpu.cuda.copy(target, source.address, len(source), stream))

    def _deliver(self, result: Array) -> Iterator[Wait]:
        """Copies the result of this task to wherever it is wanted."""
        for output in self.context.outputs:
            self.copy_to_gpu(result, self.slice_output(output))
        self.finish_submission()
        yield from self.wait_all()

    def slice_output(self, output: Region) -> Region:
        """Where the result of this task lies in that of all."""
        pack, span = self.task.pack, self.task.span
        size = pack.result_dtype.itemsize
        return output[pack.result_offset + span.start * size : pack.result_offset + span.stop * size]

    def copy_to_gpu(self, result: Array, target: Region) -> None:
        """Copies from the host."""

        def work(stream: int) -> None:  # keeps both, whatever becomes of the task
            target.gpu.cuda.copy(target.address, result.ctypes.data, result.nbytes, stream)

        self.submit(target.gpu, work)

    # Work under way

    def allocate_host(self, gpu: Gpu | None, size: int) -> NDArray[np.uint8]:
        """Memory of the host; pinned where a GPU is to read or write it."""
        if gpu is None:
            return np.empty(size, np.uint8)
        memory = gpu.pinned.acquire(size)
        self._pinned.append((gpu, memory))
        return memory[:size]

    def submit(self, gpu: Gpu, work: Work, check: Callable[[], object] | None = None) -> None:
        self._launches.append((gpu, gpu.submit(work, self._on_launch_done, check=check)))

    def finish_submission(self) -> None:
        """Say that nothing more of this task will be submitted."""
        if self.context.completion_event is not None:
            self.context.completion_event.add_launches([launch for _, launch in self._launches])

    def wait_all(self) -> Iterator[Wait]:
        """Wait until nothing is under way any more. An error is raised at once, for others may wait for it."""
        while pending := [launch for _, launch in self._launches if not launch.done]:
            if any(launch.error is not None for _, launch in self._launches):
                break
            yield [(launch, 0) for launch in pending]
        for gpu, launch in self._launches:
            if isinstance(launch.error, NcclError):
                raise launch.error
            if launch.error is not None:
                if not isinstance(launch.error, CudaError) or not is_out_of_memory(launch.error):
                    gpu.declare_lost(str(launch.error))
                raise launch.error
        self._launches.clear()

    def stop(self) -> None:
        """Begin nothing more. Work under way goes on: a GPU on which it does not end is given up."""
        for gpu, launch in self._launches:
            launch.cancel()
            if not launch.has_ended:
                gpu.enforce_timeout(launch)
        self._is_stopped = True
        self._release_memory()
        if not self._has_ended:
            frames = self.context.transport.frames
            self.context.tools.deferred_releases.add((frames.generation, frames.instance), self)

    @property
    def has_ended(self) -> bool:
        """Whether no GPU reads or writes any of it any more, once it was stopped."""
        return self._has_ended

    def _on_launch_done(self) -> None:
        """From the threads of GPUs: something has ended, or has failed."""
        self._release_memory()
        self.context.tools.wake()

    def _release_memory(self) -> None:
        """Release intermediate memory as soon as the last GPU is done. The first thread that finds it done does so."""
        with self._release_lock:
            if not self._is_stopped or self._has_ended or not all(launch.has_ended for _, launch in self._launches):
                return
            self._has_ended = True
        for gpu, memory in self._pinned:
            gpu.pinned.release(memory)
        for gpu, region in self._scratch:
            gpu.scratch.release(region)


def make_fold_spec(how: Arithmetic, *, widen: bool = False, finish: bool = False) -> FoldSpec:
    """One step of folding, as a kernel does it."""
    return FoldSpec(how.operation, how.dtype, how.result_dtype, how.contributions, widen, finish)


def _find_gpu(ranks: Sequence[Sequence[Piece]], outputs: Sequence[Region]) -> Gpu | None:
    memory = [*outputs, *(piece.memory for pieces in ranks for piece in pieces)]
    return next((one.gpu for one in memory if isinstance(one, Region)), None)


def _group_by_gpu(ranks: Sequence[Sequence[Piece]]) -> list[tuple[Gpu | None, list[Sequence[Piece]]]]:
    """Ranks that follow on each other, as many as one kernel takes, with the GPU on which their values lie; None: the
    host."""
    found: list[tuple[Gpu | None, list[Sequence[Piece]]]] = []
    for pieces in ranks:
        gpu = _find_gpu([pieces], ())
        if found and found[-1][0] is gpu and len(found[-1][1]) < MOST_SOURCES:
            found[-1][1].append(pieces)
        else:
            found.append((gpu, [pieces]))
    return found


def address_of(memory: HostOrGpuBytes) -> int:
    """The address of memory that lies on a GPU."""
    return _as_region(memory).address


def _as_region(memory: HostOrGpuBytes) -> Region:
    assert isinstance(memory, Region)
    return memory


def _as_host_array(memory: HostOrGpuBytes) -> NDArray[np.uint8]:
    assert not isinstance(memory, Region)
    return memory
