"""Contributions of a worker's GPUs to a collective of NCCL: each folds the values of its own ranks, in rank order.

Values that do not lie on their rank's GPU are brought to the host first, and from there to that GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.cuda.kernels import MOST_SOURCES
from collectived_runtime.device.gpus import Gpu, Region
from collectived_runtime.device.launch_thread import Work
from collectived_runtime.device.nccl.communicators import Communicator
from collectived_runtime.device.nccl.interface import (
    MOST_ELEMENTS,
    ElementLayout,
    NcclDataType,
    NcclOperation,
    element_layout,
    nccl_operation,
    split_count,
)
from collectived_runtime.engine.gpu.communicator import LocalCommunicator
from collectived_runtime.engine.gpu.gpu_task import Array, GpuTask, Piece, address_of, make_fold_spec
from collectived_runtime.engine.run.schedule import Wait
from collectived_runtime.engine.run.task import TaskContext


@dataclass(slots=True)
class GpuContribution:
    """The part of one GPU of this worker in a task.

    Attributes:
        rank: of the communicator.
        parts: of its ranks, in their order: a value that lies there, or partial sums that come from the host.
        scratch: the address of the fold of all GPUs; None where NCCL leaves none here.
        output: the address of the result; None where there is none here.
        steps: what its stream does, one thing behind the other.
    """

    gpu: Gpu
    communicator: Communicator
    rank: int
    parts: list[Sequence[Piece] | Array] = field(default_factory=list)
    scratch: int | None = None
    output: int | None = None
    steps: list[Work] = field(default_factory=list)

    def run_steps(self, stream: int) -> None:
        for step in self.steps:
            step(stream)


class MultiGpuTask(GpuTask):
    """A task in which the GPUs of this worker take part, each with its contribution.

    Where it does not succeed the communicators are aborted, which ends what waits for others.
    """

    def __init__(self, context: TaskContext, communicator: LocalCommunicator) -> None:
        super().__init__(context)
        self._local_communicator = communicator
        pairs = zip(communicator.ranks, communicator.communicators, strict=True)
        gpus = communicator.nccl_context.gpus
        self.contributions = tuple(GpuContribution(gpus[one.device], made, one.rank) for one, made in pairs)
        how = self.arithmetic
        self.row_bytes = self.task.pack.dtype.itemsize if how is None else how.partial_bytes
        self.nbytes = len(self.task.span) * self.row_bytes

    @property
    def result_bytes(self) -> int:
        return len(self.task.span) * self.task.pack.result_dtype.itemsize

    def prepare(self) -> Iterator[Wait]:
        """Decides which GPU folds what; values that lie elsewhere are fetched."""
        ranks = self.split_contributions()
        self.count_bytes(ranks)
        by_gpu = {one.gpu.index: one for one in self.contributions}
        for rank, pieces in zip(self.context.program.contributors, ranks, strict=True):
            share, how = by_gpu[self._local_communicator.topology.gpu_indices[rank]], self.arithmetic
            if all(isinstance(piece.memory, Region) and piece.memory.gpu is share.gpu for piece in pieces):
                share.parts.append(pieces)
            elif how is None:
                share.parts.append((yield from self.copy_to_host(share.gpu, pieces)))
            else:
                share.parts.append((yield from self.fold_to_host(share.gpu, how, [pieces])))

    def prepare_contribution(self, share: GpuContribution) -> tuple[int, Work | None]:
        """Where a GPU has what its ranks contribute, and the work that puts it there; None: it is a rank's own."""
        lying = self._find_direct_address(share)
        if lying is not None:
            return lying, None
        total = spare = self.allocate_scratch(share.gpu, self.nbytes).address
        if len(_group_runs(share.parts)) > 1:
            spare = self.allocate_scratch(share.gpu, self.nbytes).address
        return total, partial(self._fold, share, total, spare)

    def _find_direct_address(self, share: GpuContribution) -> int | None:
        """The address of the partial sums where they need not be made: one rank, one piece, no wider than it is."""
        how = self.arithmetic
        if len(share.parts) != 1 or not (how is None or how.needs_no_widening):
            return None
        (pieces,) = share.parts
        if isinstance(pieces, np.ndarray) or len(pieces) != 1 or len(pieces[0].memory) != self.nbytes:
            return None
        return address_of(pieces[0].memory)

    def _fold(self, share: GpuContribution, total: int, spare: int, stream: int) -> None:
        """total = what the ranks of this GPU contribute: values of ranks that follow on each other by one kernel."""
        cuda, how = share.gpu.cuda, self.arithmetic
        for number, run in enumerate(_group_runs(share.parts)):
            into = spare if number else total
            if isinstance(run, np.ndarray):
                cuda.copy(into, run.ctypes.data, self.nbytes, stream)
            else:
                self._fold_pieces(share.gpu, run, into, stream)
            if number:
                assert how is not None, "a value that is moved has one rank that contributes"
                cuda.fold(make_fold_spec(how), [total, spare], [total], len(self.task.span), stream)

    def _fold_pieces(self, gpu: Gpu, ranks: Sequence[Sequence[Piece]], into: int, stream: int) -> None:
        first, size, how = self.task.span.start, self.row_bytes, self.arithmetic
        for together in zip(*ranks, strict=True):
            addresses = [address_of(piece.memory) for piece in together]
            start, length = together[0].start, together[0].stop - together[0].start
            target = into + (start - first) * size
            if how is None:
                gpu.cuda.copy(target, addresses[0], length * size, stream)
            else:
                gpu.cuda.fold(make_fold_spec(how, widen=True), addresses, [target], length, stream)

    def select_outputs(self, share: GpuContribution) -> list[Region]:
        """Where on this GPU the result is to be."""
        return [self.slice_output(output) for output in self.context.outputs if output.gpu is share.gpu]

    def submit_to_all(self, works: Sequence[Work]) -> None:
        """Gives every GPU its part under the lock. All memory is there by then: the whole worker waits for the lock."""
        with self._local_communicator.nccl_context.launch_lock:
            for share, work in zip(self.contributions, works, strict=True):
                self.submit(share.gpu, work, share.communicator.check)

    def allocate_scratch(self, gpu: Gpu, size: int) -> Region:
        """Memory of a GPU, until this task has ended."""
        region = gpu.scratch.acquire(size)
        self._scratch.append((gpu, region))
        return region

    def stop(self) -> None:
        if not self.has_succeeded:
            self._local_communicator.abort()
        super().stop()


def to_nccl(how: Arithmetic | None, itemsize: int) -> tuple[ElementLayout, NcclOperation]:
    """NCCL's type for a row, and its operation; rows that are only moved are bytes."""
    if how is None:
        return (NcclDataType.UINT8, itemsize), NcclOperation.SUM
    found, op = element_layout(how), nccl_operation(how.operation)
    assert found is not None and op is not None, "the program had NCCL carry out what it has no name for"
    return found, op


def issue_in_chunks(communicator: Communicator, count: int, size: int, call: Callable[[int, int, int], None]) -> None:
    """call(byte offset, elements, handle) of `count` elements of `size` bytes, in as many calls as it takes."""
    most = min(communicator.nccl.capabilities.max_count, MOST_ELEMENTS)
    for start, length in split_count(count, most):
        communicator.issue(partial(call, start * size, length))


def _group_runs(parts: Sequence[Sequence[Piece] | Array]) -> list[list[Sequence[Piece]] | Array]:
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
