"""A task that NCCL carries out: what the ranks of a GPU contribute is folded there, and NCCL folds that of all GPUs.

The plan is run on memory of GPUs: each of its moves adds a step to the streams of this worker's GPUs. Then one
launch per GPU does all of it, one step behind the other: fold the ranks of this GPU, in rank order; all-reduce the
partial sums, or reduce them to the root's GPU; finish them into where ranks want their results. A broadcast is the same
without folds. Only values that lie elsewhere pass by the host. NCCL folds in an order of its own.

Closing a task does not wait for GPUs: the communicators are aborted, and what is under way lingers until that has
ended it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from collectived_proto.types import ReduceOp
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.gpus import Region
from collectived_runtime.device.nccl.interface import ElementLayout, NcclBuffers, NcclOperation, NcclRemoteError
from collectived_runtime.engine.base.poller import Timers
from collectived_runtime.engine.gpu.communicator import LaunchTurn, LocalCommunicator
from collectived_runtime.engine.gpu.contributions import GpuContribution, MultiGpuTask, issue_in_chunks, to_nccl
from collectived_runtime.engine.gpu.gpu_task import Array, make_fold_spec
from collectived_runtime.engine.run.schedule import Wait, execute
from collectived_runtime.engine.run.task import TaskContext
from collectived_runtime.plan.moves import Buffer, Span
from collectived_runtime.plan.wide_moves import NativeKind, NativeMove

GRACE_SECONDS = 1.0  # in which links that broke are reported


def with_grace_period(one: Iterator[Wait], timers: Timers) -> Iterator[Wait]:
    """Delay the error of a task by which NCCL says that a rank is gone: it does not say which, and links may."""
    try:
        yield from one
    except NcclRemoteError:
        grace = _Grace(time.monotonic() + GRACE_SECONDS)
        timers.wake_at(grace.until)
        while not grace.done:
            yield [(grace, 0)]
        raise


@dataclass(frozen=True, slots=True)
class _Grace:
    until: float

    @property
    def done(self) -> bool:
        return time.monotonic() >= self.until


def can_average_in_nccl(how: Arithmetic, one_rank_per_gpu: bool) -> bool:
    """Whether NCCL divides: where every GPU has one rank, and nothing is to be rounded afterwards."""
    return how.operation is ReduceOp.MEAN and one_rank_per_gpu and how.needs_no_widening and how.can_finish_in_place


class NativeFold(NamedTuple):
    """How NCCL folds partial sums, and whether what it leaves is the result as it is; `layout` is of one of them."""

    layout: ElementLayout
    operation: NcclOperation
    is_final: bool


def choose_native_fold(how: Arithmetic | None, itemsize: int, one_rank_per_gpu: bool) -> NativeFold:
    """The same for rows that are only moved, which are bytes."""
    layout, operation = to_nccl(how, itemsize)
    if how is None:
        return NativeFold(layout, operation, is_final=True)
    averages = can_average_in_nccl(how, one_rank_per_gpu)
    if operation is NcclOperation.AVERAGE and not averages:
        operation = NcclOperation.SUM
    return NativeFold(layout, operation, averages or (how.can_finish_in_place and how.operation is not ReduceOp.MEAN))


class NcclTask(MultiGpuTask):
    """A task of which NCCL carries out all between the GPUs of a group. It is launched when its turn has come.

    It is the memory of its plan: see `PlanMemory`.
    """

    def __init__(self, context: TaskContext, communicator: LocalCommunicator, turn: LaunchTurn) -> None:
        super().__init__(context, communicator)
        self._turn = turn
        how = self.arithmetic
        fold = choose_native_fold(how, self.task.pack.dtype.itemsize, communicator.has_one_rank_per_gpu)
        self._layout, self._operation = fold.layout, fold.operation
        # NCCL leaves the result itself in SCRATCH: both are the same memory.
        self._is_final = how is not None and fold.is_final

    def carry_out(self) -> Iterator[Wait]:
        yield from self.prepare()
        while not self._turn.done:
            yield [(self._turn, 0)]
        yield from execute(self.task.plan, self, self.context.transport)
        host_result = self._add_delivery()
        self.submit_to_all([share.run_steps for share in self.contributions])
        if host_result is None:  # else it remains to be handed out
            self.finish_submission()
        self._turn.order.mark_launched()
        yield from self.wait_all()
        if host_result is not None:
            yield from self._deliver_host_result(*host_result)

    def run_native(self, move: NativeMove) -> Iterator[Wait]:
        """Adds NCCL's collective to the steps of every GPU of this worker."""
        yield from ()  # all of it is launched later
        root = move.members.index(move.root)  # members are the ranks of the communicator, in order
        for share in self.contributions:
            if move.kind is NativeKind.BROADCAST:
                self._add_broadcast(share, root)
            else:
                self._add_reduction(share, None if move.kind is NativeKind.ALL_REDUCE else root)

    def _add_broadcast(self, share: GpuContribution, root: int) -> None:
        if share.output is None:
            wanted = self.select_outputs(share)
            share.output = wanted[0].address if wanted else self.allocate_scratch(share.gpu, self.nbytes).address
        nccl = share.communicator.nccl

        def call(buffers: NcclBuffers, handle: int, stream: int) -> None:
            nccl.broadcast(buffers, root, handle, stream)

        self._add_collective(share, share.output, share.output, call)

    def _add_reduction(self, share: GpuContribution, root: int | None) -> None:
        """The fold of all GPUs; `root`: whose scratch alone it is left in."""
        holds, wanted = root is None or share.rank == root, self.select_outputs(share)
        send, fold = self.prepare_contribution(share)
        if self._is_final and wanted:
            receive = wanted[0].address
        elif fold is not None or not holds:  # memory of our own, or NCCL writes nothing
            receive = send
        else:
            receive = self.allocate_scratch(share.gpu, self.nbytes).address
        share.scratch = receive if holds else None
        nccl, op = share.communicator.nccl, self._operation

        def call(buffers: NcclBuffers, handle: int, stream: int) -> None:
            if root is None:
                nccl.all_reduce(buffers, op, handle, stream)
            else:
                nccl.reduce(buffers, op, root, handle, stream)

        if fold is not None:
            share.steps.append(fold)
        self._add_collective(share, send, receive, call)

    def _add_collective(
        self, share: GpuContribution, send: int, receive: int, call: Callable[[NcclBuffers, int, int], None]
    ) -> None:
        dtype, width = self._layout

        def step(stream: int) -> None:
            def issue(at: int, count: int, handle: int) -> None:
                call(NcclBuffers(send + at, receive + at, count, dtype), handle, stream)

            issue_in_chunks(share.communicator, len(self.task.span) * width, self.row_bytes // width, issue)

        share.steps.append(step)

    def apply_finish(self, source: Buffer, span: Span) -> None:
        """Makes the result of what NCCL has folded, or of the one value that is moved."""
        if source is Buffer.INPUT:
            for share in self.contributions:
                if share.parts:
                    share.output, fold = self.prepare_contribution(share)
                    share.steps += [fold] if fold is not None else []
            return
        for share in self.contributions:
            if share.scratch is not None:
                self._add_finish(share, share.scratch)

    def _add_finish(self, share: GpuContribution, scratch: int) -> None:
        how, wanted = self.arithmetic, self.select_outputs(share)
        if self._is_final:
            share.output = scratch
            return
        assert how is not None, "a value that is moved has no scratch"
        output = wanted[0].address if wanted else self.allocate_scratch(share.gpu, self.result_bytes).address
        spec, cuda, count = make_fold_spec(how, finish=True), share.gpu.cuda, len(self.task.span)
        share.output = output
        share.steps.append(lambda stream: cuda.fold(spec, [scratch], [output], count, stream))

    def _add_delivery(self) -> tuple[Array, list[Region]] | None:
        """Adds copies to all that want the result on a GPU that has it.

        Returns the memory of the host where it will lie for all others, with the regions of GPUs among them.
        """
        holders = [share for share in self.contributions if share.output is not None]
        gpus = [share.gpu for share in holders]
        elsewhere = [output for output in self.context.outputs if output.gpu not in gpus]
        for share in holders:
            for target in self.select_outputs(share):
                self._add_copy(share, target.address)
        if self.context.result is None and not elsewhere:
            return None
        host = self.allocate_host(holders[0].gpu, self.result_bytes)
        self._add_copy(holders[0], host.ctypes.data)
        return host, elsewhere

    def _add_copy(self, share: GpuContribution, target: int) -> None:
        output, cuda = share.output, share.gpu.cuda
        if output is not None and output != target:
            share.steps.append(lambda stream: cuda.copy(target, output, self.result_bytes, stream))

    def _deliver_host_result(self, found: Array, elsewhere: Sequence[Region]) -> Iterator[Wait]:
        """To ranks that read the result on the host, or on a GPU that has not got it."""
        result = self.context.result
        if result is not None:
            start = self.task.pack.result_offset + self.task.span.start * self.task.pack.result_dtype.itemsize
            np.copyto(result[start : start + len(found)], found)
        for output in elsewhere:
            self.copy_to_gpu(found, self.slice_output(output))
        self.finish_submission()
        yield from self.wait_all()
