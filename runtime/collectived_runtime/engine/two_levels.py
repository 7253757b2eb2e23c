"""A strand of two levels: NCCL inside of a worker with several GPUs, a flat algorithm of the host between workers.

On this worker each GPU folds what its own ranks contribute, and NCCL reduces that to the first of them; from there it
comes into pinned memory, and the plan runs on it as it does for values of the host. The first GPU gets the result back,
and NCCL broadcasts it to the others that want it. Other workers need not do it so: each brings one vector.

No other worker waits for a kernel of this one, so no ticket is needed: it is enough that all GPUs of this worker are
given their parts together.

A generator like `strand.run`, but closing it does not wait for GPUs: what they are at lingers.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from collectived_runtime.device.cuda.driver import CudaError
from collectived_runtime.device.gpus import Region, out_of_memory
from collectived_runtime.device.launching import Work
from collectived_runtime.device.nccl.interface import DataType, Operation
from collectived_runtime.engine.device_strand import Array
from collectived_runtime.engine.execute import Buffers, Judge, execute
from collectived_runtime.engine.ledger import Mark
from collectived_runtime.engine.meeting import Meeting
from collectived_runtime.engine.program import Program, Strand
from collectived_runtime.engine.recorder import FOLD, MOST_MOVES
from collectived_runtime.engine.results import Exhausted
from collectived_runtime.engine.seat import Sources
from collectived_runtime.engine.shares import Share, SharedStrand, in_nccl, issue
from collectived_runtime.engine.strand import Tools, Wait
from collectived_runtime.engine.stream_order import Finale
from collectived_runtime.plan.moves import Buffer
from collectived_runtime.transport.frame import Stamp
from collectived_runtime.transport.link import Link

FIRST = 0  # rank of the GPU that speaks for the worker


def run(
    meeting: Meeting,
    outputs: Sequence[Region],
    finale: Finale | None,
    program: Program,
    strand: Strand,
    sources: Sequence[Sources],
    result: NDArray[np.uint8] | None,
    tools: Tools,
    links: Mapping[int, Link],
    stamp: Stamp,
    judge: Judge,
    marks: list[Mark] | None = None,
) -> Iterator[Wait]:
    """Runs a strand.

    Args:
        meeting: of this worker's GPUs alone.
        outputs, finale, result: as of `device_strand.run`. All others are as of `strand.run`.

    Raises:
        Exhausted: there is no memory for what lies in between.
        CudaError: a GPU has failed. NcclError: NCCL has.
    """
    one = _TwoLevels(program, strand, tools, finale, meeting)
    try:
        began = time.monotonic()
        yield from one.prepared(sources)
        buffers = yield from one.reduced(outputs, result)
        if marks is not None and len(marks) < MOST_MOVES:
            marks.append((FOLD, strand.pack_number, strand.shard, 0, -1, began, time.monotonic()))
        yield from execute(strand.plan, buffers, links, stamp, judge, marks)
        if buffers.output is not None:
            yield from one.spread(buffers.part(Buffer.OUTPUT, strand.span), outputs)
        one.well = True
    except CudaError as error:
        if out_of_memory(error):
            raise Exhausted(f"on a GPU of this worker: {error}") from error
        raise
    finally:
        one.stop(stamp)


class _TwoLevels(SharedStrand):
    def __init__(self, program: Program, strand: Strand, tools: Tools, finale: Finale | None, meeting: Meeting) -> None:
        super().__init__(program, strand, tools, finale, meeting.shares(), meeting.home, meeting.abort)
        self._together = meeting.engine.together

    def reduced(self, outputs: Sequence[Region], result: NDArray[np.uint8] | None) -> Generator[Wait, None, Buffers]:
        """What this worker contributes, on the host."""
        gpu, how = self.shares[FIRST].gpu, self.arithmetic
        assert how is not None, "an all-reduce folds"
        output, windows = self.room(gpu, outputs, result)
        total = self.host(gpu, self.nbytes)
        self.submit_together(self._together, [self._reduction(share, total) for share in self.shares])
        yield from self.all_done()
        partials = how.partials(total, len(self.strand.span))
        return Buffers(partials, partials, output, how.fold, how.finish, how.finish_here, windows)

    def _reduction(self, share: Share, total: Array) -> Work:
        (dtype, width), op = in_nccl(self.arithmetic, self.row_bytes)
        op = Operation.SUM if op is Operation.AVERAGE else op  # the plan divides, when all workers are in
        send, fold = self.contributed(share)
        first = share.rank == FIRST
        receive = self.scratch(share.gpu, self.nbytes).address if first and fold is None else send
        communicator, cuda, nbytes = share.communicator, share.gpu.cuda, self.nbytes
        host = total.ctypes.data

        def work(stream: int) -> None:
            if fold is not None:
                fold(stream)

            def call(at: int, count: int, handle: int) -> None:
                communicator.nccl.reduce(send + at, receive + at, count, dtype, op, FIRST, handle, stream)

            issue(communicator, len(self.strand.span) * width, self.row_bytes // width, call)
            if first:
                cuda.copy(host, receive, nbytes, stream)

        return work

    def spread(self, result: Array, outputs: Sequence[Region]) -> Iterator[Wait]:
        """The result, from the host to wherever on GPUs it is wanted."""
        first, *others = self.shares
        gpus = [share.gpu for share in self.shares]
        for output in outputs:
            if output.gpu not in gpus:
                self.send(result, self.part(output))
        if any(self.wanted(share, outputs) for share in others):
            works = [self._broadcast(share, self.wanted(share, outputs), result) for share in self.shares]
            self.submit_together(self._together, works)
        else:
            for target in self.wanted(first, outputs):
                self.send(result, target)
        self.launched()
        yield from self.all_done()

    def _broadcast(self, share: Share, wanted: Sequence[Region], result: Array) -> Work:
        nbytes, communicator, cuda = self.result_bytes, share.communicator, share.gpu.cuda
        at = wanted[0].address if wanted else self.scratch(share.gpu, nbytes).address

        def work(stream: int) -> None:
            if share.rank == FIRST:
                cuda.copy(at, result.ctypes.data, nbytes, stream)

            def call(offset: int, count: int, handle: int) -> None:
                communicator.nccl.broadcast(at + offset, at + offset, count, DataType.UINT8, FIRST, handle, stream)

            issue(communicator, nbytes, 1, call)
            for other in wanted[1:]:
                cuda.copy(other.address, at, nbytes, stream)

        return work
