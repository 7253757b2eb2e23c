"""What the GPUs of a worker bring to a collective of NCCL: each folds what its own ranks have, in rank order.

Values that do not lie on their rank's GPU are brought to the host first, and from there to that GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.cuda.kernels import MOST_SOURCES
from collectived_runtime.device.gpus import Gpu, Region
from collectived_runtime.device.launching import Work
from collectived_runtime.device.nccl.communicators import Communicator
from collectived_runtime.device.nccl.interface import (
    DataType,
    Elements,
    Operation,
    elements,
    in_parts,
    operation,
)
from collectived_runtime.engine.device_strand import Array, DeviceStrand, Piece, address_of, fold_of
from collectived_runtime.engine.program import Program, Strand
from collectived_runtime.engine.seat import Sources
from collectived_runtime.engine.strand import Tools, Wait
from collectived_runtime.engine.stream_order import Finale
from collectived_runtime.transport.frame import Stamp


@dataclass(slots=True)
class Share:
    """What one GPU does.

    Attributes:
        rank: of the communicator.
        parts: of its ranks, in their order: a value that lies there, or partial sums that come from the host.
    """

    gpu: Gpu
    communicator: Communicator
    rank: int
    parts: list[Sequence[Piece] | Array] = field(default_factory=list)


class SharedStrand(DeviceStrand):
    """A strand in which the GPUs of this worker take part, each with its share.

    Args:
        home: the GPU of a local rank.
        abort: aborts the communicators, which ends what waits for others; called where the strand has not ended `well`.
    """

    def __init__(
        self,
        program: Program,
        strand: Strand,
        tools: Tools,
        finale: Finale | None,
        shares: Sequence[Share],
        home: Callable[[int], int],
        abort: Callable[[], object],
    ) -> None:
        super().__init__(program, strand, tools, finale)
        self.well = False
        self.shares = tuple(shares)
        self._home = home
        self._abort = abort
        how = self.arithmetic
        self.row_bytes = strand.pack.dtype.itemsize if how is None else how.partial_bytes
        self.nbytes = len(strand.span) * self.row_bytes

    @property
    def result_bytes(self) -> int:
        return len(self.strand.span) * self.strand.pack.result_dtype.itemsize

    def prepared(self, sources: Sequence[Sources]) -> Iterator[Wait]:
        """Says which GPU folds what."""
        ranks = self.pieces(sources)
        self.count(ranks)
        by_gpu = {share.gpu.index: share for share in self.shares}
        for rank, pieces in zip(self.program.sources, ranks, strict=True):
            share, how = by_gpu[self._home(rank)], self.arithmetic
            if all(isinstance(piece.memory, Region) and piece.memory.gpu is share.gpu for piece in pieces):
                share.parts.append(pieces)
            elif how is None:
                share.parts.append((yield from self.moved(share.gpu, pieces)))
            else:
                share.parts.append((yield from self.folded(share.gpu, how, [pieces])))

    def contributed(self, share: Share) -> tuple[int, Work | None]:
        """Where a GPU has what its ranks contribute, and the work that puts it there; None: it is a rank's own."""
        lying = self._lying(share)
        if lying is not None:
            return lying, None
        total = spare = self.scratch(share.gpu, self.nbytes).address
        if len(_runs(share.parts)) > 1:
            spare = self.scratch(share.gpu, self.nbytes).address
        return total, partial(self._fold, share, total, spare)

    def _lying(self, share: Share) -> int | None:
        """The address of the partial sums where they need not be made: one rank, one piece, no wider than it is."""
        how = self.arithmetic
        if len(share.parts) != 1 or not (how is None or how.direct):
            return None
        (pieces,) = share.parts
        if isinstance(pieces, np.ndarray) or len(pieces) != 1 or len(pieces[0].memory) != self.nbytes:
            return None
        return address_of(pieces[0].memory)

    def _fold(self, share: Share, total: int, spare: int, stream: int) -> None:
        """total = what the ranks of this GPU contribute: values of ranks that follow on each other by one kernel."""
        cuda, how = share.gpu.cuda, self.arithmetic
        for number, run in enumerate(_runs(share.parts)):
            into = spare if number else total
            if isinstance(run, np.ndarray):
                cuda.copy(into, run.ctypes.data, self.nbytes, stream)
            else:
                self._fold_there(share.gpu, run, into, stream)
            if number:
                assert how is not None, "what is moved has one rank that contributes"
                cuda.fold(fold_of(how), [total, spare], total, len(self.strand.span), stream)

    def _fold_there(self, gpu: Gpu, ranks: Sequence[Sequence[Piece]], into: int, stream: int) -> None:
        first, size, how = self.strand.span.start, self.row_bytes, self.arithmetic
        for together in zip(*ranks, strict=True):
            addresses = [address_of(piece.memory) for piece in together]
            start, length = together[0].start, together[0].stop - together[0].start
            target = into + (start - first) * size
            if how is None:
                gpu.cuda.copy(target, addresses[0], length * size, stream)
            else:
                gpu.cuda.fold(fold_of(how, widen=True), addresses, target, length, stream)

    def part(self, output: Region) -> Region:
        """Where the result of this strand lies in that of all."""
        pack, span = self.strand.pack, self.strand.span
        size = pack.result_dtype.itemsize
        return output[pack.result_offset + span.start * size : pack.result_offset + span.stop * size]

    def wanted(self, share: Share, outputs: Sequence[Region]) -> list[Region]:
        """Where on this GPU the result is to be."""
        return [self.part(output) for output in outputs if output.gpu is share.gpu]

    def submit_together(self, together: threading.Lock, works: Sequence[Work]) -> None:
        """Gives every GPU its part under the lock. All memory is there by then: the whole worker waits for the lock."""
        with together:
            for share, work in zip(self.shares, works, strict=True):
                self.submit(share.gpu, work, share.communicator.check)

    def scratch(self, gpu: Gpu, size: int) -> Region:
        """Memory of a GPU, until this strand has ended."""
        region = gpu.scratch.take(size)
        self._scratch.append((gpu, region))
        return region

    def stop(self, stamp: Stamp) -> None:
        if not self.well:
            self._abort()
        super().stop(stamp)


def in_nccl(how: Arithmetic | None, itemsize: int) -> tuple[Elements, Operation]:
    """What NCCL takes a row for, and how it folds it; rows that are only moved are bytes."""
    if how is None:
        return (DataType.UINT8, itemsize), Operation.SUM
    found, op = elements(how), operation(how.operation)
    assert found is not None and op is not None, "the program had NCCL carry out what it has no name for"
    return found, op


def issue(communicator: Communicator, count: int, size: int, call: Callable[[int, int, int], None]) -> None:
    """call(byte offset, elements, handle) of `count` elements of `size` bytes, in as many calls as it takes."""
    for start, length in in_parts(count, communicator.nccl.capabilities.max_count):
        communicator.issue(partial(call, start * size, length))


def _runs(parts: Sequence[Sequence[Piece] | Array]) -> list[list[Sequence[Piece]] | Array]:
    """Values that follow on each other, as many as one kernel takes, and partial sums by themselves."""
    found: list[list[Sequence[Piece]] | Array] = []
    for part in parts:
        if isinstance(part, np.ndarray):
            found.append(part)
        elif found and isinstance(found[-1], list) and len(found[-1]) < MOST_SOURCES:
            found[-1].append(part)
        else:
            found.append([part])
    return found
