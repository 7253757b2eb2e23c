"""A task that NCCL carries out: what the ranks of a GPU contribute is folded there, and NCCL folds that of all GPUs.

One launch per GPU does all of it, one thing behind the other on its stream: fold the ranks of this GPU, in rank order;
all-reduce the partial sums, or reduce them to the root's GPU; finish them into where ranks want their results. A
broadcast is the same without folds. Only values that lie elsewhere pass by the host. What NCCL folds, it folds in an
order of its own.

A generator like `task.run`, but closing it does not wait for GPUs: the communicators are aborted, and what is
under way lingers until that has ended it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from collectived_proto.types import Broadcast, Reduce, ReduceOp
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.cuda.driver import CudaError
from collectived_runtime.device.gpus import Gpu, Region, is_out_of_memory
from collectived_runtime.device.launch_thread import Work
from collectived_runtime.device.nccl.communicators import Communicator
from collectived_runtime.device.nccl.interface import NcclOperation, NcclRemoteError
from collectived_runtime.engine.base.arenas import MemoryExhausted
from collectived_runtime.engine.base.poller import Timers
from collectived_runtime.engine.clients.local_rank import InputBuffers
from collectived_runtime.engine.compile.program import CompiledCollective, PackTask
from collectived_runtime.engine.gpu.communicator import LaunchOrder, LocalCommunicator
from collectived_runtime.engine.gpu.contributions import GpuContribution, MultiGpuTask, issue_in_chunks, to_nccl
from collectived_runtime.engine.gpu.gpu_task import Array, make_fold_spec
from collectived_runtime.engine.gpu.stream_order import CompletionEvent
from collectived_runtime.engine.run.host_task import TaskTools, Wait
from collectived_runtime.engine.run.schedule import OnUnexpectedFrame
from collectived_runtime.engine.submit.tracker import Mark
from collectived_runtime.transport.frame import FrameTemplate
from collectived_runtime.transport.link import Link

GRACE_SECONDS = 1.0  # in which links that broke are reported


def run(
    meeting: LocalCommunicator,
    order: LaunchOrder,
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
    """Runs a task when its turn has come.

    Args:
        order: of the tasks of this instance.
        outputs: where the result is to be written, one per rank that wants it there.
        result: the result slot of the ranks that read it on the host, if there are any.
        finale: as of `device_strand.run`. sources, tools: as of `task.run`; what else is given is not needed here.

    Raises:
        MemoryExhausted: there is no memory for what lies in between.
        CudaError: a GPU has failed. NcclError: NCCL has.
    """
    one = _NcclTask(program, task, tools, finale, meeting)
    numbers = [other for other in program.tasks if other.algorithm == task.algorithm]
    try:
        yield from one.prepare(sources)
        turn = order.create_turn(numbers.index(task))
        while not turn.done:
            yield [(turn, 0)]
        one.launch(outputs, result is not None)
        order.mark_launched()
        yield from one.wait_all()
        yield from one.deliver_host_result(outputs, result)
        one.has_succeeded = True
    except CudaError as error:
        if is_out_of_memory(error):
            raise MemoryExhausted(f"on a GPU of this worker: {error}") from error
        raise
    finally:
        one.stop(stamp)


def with_grace_period(one: Iterator[Wait], alarms: Timers) -> Iterator[Wait]:
    """Where NCCL says that a rank is gone, it does not say which: for a moment those are waited for who know."""
    try:
        yield from one
    except NcclRemoteError:
        grace = _Grace(time.monotonic() + GRACE_SECONDS)
        alarms.wake_at(grace.until)
        while not grace.done:
            yield [(grace, 0)]
        raise


@dataclass(frozen=True, slots=True)
class _Grace:
    until: float

    @property
    def done(self) -> bool:
        return time.monotonic() >= self.until


def can_average_in_nccl(how: Arithmetic, single: bool) -> bool:
    """Whether NCCL divides: where every GPU has one rank, and nothing is to be rounded afterwards."""
    return how.operation is ReduceOp.MEAN and single and how.needs_no_widening and how.can_finish_in_place


class _NcclTask(MultiGpuTask):
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
        how = self.arithmetic
        self._elements, self._op = to_nccl(how, task.pack.dtype.itemsize)
        averages_ = how is not None and can_average_in_nccl(how, meeting.has_one_rank_per_gpu)
        if self._op is NcclOperation.AVERAGE and not averages_:
            self._op = NcclOperation.SUM
        self._is_output_final = (
            how is None or averages_ or (how.can_finish_in_place and how.operation is not ReduceOp.MEAN)
        )
        operation = program.collective.operation
        self._root = meeting.communicator_rank_of(operation.root) if isinstance(operation, (Reduce, Broadcast)) else -1
        self._is_broadcast = isinstance(operation, Broadcast)
        self._holders = [
            one for one in self.gpu_contributions if not isinstance(operation, Reduce) or one.rank == self._root
        ]
        self._host_result: Array | None = None

    def launch(self, outputs: Sequence[Region], on_host: bool) -> None:
        """Gives every GPU its part."""
        on_host = on_host or bool(self._outputs_elsewhere(outputs))
        works = []
        for share in self.gpu_contributions:
            hands_out = on_host and share is self._holders[0]
            works.append(self._work(share, self.select_outputs(share, outputs), hands_out))
        self.submit_to_all(self._launch_lock, works)
        if self._host_result is None:  # else it remains to be handed out
            self.finish_submission()

    def _work(self, share: GpuContribution, wanted: Sequence[Region], hands_out: bool) -> Work:
        """One launch. What it needs is taken here, and given back when it has ended."""
        gpu, how, count, holds = share.gpu, self.arithmetic, len(self.task.span), share in self._holders
        fold: Work | None = None
        send: int | None = None
        if not self._is_broadcast or share.rank == self._root:
            send, fold = self.prepare_contribution(share)
        if self._is_output_final and wanted:
            receive = wanted[0].address
        elif send is not None and (fold is not None or not holds):  # of our own, or NCCL writes nothing
            receive = send
        else:
            receive = self.allocate_scratch(gpu, self.nbytes).address
        source = receive if send is None else send
        host = self._allocate_host_result(gpu) if hands_out else None
        result = receive if self._is_output_final else None
        if result is None and (wanted or hands_out):
            result = wanted[0].address if wanted else self.allocate_scratch(gpu, self.result_bytes).address

        def work(stream: int) -> None:
            if fold is not None:
                fold(stream)
            self._issue_collective(share.communicator, source, receive, stream)
            if result is None or not holds:
                return
            if not self._is_output_final:
                assert how is not None
                gpu.cuda.fold(make_fold_spec(how, finish=True), [receive], result, count, stream)
            for other in wanted[1:]:
                gpu.cuda.copy(other.address, result, self.result_bytes, stream)
            if host is not None:
                gpu.cuda.copy(host, result, self.result_bytes, stream)

        return work

    def _allocate_host_result(self, gpu: Gpu) -> int:
        """Where the result is to be read by the host."""
        self._host_result = self.allocate_host(gpu, self.result_bytes)
        return int(self._host_result.ctypes.data)

    def _issue_collective(self, communicator: Communicator, send: int, receive: int, stream: int) -> None:
        dtype, width = self._elements
        nccl, op, root = communicator.nccl, self._op, self._root

        def call(at: int, count: int, handle: int) -> None:
            if self._is_broadcast:
                nccl.broadcast(send + at, receive + at, count, dtype, root, handle, stream)
            elif root >= 0:
                nccl.reduce(send + at, receive + at, count, dtype, op, root, handle, stream)
            else:
                nccl.all_reduce(send + at, receive + at, count, dtype, op, handle, stream)

        issue_in_chunks(communicator, len(self.task.span) * width, self.row_bytes // width, call)

    def deliver_host_result(self, outputs: Sequence[Region], result: NDArray[np.uint8] | None) -> Iterator[Wait]:
        """To ranks that read the result on the host, or on a GPU that has not got it."""
        found = self._host_result
        if found is None:
            return
        if result is not None:
            start = self.task.pack.result_offset + self.task.span.start * self.task.pack.result_dtype.itemsize
            np.copyto(result[start : start + len(found)], found)
        for output in self._outputs_elsewhere(outputs):
            target, copy = self.slice_output(output).address, output.gpu.cuda.copy
            self.submit(output.gpu, partial(copy, target, found.ctypes.data, len(found)))
        self.finish_submission()
        yield from self.wait_all()

    def _outputs_elsewhere(self, outputs: Sequence[Region]) -> list[Region]:
        gpus = [share.gpu for share in self._holders]
        return [output for output in outputs if output.gpu not in gpus]
