"""A strand whose values lie in the memory of GPUs: folded there first, carried between workers by the host.

Where all that contribute and receive are on one GPU of one worker, one kernel does it all. Else ranks that follow on
each other on one GPU are folded there, in rank order; the partial sums come into pinned memory of the host, are
folded there in the order of their ranks, so that the lower one is always left, and the plan runs on them as it does
for values of the host. The result is copied to where each rank wants it. While one strand is copied, others are on
the wire: a pack of a group with GPUs is cut into several.

A generator like `strand.run`, but closing it does not wait for GPUs: what they are at lingers, and keeps its memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_proto.numpy_types import to_numpy
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.cuda.driver import CudaError, Fold
from collectived_runtime.device.cuda.kernels import MOST_SOURCES
from collectived_runtime.device.gpus import Gpu, Region, out_of_memory
from collectived_runtime.device.launching import Launch, Work
from collectived_runtime.device.nccl.interface import NcclError
from collectived_runtime.engine.cutting import Window
from collectived_runtime.engine.execute import Buffers, Judge, execute
from collectived_runtime.engine.ledger import Mark
from collectived_runtime.engine.program import Program, Strand
from collectived_runtime.engine.recorder import FOLD, MOST_MOVES
from collectived_runtime.engine.results import Exhausted
from collectived_runtime.engine.seat import Bytes, Sources
from collectived_runtime.engine.strand import Tools, Wait, copied, copy_over, never, spread, stays
from collectived_runtime.engine.stream_order import Finale
from collectived_runtime.plan.moves import Buffer
from collectived_runtime.transport.frame import Stamp
from collectived_runtime.transport.link import Link

Array = NDArray[Any]


def run(
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
        outputs: where the result is to be written, one per rank that wants it there.
        finale: is told when all that remains of the strand has been submitted to GPUs.
        result: the result slot of the ranks that read it on the host, if there are any.
        sources, tools, links, stamp, judge, marks: as of `strand.run`.

    Raises:
        Exhausted: there is no memory for what lies in between.
        CudaError: a GPU has failed.
    """
    one = DeviceStrand(program, strand, tools, finale)
    try:
        gpu = None if result is not None or not program.alone else _the_one(one.pieces(sources), outputs)
        if gpu is not None:
            yield from one.on_one_gpu(gpu, sources, outputs)
            return
        began = time.monotonic()
        buffers = yield from one.brought(sources, outputs, result)
        if marks is not None and len(marks) < MOST_MOVES:
            marks.append((FOLD, strand.pack_number, strand.shard, 0, -1, began, time.monotonic()))
        yield from execute(strand.plan, buffers, links, stamp, judge, marks)
        if buffers.output is not None:
            yield from one.delivered(buffers.part(Buffer.OUTPUT, strand.span), outputs)
        else:
            one.launched()
    except CudaError as error:
        if out_of_memory(error):
            raise Exhausted(f"on a GPU of this worker: {error}") from error
        raise
    finally:
        one.stop(stamp)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank contributes to elements [start, stop) of the pack."""

    start: int
    stop: int
    memory: Bytes


def _the_one(ranks: Sequence[Sequence[Piece]], outputs: Sequence[Region]) -> Gpu | None:
    """The GPU on which all of it lies, if that is so."""
    memory = [piece.memory for pieces in ranks for piece in pieces] + list(outputs)
    gpus = {one.gpu if isinstance(one, Region) else None for one in memory}
    return gpus.pop() if len(gpus) == 1 and outputs and 0 < len(ranks) <= MOST_SOURCES else None


@dataclass(slots=True)
class DeviceStrand:
    """One strand under way, with what its GPUs are at and the memory that they use meanwhile."""

    program: Program
    strand: Strand
    tools: Tools
    finale: Finale | None = None
    _launches: list[tuple[Gpu, Launch]] = field(default_factory=list)
    _pinned: list[tuple[Gpu, NDArray[np.uint8]]] = field(default_factory=list)
    _scratch: list[tuple[Gpu, Region]] = field(default_factory=list)
    _stopped: bool = False
    _over: bool = False
    _giving: threading.Lock = field(default_factory=threading.Lock)

    @property
    def arithmetic(self) -> Arithmetic | None:
        return self.program.arithmetic[self.strand.pack_number]

    def pieces(self, sources: Sequence[Sources]) -> list[list[Piece]]:
        """What each rank contributes to this strand, cut at the same places for all."""
        itemsize, span = self.strand.pack.dtype.itemsize, self.strand.span
        parts = [source.parts(self.strand.pack_number) for source in sources]
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

    def on_one_gpu(self, gpu: Gpu, sources: Sequence[Sources], outputs: Sequence[Region]) -> Iterator[Wait]:
        """The result is written once by a kernel, and copied from there."""
        pack, span, how = self.strand.pack, self.strand.span, self.arithmetic
        size, ranks, cuda = pack.result_dtype.itemsize, self.pieces(sources), gpu.cuda
        targets = [output[pack.result_offset :] for output in outputs]
        first = targets[0]

        def work(stream: int) -> None:
            for together in zip(*ranks, strict=True):
                start, count = together[0].start, together[0].stop - together[0].start
                addresses = [address_of(piece.memory) for piece in together]
                if how is None:
                    cuda.copy(first.address + start * size, addresses[0], count * size, stream)
                else:
                    fold = fold_of(how, widen=True, finish=True)
                    cuda.fold(fold, addresses, first.address + start * size, count, stream)
            for target in targets[1:]:
                cuda.copy(
                    target.address + span.start * size, first.address + span.start * size, len(span) * size, stream
                )

        self.count(ranks)
        self.submit(gpu, work)
        self.launched()
        yield from self.all_done()

    def count(self, ranks: Sequence[Sequence[Piece]]) -> None:
        nbytes = sum(len(piece.memory) for pieces in ranks for piece in pieces)
        if self.arithmetic is None:
            self.tools.counters.copied_bytes += nbytes
        else:
            self.tools.counters.folded_bytes += nbytes

    # By way of the host

    def brought(
        self, sources: Sequence[Sources], outputs: Sequence[Region], result: NDArray[np.uint8] | None
    ) -> Generator[Wait, None, Buffers]:
        """What the plan works on, in memory of the host."""
        ranks = self.pieces(sources)
        gpu, how = _some_gpu(ranks, outputs), self.arithmetic
        output, windows = self.room(gpu, outputs, result)
        self.count(ranks)
        if how is None:
            if not sources:  # it comes over the links, to where the result is
                assert output is not None
                windows = dict.fromkeys(windows, windows[Buffer.INPUT]) if Buffer.OUTPUT in windows else {}
                return Buffers(output, output, output, never, copy_over, stays, windows)
            (pieces,) = ranks
            mine = yield from self.moved(gpu, pieces)
            return Buffers(mine, mine, output, never, copy_over, stays, windows)
        partials = yield from self.folded(gpu, how, ranks)
        return Buffers(partials, partials, output, how.fold, how.finish, how.finish_here, windows)

    def room(
        self, gpu: Gpu | None, outputs: Sequence[Region], result: NDArray[np.uint8] | None
    ) -> tuple[Array | None, dict[Buffer, Window]]:
        """Where a plan leaves the result on the host, if it is wanted here, and where its buffers begin."""
        pack, span = self.strand.pack, self.strand.span
        window, dtype = Window(offsets=(-span.start,)), to_numpy(pack.result_dtype)
        windows = {Buffer.INPUT: window, Buffer.SCRATCH: window}  # they hold this strand's span alone
        if result is not None:
            end = pack.result_offset + pack.count * dtype.itemsize
            return result[pack.result_offset : end].view(dtype), windows
        if not outputs:
            return None, windows
        windows[Buffer.OUTPUT] = window
        return self.host(gpu, len(span) * dtype.itemsize).view(dtype), windows

    def moved(self, gpu: Gpu | None, pieces: Sequence[Piece]) -> Generator[Wait, None, Array]:
        """What the one rank that contributes has."""
        itemsize, start = self.strand.pack.dtype.itemsize, self.strand.span.start
        mine = self.host(gpu, len(self.strand.span) * itemsize)
        for piece in pieces:
            into = mine[(piece.start - start) * itemsize : (piece.stop - start) * itemsize]
            if isinstance(piece.memory, Region):
                self._fetch(piece.memory, into)
            else:
                yield from copied(_on_host(piece.memory), into)
        yield from self.all_done()
        return mine.view(to_numpy(self.strand.pack.dtype))

    def folded(
        self, gpu: Gpu | None, how: Arithmetic, ranks: Sequence[Sequence[Piece]]
    ) -> Generator[Wait, None, Array]:
        """The partial sums of these ranks, on the host."""
        count = len(self.strand.span)
        found: list[Array] = []
        for place, group in _by_place(ranks):
            partials = how.partials(self.host(place or gpu, count * how.partial_bytes), count)
            found.append(partials)
            if place is None:
                yield from self._gathered(how, group, partials)
            else:
                self._gather_there(place, how, group, partials)
        yield from self.all_done()

        def fold(pair: list[Array], out: Array) -> None:
            how.fold(pair[0], pair[1], out)

        total = found[0]
        for other in found[1:]:
            yield from spread(fold, how.partial_bytes, [total, other], total, self.tools)
        return total

    def _gathered(self, how: Arithmetic, group: Sequence[Sequence[Piece]], partials: Array) -> Iterator[Wait]:
        """Of ranks whose values lie on the host."""
        dtype, start = to_numpy(self.strand.pack.dtype), self.strand.span.start
        for together in zip(*group, strict=True):
            arrays = [_on_host(piece.memory).view(dtype) for piece in together]
            into = partials[together[0].start - start : together[0].stop - start]
            yield from spread(how.gather, how.partial_bytes, arrays, into, self.tools)

    def _gather_there(self, gpu: Gpu, how: Arithmetic, group: Sequence[Sequence[Piece]], partials: Array) -> None:
        """Of ranks of one GPU, by that GPU."""
        if len(group) == 1 and how.direct:  # its elements are partial sums as they are
            start, size = self.strand.span.start, how.partial_bytes
            into = partials.view(np.uint8)
            for piece in group[0]:
                self._fetch(_on_gpu(piece.memory), into[(piece.start - start) * size : (piece.stop - start) * size])
            return
        scratch = gpu.scratch.take(partials.nbytes)
        self._scratch.append((gpu, scratch))
        fold, first, size, cuda = (
            fold_of(how, widen=True),
            self.strand.span.start,
            how.partial_bytes,
            gpu.cuda,
        )
        to, nbytes = partials.ctypes.data, partials.nbytes

        def work(stream: int) -> None:
            for together in zip(*group, strict=True):
                addresses = [address_of(piece.memory) for piece in together]
                start, count = together[0].start, together[0].stop - together[0].start
                cuda.fold(fold, addresses, scratch.address + (start - first) * size, count, stream)
            cuda.copy(to, scratch.address, nbytes, stream)

        self.submit(gpu, work)

    def _fetch(self, source: Region, into: NDArray[np.uint8]) -> None:
        target = into.ctypes.data
        self.submit(source.gpu, lambda stream: source.gpu.cuda.copy(target, source.address, len(source), stream))

    def delivered(self, result: Array, outputs: Sequence[Region]) -> Iterator[Wait]:
        """The result of this strand, to wherever it is wanted."""
        pack = self.strand.pack
        start = pack.result_offset + self.strand.span.start * pack.result_dtype.itemsize
        for output in outputs:
            self.send(result, output[start : start + result.nbytes])
        self.launched()
        yield from self.all_done()

    def send(self, result: Array, target: Region) -> None:
        """Copies from the host."""

        def work(stream: int) -> None:  # keeps both, whatever becomes of the strand
            target.gpu.cuda.copy(target.address, result.ctypes.data, result.nbytes, stream)

        self.submit(target.gpu, work)

    # What is under way

    def host(self, gpu: Gpu | None, size: int) -> NDArray[np.uint8]:
        """Memory of the host; pinned where a GPU is to read or write it."""
        if gpu is None:
            return np.empty(size, np.uint8)
        memory = gpu.pinned.take(size)
        self._pinned.append((gpu, memory))
        return memory[:size]

    def submit(self, gpu: Gpu, work: Work, check: Callable[[], object] | None = None) -> None:
        self._launches.append((gpu, gpu.submit(work, self._progress, check=check)))

    def launched(self) -> None:
        """Nothing more of this strand will be submitted."""
        if self.finale is not None:
            self.finale.launched([launch for _, launch in self._launches])

    def all_done(self) -> Iterator[Wait]:
        """Ends when nothing is under way any more; what fails is raised at once, for others may wait for it."""
        while pending := [launch for _, launch in self._launches if not launch.done]:
            if any(launch.failed is not None for _, launch in self._launches):
                break
            yield [(launch, 0) for launch in pending]
        for gpu, launch in self._launches:
            if isinstance(launch.failed, NcclError):
                raise launch.failed
            if launch.failed is not None:
                if not isinstance(launch.failed, CudaError) or not out_of_memory(launch.failed):
                    gpu.give_up(str(launch.failed))
                raise launch.failed
        self._launches.clear()

    def stop(self, stamp: Stamp) -> None:
        """Nothing more of it begins. What is under way lingers: a GPU on which it does not end is given up."""
        for gpu, launch in self._launches:
            launch.stop()
            if not launch.ended:
                gpu.bound(launch)
        self._stopped = True
        self._give_back()
        if not self._over:
            self.tools.lingering.add((stamp.generation, stamp.instance), self)

    @property
    def over(self) -> bool:
        """Whether no GPU reads or writes any of it any more, once it was stopped."""
        return self._over

    def _progress(self) -> None:
        """From the threads of GPUs: something has ended, or has failed."""
        self._give_back()
        self.tools.wake()

    def _give_back(self) -> None:
        """What served in between serves again as soon as the last GPU is done; whoever finds that first does it."""
        with self._giving:
            if not self._stopped or self._over or not all(launch.ended for _, launch in self._launches):
                return
            self._over = True
        for gpu, memory in self._pinned:
            gpu.pinned.give(memory)
        for gpu, region in self._scratch:
            gpu.scratch.give(region)


def fold_of(how: Arithmetic, *, widen: bool = False, finish: bool = False) -> Fold:
    """One step of folding, as a kernel does it."""
    return Fold(how.operation, how.dtype, how.result, how.contributions, widen, finish)


def _some_gpu(ranks: Sequence[Sequence[Piece]], outputs: Sequence[Region]) -> Gpu | None:
    memory = [*outputs, *(piece.memory for pieces in ranks for piece in pieces)]
    return next((one.gpu for one in memory if isinstance(one, Region)), None)


def _by_place(ranks: Sequence[Sequence[Piece]]) -> list[tuple[Gpu | None, list[Sequence[Piece]]]]:
    """Ranks that follow on each other, as many as one kernel takes, with the GPU on which their values lie; None: the
    host."""
    found: list[tuple[Gpu | None, list[Sequence[Piece]]]] = []
    for pieces in ranks:
        gpu = _some_gpu([pieces], ())
        if found and found[-1][0] is gpu and len(found[-1][1]) < MOST_SOURCES:
            found[-1][1].append(pieces)
        else:
            found.append((gpu, [pieces]))
    return found


def address_of(memory: Bytes) -> int:
    """Of memory that lies on a GPU."""
    return _on_gpu(memory).address


def _on_gpu(memory: Bytes) -> Region:
    assert isinstance(memory, Region)
    return memory


def _on_host(memory: Bytes) -> NDArray[np.uint8]:
    assert not isinstance(memory, Region)
    return memory
