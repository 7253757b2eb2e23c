"""A strand that NCCL carries out: what the ranks of a GPU contribute is folded there, and NCCL folds that of all GPUs.

One launch per GPU does all of it, one thing behind the other on its stream: fold the ranks of this GPU, in rank order;
all-reduce the partial sums, or reduce them to the root's GPU; finish them into where ranks want their results. A
broadcast is the same without folds. Only values that lie elsewhere pass by the host. What NCCL folds, it folds in an
order of its own.

A generator like `strand.run`, but closing it does not wait for GPUs: the communicators are aborted, and what is
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
from collectived_runtime.device.gpus import Gpu, Region, out_of_memory
from collectived_runtime.device.launching import Work
from collectived_runtime.device.nccl.communicators import Communicator
from collectived_runtime.device.nccl.interface import NcclRemoteError, Operation
from collectived_runtime.engine.alarms import Alarms
from collectived_runtime.engine.device_strand import Array, fold_of
from collectived_runtime.engine.execute import Judge
from collectived_runtime.engine.ledger import Mark
from collectived_runtime.engine.meeting import LaunchOrder, Meeting
from collectived_runtime.engine.program import Program, Strand
from collectived_runtime.engine.results import Exhausted
from collectived_runtime.engine.seat import Sources
from collectived_runtime.engine.shares import Share, SharedStrand, in_nccl, issue
from collectived_runtime.engine.strand import Tools, Wait
from collectived_runtime.engine.stream_order import Finale
from collectived_runtime.transport.frame import Stamp
from collectived_runtime.transport.link import Link

GRACE_SECONDS = 1.0  # in which links that broke are reported


def run(
    meeting: Meeting,
    order: LaunchOrder,
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
    """Runs a strand when its turn has come.

    Args:
        order: of the strands of this instance.
        outputs: where the result is to be written, one per rank that wants it there.
        result: the result slot of the ranks that read it on the host, if there are any.
        finale: as of `device_strand.run`. sources, tools: as of `strand.run`; what else is given is not needed here.

    Raises:
        Exhausted: there is no memory for what lies in between.
        CudaError: a GPU has failed. NcclError: NCCL has.
    """
    one = _NativeStrand(program, strand, tools, finale, meeting)
    numbers = [other for other in program.strands if other.algorithm == strand.algorithm]
    try:
        yield from one.prepared(sources)
        turn = order.turn(numbers.index(strand))
        while not turn.done:
            yield [(turn, 0)]
        one.launch(outputs, result is not None)
        order.launched()
        yield from one.all_done()
        yield from one.handed_out(outputs, result)
        one.well = True
    except CudaError as error:
        if out_of_memory(error):
            raise Exhausted(f"on a GPU of this worker: {error}") from error
        raise
    finally:
        one.stop(stamp)


def patiently(one: Iterator[Wait], alarms: Alarms) -> Iterator[Wait]:
    """Where NCCL says that a rank is gone, it does not say which: for a moment those are waited for who know."""
    try:
        yield from one
    except NcclRemoteError:
        grace = _Grace(time.monotonic() + GRACE_SECONDS)
        alarms.at(grace.until)
        while not grace.done:
            yield [(grace, 0)]
        raise


@dataclass(frozen=True, slots=True)
class _Grace:
    until: float

    @property
    def done(self) -> bool:
        return time.monotonic() >= self.until


def averages(how: Arithmetic, single: bool) -> bool:
    """Whether NCCL divides: where every GPU has one rank, and nothing is to be rounded afterwards."""
    return how.operation is ReduceOp.MEAN and single and how.direct and how.in_place


class _NativeStrand(SharedStrand):
    def __init__(self, program: Program, strand: Strand, tools: Tools, finale: Finale | None, meeting: Meeting) -> None:
        super().__init__(program, strand, tools, finale, meeting.shares(), meeting.home, meeting.abort)
        self._together = meeting.engine.together
        how = self.arithmetic
        self._elements, self._op = in_nccl(how, strand.pack.dtype.itemsize)
        averages_ = how is not None and averages(how, meeting.single)
        if self._op is Operation.AVERAGE and not averages_:
            self._op = Operation.SUM
        self._as_it_is = how is None or averages_ or (how.in_place and how.operation is not ReduceOp.MEAN)
        operation = program.collective.operation
        self._root = meeting.number(operation.root) if isinstance(operation, (Reduce, Broadcast)) else -1
        self._moves = isinstance(operation, Broadcast)
        self._holding = [one for one in self.shares if not isinstance(operation, Reduce) or one.rank == self._root]
        self._on_host: Array | None = None

    def launch(self, outputs: Sequence[Region], on_host: bool) -> None:
        """Gives every GPU its part."""
        on_host = on_host or bool(self._elsewhere(outputs))
        works = []
        for share in self.shares:
            hands_out = on_host and share is self._holding[0]
            works.append(self._work(share, self.wanted(share, outputs), hands_out))
        self.submit_together(self._together, works)
        if self._on_host is None:  # else it remains to be handed out
            self.launched()

    def _work(self, share: Share, wanted: Sequence[Region], hands_out: bool) -> Work:
        """One launch. What it needs is taken here, and given back when it has ended."""
        gpu, how, count, holds = share.gpu, self.arithmetic, len(self.strand.span), share in self._holding
        fold: Work | None = None
        send: int | None = None
        if not self._moves or share.rank == self._root:
            send, fold = self.contributed(share)
        if self._as_it_is and wanted:
            receive = wanted[0].address
        elif send is not None and (fold is not None or not holds):  # of our own, or NCCL writes nothing
            receive = send
        else:
            receive = self.scratch(gpu, self.nbytes).address
        source = receive if send is None else send
        host = self._for_host(gpu) if hands_out else None
        result = receive if self._as_it_is else None
        if result is None and (wanted or hands_out):
            result = wanted[0].address if wanted else self.scratch(gpu, self.result_bytes).address

        def work(stream: int) -> None:
            if fold is not None:
                fold(stream)
            self._carried(share.communicator, source, receive, stream)
            if result is None or not holds:
                return
            if not self._as_it_is:
                assert how is not None
                gpu.cuda.fold(fold_of(how, finish=True), [receive], result, count, stream)
            for other in wanted[1:]:
                gpu.cuda.copy(other.address, result, self.result_bytes, stream)
            if host is not None:
                gpu.cuda.copy(host, result, self.result_bytes, stream)

        return work

    def _for_host(self, gpu: Gpu) -> int:
        """Where the result is to be read by the host."""
        self._on_host = self.host(gpu, self.result_bytes)
        return int(self._on_host.ctypes.data)

    def _carried(self, communicator: Communicator, send: int, receive: int, stream: int) -> None:
        dtype, width = self._elements
        nccl, op, root = communicator.nccl, self._op, self._root

        def call(at: int, count: int, handle: int) -> None:
            if self._moves:
                nccl.broadcast(send + at, receive + at, count, dtype, root, handle, stream)
            elif root >= 0:
                nccl.reduce(send + at, receive + at, count, dtype, op, root, handle, stream)
            else:
                nccl.all_reduce(send + at, receive + at, count, dtype, op, handle, stream)

        issue(communicator, len(self.strand.span) * width, self.row_bytes // width, call)

    def handed_out(self, outputs: Sequence[Region], result: NDArray[np.uint8] | None) -> Iterator[Wait]:
        """To ranks that read the result on the host, or on a GPU that has not got it."""
        found = self._on_host
        if found is None:
            return
        if result is not None:
            start = self.strand.pack.result_offset + self.strand.span.start * self.strand.pack.result_dtype.itemsize
            np.copyto(result[start : start + len(found)], found)
        for output in self._elsewhere(outputs):
            target, copy = self.part(output).address, output.gpu.cuda.copy
            self.submit(output.gpu, partial(copy, target, found.ctypes.data, len(found)))
        self.launched()
        yield from self.all_done()

    def _elsewhere(self, outputs: Sequence[Region]) -> list[Region]:
        gpus = [share.gpu for share in self._holding]
        return [output for output in outputs if output.gpu not in gpus]
