"""A task that cuts a leaf apart or joins leaves, of which NCCL carries out all between the GPUs of a group.

The calls of each GPU are planned (`compile/gpu_rows.py`): NCCL sees one rank per GPU, and rows in the order of GPUs. So
a GPU puts the contributions of its ranks into that order, or folds it into that order, where it does not lie so
already; NCCL brings the rows of other GPUs; and the result of each rank is copied to it, but where NCCL has written
that itself. Only values and results that lie elsewhere pass by the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from collectived_proto.ipc.result_header import Pieces
from collectived_proto.types import AllGather, ReduceScatter
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.gpus import Region
from collectived_runtime.device.nccl.interface import MOST_ELEMENTS, NcclBlock, NcclBuffers, split_count
from collectived_runtime.engine.compile.gpu_rows import GpuRows, RowsCall, RowsCallKind
from collectived_runtime.engine.compile.partition import Partition, Window, find_single_run, merge_ranges
from collectived_runtime.engine.gpu.communicator import LaunchTurn, LocalCommunicator
from collectived_runtime.engine.gpu.contributions import GpuContribution, MultiGpuTask
from collectived_runtime.engine.gpu.gpu_task import make_fold_spec
from collectived_runtime.engine.gpu.nccl_task import choose_native_fold
from collectived_runtime.engine.gpu.rows_task import locate_leaves
from collectived_runtime.engine.run.host_task import copy_in_stretches
from collectived_runtime.engine.run.schedule import Wait
from collectived_runtime.engine.run.task import TaskContext

Call = Callable[[int, int], None]  # of NCCL, given a communicator and a stream


class NcclRowsTask(MultiGpuTask):
    """See the module. It is launched when its turn has come."""

    def __init__(self, context: TaskContext, communicator: LocalCommunicator, turn: LaunchTurn) -> None:
        super().__init__(context, communicator)
        self._turn = turn
        pack = context.task.pack
        self._native = choose_native_fold(self.arithmetic, pack.dtype.itemsize, communicator.has_one_rank_per_gpu)
        self._targets = {rank: leaves[context.task.pack_number] for rank, leaves in context.rows_outputs.items()}
        self._size, self._result_size = pack.dtype.itemsize, pack.result_dtype.itemsize
        self._on_host: list[tuple[Partition, list[int], NDArray[np.uint8]]] = []  # results of a GPU, for those ranks

    def carry_out(self) -> Iterator[Wait]:
        pairs = list(zip(self.contributions, self.task.gpu_rows, strict=True))
        leaves: dict[int, int] = {}
        for share, rows in pairs:
            yield from self._bring_leaves(share, rows, leaves)
        yield from self.wait_all()
        for share, rows in pairs:
            self._add_rows(share, rows, leaves)
        while not self._turn.done:
            yield [(self._turn, 0)]
        self.submit_to_all([share.run_steps for share in self.contributions])
        if not self._on_host:  # else it remains to be handed out
            self.finish_submission()
        self._turn.order.mark_launched()
        yield from self.wait_all()
        if self._on_host:
            yield from self._deliver_from_host()

    def _bring_leaves(self, share: GpuContribution, rows: GpuRows, leaves: dict[int, int]) -> Iterator[Wait]:
        """Find the address of each leaf on the GPU of its rank; a leaf elsewhere is copied there, in time."""
        contributed = locate_leaves(self.context)
        for rank in rows.ranks:
            memory = contributed[rank]
            if self.arithmetic is None:
                self.context.tools.counters.copied_bytes += len(memory)
            else:
                self.context.tools.counters.folded_bytes += len(memory)
            if isinstance(memory, Region) and memory.gpu is share.gpu:
                leaves[rank] = memory.address
                continue
            nbytes, host = len(memory), self.allocate_host(share.gpu, len(memory))
            leaves[rank] = self.allocate_scratch(share.gpu, nbytes).address
            if isinstance(memory, Region):
                if nbytes:
                    self.fetch(memory, host)
            else:
                yield from copy_in_stretches(memory, host)
            self._add_copy(share, leaves[rank], host.ctypes.data, nbytes)

    def _add_copy(self, share: GpuContribution, target: int, source: int, nbytes: int) -> None:
        if nbytes and target != source:
            share.steps.append(partial(share.gpu.cuda.copy, target, source, nbytes))

    def _add_rows(self, share: GpuContribution, rows: GpuRows, leaves: Mapping[int, int]) -> None:
        cut, operation = rows.cut, self.context.program.collective.operation
        if cut.output_count:
            share.output = self._find_whole_target(share, cut)
            if share.output is None:
                share.output = self.allocate_scratch(share.gpu, cut.output_count * self._result_size).address
        output = share.output or 0
        if isinstance(operation, AllGather):
            self._add_gather(share, rows, leaves, output)
        elif isinstance(operation, ReduceScatter):
            self._add_scatter(share, rows, leaves, output)
        else:
            self._add_exchange(share, rows, leaves, output)
        self._add_delivery(share, cut, output)

    def _find_whole_target(self, share: GpuContribution, cut: Partition) -> int | None:
        """The address where a rank of this GPU wants just what this GPU receives, in this order."""
        whole = ((0, cut.output_count // cut.width),)
        found = (target for rank, target in self._targets.items() if cut.pieces.get(rank) == whole)
        return next((target.address for target in found if target.gpu is share.gpu), None)

    # NCCL's work, and the work before it

    def _add_gather(self, share: GpuContribution, rows: GpuRows, leaves: Mapping[int, int], output: int) -> None:
        cut, size, nccl = rows.cut, self._size, share.communicator.nccl
        own = merge_ranges(cut.local_copies)
        send = output + cut.shares[share.rank].start * size
        if len(own) == 1:  # NCCL puts it in its place
            send = leaves[own[0].rank] + own[0].start * size
        else:
            for part in own:
                source = leaves[part.rank] + part.start * size
                self._add_copy(share, output + part.target * size, source, (part.stop - part.start) * size)
        calls: list[Call] = []
        for call in rows.calls:
            if call.kind is RowsCallKind.ALL_GATHER:
                buffers = self._make_buffers(send, output, len(call.span))
                calls.append(partial(nccl.all_gather, buffers))
                continue
            at = output + call.span.start * size
            source = send if call.peer == share.rank else at
            calls += [
                partial(nccl.broadcast, buffers, call.peer)
                for buffers in self._split_buffers(share, source, at, len(call.span), size)
            ]
        self._add_calls(share, calls)

    def _add_scatter(self, share: GpuContribution, rows: GpuRows, leaves: Mapping[int, int], output: int) -> None:
        how, cut, nccl, native = self.arithmetic, rows.cut, share.communicator.nccl, self._native
        assert how is not None, "a reduce_scatter folds"
        if not rows.calls:
            return
        row, own = self.row_bytes, cut.shares[share.rank]
        send, is_ours = self._add_local_fold(share, how, rows, leaves)
        if native.is_final and len(own):
            receive = output
        elif is_ours:
            receive = send + own.start * row
        else:
            receive = self.allocate_scratch(share.gpu, len(own) * row).address
        calls: list[Call] = []
        for call in rows.calls:
            if call.kind is RowsCallKind.REDUCE_SCATTER:
                buffers = self._make_buffers(send, receive, len(call.span))
                calls.append(partial(nccl.reduce_scatter, buffers, native.operation))
                continue
            at = send + call.span.start * row
            into = receive if call.peer == share.rank else at  # where it is not the root NCCL writes nothing
            calls += [
                partial(nccl.reduce, buffers, native.operation, call.peer)
                for buffers in self._split_buffers(share, at, into, len(call.span), row)
            ]
        self._add_calls(share, calls)
        if not native.is_final and len(own):
            spec = make_fold_spec(how, finish=True)
            share.steps.append(partial(share.gpu.cuda.fold, spec, [receive], [output], len(own)))

    def _add_local_fold(
        self, share: GpuContribution, how: Arithmetic, rows: GpuRows, leaves: Mapping[int, int]
    ) -> tuple[int, bool]:
        """Where the partial sums of a GPU's ranks lie in the order of GPUs, and whether that is memory of our own."""
        first = rows.ranks[0]
        parts = merge_ranges([part for part in rows.cut.outgoing if part.rank == first])  # all leaves are cut alike
        if len(rows.ranks) == 1 and how.needs_no_widening and all(part.start == part.target for part in parts):
            return leaves[first], False
        total = self.allocate_scratch(share.gpu, rows.cut.count * self.row_bytes).address
        spec = make_fold_spec(how, widen=True)
        for part in parts:
            sources = [leaves[rank] + part.start * self._size for rank in rows.ranks]
            into, count = total + part.target * self.row_bytes, part.stop - part.start
            share.steps.append(partial(share.gpu.cuda.fold, spec, sources, [into], count))
        return total, True

    def _add_exchange(self, share: GpuContribution, rows: GpuRows, leaves: Mapping[int, int], output: int) -> None:
        cut, size, nccl = rows.cut, self._size, share.communicator.nccl
        outgoing = merge_ranges(cut.outgoing)
        run, window = find_single_run(outgoing), cut.send_window
        if run is not None:
            send, window = leaves[run[0]], Window((run[1],))
        else:
            count = max((window.translate(part.target) + part.stop - part.start for part in outgoing), default=0)
            send = self.allocate_scratch(share.gpu, count * size).address if count else 0
            for part in outgoing:
                source = leaves[part.rank] + part.start * size
                into = send + window.translate(part.target) * size
                self._add_copy(share, into, source, (part.stop - part.start) * size)
        for part in merge_ranges(cut.local_copies):
            source = leaves[part.rank] + part.start * size
            self._add_copy(share, output + part.target * size, source, (part.stop - part.start) * size)
        calls: list[Call] = []
        for call in rows.calls:
            if call.kind is RowsCallKind.SEND:
                at, move = send + window.translate(call.span.start) * size, nccl.send
            else:
                at, move = output + cut.receive_window.translate(call.span.start) * size, nccl.recv
            calls += [partial(move, block, call.peer) for block in self._split_block(share, at, call)]
        self._add_calls(share, calls)

    def _make_buffers(self, send: int, receive: int, count: int) -> NcclBuffers:
        dtype, width = self._native.layout
        return NcclBuffers(send, receive, count * width, dtype)

    def _split_buffers(
        self, share: GpuContribution, send: int, receive: int, count: int, row: int
    ) -> list[NcclBuffers]:
        """In as many calls as it takes. `row` is the bytes of one of `count`."""
        dtype, width = self._native.layout
        most, step = min(share.communicator.nccl.capabilities.max_count, MOST_ELEMENTS), row // width
        parts = split_count(count * width, most)
        return [NcclBuffers(send + start * step, receive + start * step, length, dtype) for start, length in parts]

    def _split_block(self, share: GpuContribution, address: int, call: RowsCall) -> list[NcclBlock]:
        buffers = self._split_buffers(share, address, address, len(call.span), self._size)
        return [NcclBlock(one.send, one.elements, one.dtype) for one in buffers]

    def _add_calls(self, share: GpuContribution, calls: Sequence[Call]) -> None:
        """All of them go to the stream together."""
        nccl, communicator = share.communicator.nccl, share.communicator
        if not calls:
            return

        def issue(stream: int, handle: int) -> None:
            nccl.group_start()
            try:
                for call in calls:
                    call(handle, stream)
            finally:
                nccl.group_end()

        share.steps.append(lambda stream: communicator.issue(partial(issue, stream)))

    # Delivery

    def _add_delivery(self, share: GpuContribution, cut: Partition, output: int) -> None:
        """Add copies to the ranks of a GPU that want their result there; results of others are brought to the host."""
        away = []
        for rank, pieces in cut.pieces.items():
            target = self._targets.get(rank)
            if target is None or target.gpu is not share.gpu:
                away.append(rank)
                continue
            at = target.address
            for start, rows in pieces:
                nbytes = rows * cut.width * self._result_size
                self._add_copy(share, at, output + start * self._result_size, nbytes)
                at += nbytes
        if away:
            nbytes = cut.output_count * self._result_size
            host = self.allocate_host(share.gpu, nbytes)
            self._add_copy(share, host.ctypes.data, output, nbytes)
            self._on_host.append((cut, away, host))

    def _deliver_from_host(self) -> Iterator[Wait]:
        """To ranks that read their result on the host, or on another GPU than their own."""
        whole, result = self.task.partition, self.context.result
        assert whole is not None
        written: set[Pieces] = set()
        for cut, ranks, host in self._on_host:
            row = cut.width * self._result_size
            for rank in ranks:
                runs = [host[at * self._result_size :][: rows * row] for at, rows in cut.pieces[rank]]
                mine = np.concatenate(runs) if runs else host[:0]
                target = self._targets.get(rank)
                if target is not None:
                    if len(mine):
                        self.copy_to_gpu(mine, target)
                elif result is not None and whole.pieces[rank] not in written:
                    written.add(whole.pieces[rank])  # ranks of an all_gather read the same
                    slot, at = result[self.task.result_slice], 0
                    for start, rows in whole.pieces[rank]:
                        into = slot[start * self._result_size :][: rows * row]
                        yield from copy_in_stretches(mine[at : at + len(into)], into)
                        at += len(into)
        self.finish_submission()
        yield from self.wait_all()
