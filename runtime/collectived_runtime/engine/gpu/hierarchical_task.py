"""A task of two levels: NCCL inside of a worker with several GPUs, a flat algorithm of the host between workers.

On this worker each GPU folds what its own ranks contribute, and NCCL reduces that to the first of them; from there it
comes into pinned memory, and the plan runs on it as it does for values of the host. The first GPU gets the result back,
and NCCL broadcasts it to the others that want it. Other workers need not do it so: each brings one vector.

No other worker waits for a kernel of this one, so no ticket is needed: it is enough that all GPUs of this worker are
given their parts together.

A generator like `task.run`, but closing it does not wait for GPUs: what they are at lingers.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from collectived_runtime.device.cuda.driver import CudaError
from collectived_runtime.device.gpus import Region, is_out_of_memory
from collectived_runtime.device.launch_thread import Work
from collectived_runtime.device.nccl.interface import NcclDataType, NcclOperation
from collectived_runtime.engine.base.arenas import MemoryExhausted
from collectived_runtime.engine.clients.local_rank import InputBuffers
from collectived_runtime.engine.compile.program import CompiledCollective, PackTask
from collectived_runtime.engine.gpu.communicator import LocalCommunicator
from collectived_runtime.engine.gpu.contributions import GpuContribution, MultiGpuTask, issue_in_chunks, to_nccl
from collectived_runtime.engine.gpu.gpu_task import Array
from collectived_runtime.engine.gpu.stream_order import CompletionEvent
from collectived_runtime.engine.record.flight_recorder import FOLD, MOST_MOVES
from collectived_runtime.engine.run.host_task import TaskTools, Wait
from collectived_runtime.engine.run.schedule import Buffers, OnUnexpectedFrame, execute
from collectived_runtime.engine.submit.tracker import Mark
from collectived_runtime.plan.moves import Buffer
from collectived_runtime.transport.frame import FrameTemplate
from collectived_runtime.transport.link import Link

LEADER_RANK = 0  # rank of the GPU that speaks for the worker


def run(
    meeting: LocalCommunicator,
    outputs: Sequence[Region],
    finale: CompletionEvent | None,
    program: CompiledCollective,
    task: PackTask,
    sources: Sequence[InputBuffers],
    result: NDArray[np.uint8] | None,
    tools: TaskTools,
    links: Mapping[int, Link],
    stamp: FrameTemplate,
    judge: OnUnexpectedFrame,
    marks: list[Mark] | None = None,
) -> Iterator[Wait]:
    """Runs a task.

    Args:
        meeting: of this worker's GPUs alone.
        outputs, finale, result: as of `device_strand.run`. All others are as of `task.run`.

    Raises:
        MemoryExhausted: there is no memory for what lies in between.
        CudaError: a GPU has failed. NcclError: NCCL has.
    """
    one = _HierarchicalTask(program, task, tools, finale, meeting)
    try:
        began = time.monotonic()
        yield from one.prepare(sources)
        buffers = yield from one.reduce_to_host(outputs, result)
        if marks is not None and len(marks) < MOST_MOVES:
            marks.append((FOLD, task.pack_number, task.shard, 0, -1, began, time.monotonic()))
        yield from execute(task.plan, buffers, links, stamp, judge, marks)
        if buffers.output is not None:
            yield from one.distribute_result(buffers.view(Buffer.OUTPUT, task.span), outputs)
        one.has_succeeded = True
    except CudaError as error:
        if is_out_of_memory(error):
            raise MemoryExhausted(f"on a GPU of this worker: {error}") from error
        raise
    finally:
        one.stop(stamp)


class _HierarchicalTask(MultiGpuTask):
    def __init__(
        self,
        program: CompiledCollective,
        task: PackTask,
        tools: TaskTools,
        finale: CompletionEvent | None,
        meeting: LocalCommunicator,
    ) -> None:
        super().__init__(
            program, task, tools, finale, meeting.create_contributions(), meeting.gpu_of_rank, meeting.abort
        )
        self._launch_lock = meeting.nccl_context.launch_lock

    def reduce_to_host(
        self, outputs: Sequence[Region], result: NDArray[np.uint8] | None
    ) -> Generator[Wait, None, Buffers]:
        """What this worker contributes, on the host."""
        gpu, how = self.gpu_contributions[LEADER_RANK].gpu, self.arithmetic
        assert how is not None, "an all-reduce folds"
        output, windows = self.allocate_output(gpu, outputs, result)
        total = self.allocate_host(gpu, self.nbytes)
        self.submit_to_all(self._launch_lock, [self._make_reduction(share, total) for share in self.gpu_contributions])
        yield from self.wait_all()
        partials = how.view_partials(total, len(self.task.span))
        return Buffers(partials, partials, output, how.fold, how.finish, how.finish_in_place, windows)

    def _make_reduction(self, share: GpuContribution, total: Array) -> Work:
        (dtype, width), op = to_nccl(self.arithmetic, self.row_bytes)
        op = NcclOperation.SUM if op is NcclOperation.AVERAGE else op  # the plan divides, when all workers are in
        send, fold = self.prepare_contribution(share)
        first = share.rank == LEADER_RANK
        receive = self.allocate_scratch(share.gpu, self.nbytes).address if first and fold is None else send
        communicator, cuda, nbytes = share.communicator, share.gpu.cuda, self.nbytes
        host = total.ctypes.data

        def work(stream: int) -> None:
            if fold is not None:
                fold(stream)

            def call(at: int, count: int, handle: int) -> None:
                communicator.nccl.reduce(send + at, receive + at, count, dtype, op, LEADER_RANK, handle, stream)

            issue_in_chunks(communicator, len(self.task.span) * width, self.row_bytes // width, call)
            if first:
                cuda.copy(host, receive, nbytes, stream)

        return work

    def distribute_result(self, result: Array, outputs: Sequence[Region]) -> Iterator[Wait]:
        """The result, from the host to wherever on GPUs it is wanted."""
        first, *others = self.gpu_contributions
        gpus = [share.gpu for share in self.gpu_contributions]
        for output in outputs:
            if output.gpu not in gpus:
                self.copy_to_gpu(result, self.slice_output(output))
        if any(self.select_outputs(share, outputs) for share in others):
            works = [
                self._make_broadcast(share, self.select_outputs(share, outputs), result)
                for share in self.gpu_contributions
            ]
            self.submit_to_all(self._launch_lock, works)
        else:
            for target in self.select_outputs(first, outputs):
                self.copy_to_gpu(result, target)
        self.finish_submission()
        yield from self.wait_all()

    def _make_broadcast(self, share: GpuContribution, wanted: Sequence[Region], result: Array) -> Work:
        nbytes, communicator, cuda = self.result_bytes, share.communicator, share.gpu.cuda
        at = wanted[0].address if wanted else self.allocate_scratch(share.gpu, nbytes).address

        def work(stream: int) -> None:
            if share.rank == LEADER_RANK:
                cuda.copy(at, result.ctypes.data, nbytes, stream)

            def call(offset: int, count: int, handle: int) -> None:
                communicator.nccl.broadcast(
                    at + offset, at + offset, count, NcclDataType.UINT8, LEADER_RANK, handle, stream
                )

            issue_in_chunks(communicator, nbytes, 1, call)
            for other in wanted[1:]:
                cuda.copy(other.address, at, nbytes, stream)

        return work
