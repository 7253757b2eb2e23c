"""A task of two levels: NCCL inside of a worker with several GPUs, a flat algorithm of the host between workers.

The plan says so: NCCL reduces what the GPUs of this worker contribute to the first of them, and the result comes into
pinned memory; rounds between workers go on from there as for values of the host; at the end NCCL broadcasts the result
from the first GPU to the others that want it. Other workers need not do it so: each brings one vector.

No other worker waits for a kernel of this one, so no ticket is needed: it is enough that all GPUs of this worker are
given their parts together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from collectived_runtime.device.gpus import Region
from collectived_runtime.device.launch_thread import Work
from collectived_runtime.device.nccl.interface import NcclBuffers, NcclDataType, NcclOperation
from collectived_runtime.engine.gpu.contributions import GpuContribution, MultiGpuTask, issue_in_chunks, to_nccl
from collectived_runtime.engine.gpu.gpu_task import Array
from collectived_runtime.engine.run.schedule import Buffers, Wait, execute
from collectived_runtime.plan.moves import Buffer
from collectived_runtime.plan.wide_moves import NativeKind, NativeMove


class HierarchicalTask(MultiGpuTask):
    """A task of which NCCL carries out what is between the GPUs of this worker, given their communicator."""

    def carry_out(self) -> Iterator[Wait]:
        how = self.arithmetic
        assert how is not None, "an all-reduce folds"
        began = time.monotonic()
        yield from self.prepare()
        leader = self.contributions[0].gpu
        output, windows = self.allocate_output(leader)
        assert output is not None, "every rank receives the result of an all-reduce"
        total = self.allocate_host(leader, self.nbytes)
        partials = how.view_partials(total, len(self.task.span))

        def run_native(move: NativeMove) -> Iterator[Wait]:
            root = move.members.index(move.root)  # members are the ranks of the communicator, in order
            if move.kind is NativeKind.REDUCE:
                yield from self._reduce(root, total)
                self.context.mark_fold(began)
            else:
                yield from self._broadcast(root, buffers.view(Buffer.OUTPUT, move.span))

        buffers = Buffers(partials, partials, output, how.fold, how.finish, how.finish_in_place, windows, run_native)
        yield from execute(self.task.plan, buffers, self.context.transport)

    def _reduce(self, root: int, total: Array) -> Iterator[Wait]:
        """Fold what this worker contributes into `total`, by way of the root's GPU."""
        self.submit_to_all([self._make_reduction(share, root, total) for share in self.contributions])
        yield from self.wait_all()

    def _make_reduction(self, share: GpuContribution, root: int, total: Array) -> Work:
        (dtype, width), op = to_nccl(self.arithmetic, self.row_bytes)
        op = NcclOperation.SUM if op is NcclOperation.AVERAGE else op  # the plan divides, when all workers are in
        send, fold = self.prepare_contribution(share)
        is_root = share.rank == root
        receive = self.allocate_scratch(share.gpu, self.nbytes).address if is_root and fold is None else send
        communicator, cuda, nbytes = share.communicator, share.gpu.cuda, self.nbytes
        host = total.ctypes.data

        def work(stream: int) -> None:
            if fold is not None:
                fold(stream)

            def call(at: int, count: int, handle: int) -> None:
                buffers = NcclBuffers(send + at, receive + at, count, dtype)
                communicator.nccl.reduce(buffers, op, root, handle, stream)

            issue_in_chunks(communicator, len(self.task.span) * width, self.row_bytes // width, call)
            if is_root:
                cuda.copy(host, receive, nbytes, stream)

        return work

    def _broadcast(self, root: int, result: Array) -> Iterator[Wait]:
        """Copy the result from the host to wherever it is wanted, by NCCL where a GPU beside the root's wants it."""
        gpus = [share.gpu for share in self.contributions]
        others = [output for output in self.context.outputs if output.gpu not in gpus]
        wanted = [self.select_outputs(share) for share in self.contributions]
        if any(targets for share, targets in zip(self.contributions, wanted, strict=True) if share.rank != root):
            pairs = zip(self.contributions, wanted, strict=True)
            works = [self._make_broadcast(share, root, targets, result) for share, targets in pairs]
            self.submit_to_all(works)
        else:
            others = list(self.context.outputs)
        for output in others:
            self.copy_to_gpu(result, self.slice_output(output))
        self.finish_submission()
        yield from self.wait_all()

    def _make_broadcast(self, share: GpuContribution, root: int, wanted: Sequence[Region], result: Array) -> Work:
        nbytes, communicator, cuda = self.result_bytes, share.communicator, share.gpu.cuda
        at = wanted[0].address if wanted else self.allocate_scratch(share.gpu, nbytes).address

        def work(stream: int) -> None:
            if share.rank == root:
                cuda.copy(at, result.ctypes.data, nbytes, stream)

            def call(offset: int, count: int, handle: int) -> None:
                buffers = NcclBuffers(at + offset, at + offset, count, NcclDataType.UINT8)
                communicator.nccl.broadcast(buffers, root, handle, stream)

            issue_in_chunks(communicator, nbytes, 1, call)
            for other in wanted[1:]:
                cuda.copy(other.address, at, nbytes, stream)

        return work
