"""A strand that NCCL carries out: what the ranks of a GPU contribute is folded there, and NCCL folds that of all GPUs.

One launch per GPU does all of it, one thing behind the other on its stream: fold the ranks of this GPU, in rank order;
all-reduce the partial sums; finish them into where ranks want their results. Only values that lie elsewhere pass by the
host. What NCCL folds, it folds in an order of its own.

A generator like `strand.run`: closing it returns when the GPUs neither read nor write for it any more, for which the
communicators are aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_proto.devices import DeviceName
from collectived_proto.types import ReduceOp
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.cuda.driver import CudaError
from collectived_runtime.device.cuda.kernels import MOST_SOURCES
from collectived_runtime.device.gpus import Gpu, Region, out_of_memory
from collectived_runtime.device.nccl.communicators import Communicator, Communicators, Rank
from collectived_runtime.device.nccl.interface import (
    Elements,
    NcclRemoteError,
    Operation,
    elements,
    in_parts,
    operation,
)
from collectived_runtime.engine.device_strand import DeviceStrand, Piece, address_of, fold_of
from collectived_runtime.engine.execute import Judge
from collectived_runtime.engine.ledger import Mark
from collectived_runtime.engine.program import Program, Strand, Topology
from collectived_runtime.engine.results import Exhausted
from collectived_runtime.engine.seat import Sources
from collectived_runtime.engine.strand import Tools, Wait
from collectived_runtime.engine.tickets import Key, Turnstile
from collectived_runtime.transport.frame import Stamp
from collectived_runtime.transport.link import Link

Array = NDArray[Any]
GRACE_SECONDS = 1.0  # in which links that broke are reported


@dataclass(frozen=True, slots=True)
class Engine:
    """What a worker carries collectives out with where NCCL does it. `gpus` are by index."""

    communicators: Communicators
    gpus: Mapping[int, Gpu]
    turnstile: Turnstile = field(default_factory=Turnstile)


def ranks_here(topology: Topology) -> list[Rank]:
    """This worker's part of the communicator of a group."""
    return [Rank(gpu, number) for number, (place, gpu) in enumerate(topology.gpus) if place == topology.place]


class Order:
    """Whose strands of one instance have been launched: they are launched in the order of the program, everywhere.

    Attributes:
        communicators: of the group, one per local GPU.
    """

    def __init__(self, key: Key, count: int, turnstile: Turnstile, wake: Callable[[], object]) -> None:
        self.key = key
        self._count = count
        self._turnstile = turnstile
        self._wake = wake
        self._launched = 0

    def place(self, number: int) -> Place:
        """What strand `number` of those that NCCL carries out waits for."""
        return Place(self, number)

    def next_is(self, number: int) -> bool:
        return self._launched == number

    def launched(self) -> None:
        """One more has been."""
        self._launched += 1
        if self._launched == self._count:
            self.close()
        self._wake()

    def close(self) -> None:
        """Nothing more of this instance will be launched."""
        self._turnstile.over(self.key)


@dataclass(frozen=True, slots=True)
class Place:
    """A strand's place in an `Order`. `done` when it may be launched."""

    order: Order
    number: int

    @property
    def done(self) -> bool:
        return self.order.next_is(self.number)


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the strands of an instance have in common here.

    Attributes:
        communicators: of the group, one per local GPU.
        single: whether every GPU of the group has one rank only.
        abort: aborts the communicators.
    """

    engine: Engine
    topology: Topology
    order: Order
    communicators: tuple[Communicator, ...]
    abort: Callable[[], object]

    @property
    def single(self) -> bool:
        return len(self.topology.gpus) == self.topology.group.size

    def home(self, rank: int) -> int:
        """The GPU of a local rank."""
        return DeviceName.parse(self.topology.group.members[rank].device).index


def run(
    meeting: Meeting,
    outputs: Sequence[Region],
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
        outputs: where the result is to be written, one per rank that wants it there.
        result: the result slot of the ranks that read it on the host, if there are any.
        sources, tools: as of `strand.run`; what else that is given is not needed here.

    Raises:
        Exhausted: there is no memory for what lies in between.
        CudaError: a GPU has failed. NcclError: NCCL has.
    """
    one = _NativeStrand(program, strand, tools, meeting)
    numbers = [other for other in program.strands if other.algorithm == strand.algorithm]
    try:
        yield from one.prepared(sources)
        place = meeting.order.place(numbers.index(strand))
        while not place.done:
            yield [(place, 0)]
        one.launch(outputs, result is not None)
        meeting.order.launched()
        yield from one.all_done()
        yield from one.handed_out(outputs, result)
        one.over = True
    except CudaError as error:
        if out_of_memory(error):
            raise Exhausted(f"on a GPU of this worker: {error}") from error
        raise
    finally:
        one.stop()


def patiently(one: Iterator[Wait], wake: Callable[[], object]) -> Iterator[Wait]:
    """Where NCCL says that a rank is gone, it does not say which: for a moment those are waited for who know."""
    try:
        yield from one
    except NcclRemoteError:
        grace = _Grace(wake)
        while not grace.done:
            yield [(grace, 0)]
        raise


class _Grace:
    def __init__(self, wake: Callable[[], object]) -> None:
        self.done = False
        self._wake = wake
        timer = threading.Timer(GRACE_SECONDS, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        self.done = True
        self._wake()


def averages(how: Arithmetic, single: bool) -> bool:
    """Whether NCCL divides: where every GPU has one rank, and nothing is to be rounded afterwards."""
    return how.operation is ReduceOp.MEAN and single and how.direct and how.in_place


@dataclass(slots=True)
class _Share:
    """What one GPU does. `own` are its ranks with their values there, `strays` partial sums that come from the host."""

    gpu: Gpu
    communicator: Communicator
    own: list[Sequence[Piece]] = field(default_factory=list)
    strays: list[Array] = field(default_factory=list)


class _NativeStrand(DeviceStrand):
    def __init__(self, program: Program, strand: Strand, tools: Tools, meeting: Meeting) -> None:
        super().__init__(program, strand, tools)
        self.over = False
        self._meeting = meeting
        how = program.arithmetic[strand.pack_number]
        assert how is not None
        self._how = how
        found, op = elements(how), operation(how.operation)
        assert found is not None and op is not None, "the program had NCCL carry out what it has no name for"
        self._elements: Elements = found
        self._averages = averages(how, meeting.single)
        self._op = op if self._averages or op is not Operation.AVERAGE else Operation.SUM
        self._as_it_is = self._averages or (how.in_place and how.operation is not ReduceOp.MEAN)
        self._nbytes = len(strand.span) * how.partial_bytes
        self._shares = {one.device: _Share(meeting.engine.gpus[one.device], one) for one in meeting.communicators}
        self._on_host: Array | None = None

    def prepared(self, sources: Sequence[Sources]) -> Iterator[Wait]:
        """Says which GPU folds what; values that are not on their rank's GPU are brought to the host first."""
        ranks = self.pieces(sources)
        self.count(ranks)
        for rank, pieces in zip(self.program.sources, ranks, strict=True):
            share = self._shares[self._meeting.home(rank)]
            if all(isinstance(piece.memory, Region) and piece.memory.gpu is share.gpu for piece in pieces):
                share.own.append(pieces)
            else:
                share.strays.append((yield from self.folded(share.gpu, self._how, [pieces])))

    def launch(self, outputs: Sequence[Region], on_host: bool) -> None:
        """Gives every GPU its part."""
        on_host = on_host or bool(self._elsewhere(outputs))
        for number, share in enumerate(self._shares.values()):
            wanted = [self._part(output) for output in outputs if output.gpu is share.gpu]
            work = self._work(share, wanted, on_host and number == 0)
            self.submit(share.gpu, work, share.communicator.check)

    def _part(self, output: Region) -> Region:
        """Where the result of this strand lies in that of all."""
        pack, span = self.strand.pack, self.strand.span
        size = pack.result_dtype.itemsize
        return output[pack.result_offset + span.start * size : pack.result_offset + span.stop * size]

    def _work(self, share: _Share, wanted: Sequence[Region], on_host: bool) -> Callable[[int], None]:
        """One launch. What it needs is taken here, and given back when it has ended."""
        gpu, how, count = share.gpu, self._how, len(self.strand.span)
        in_place = _lies_so(share, how, self._nbytes)
        total = None if in_place is not None else self.scratch(gpu, self._nbytes)
        send = in_place if in_place is not None else _there(total)
        spare = self.scratch(gpu, self._nbytes) if len(share.strays) + len(_chunks(share.own)) > 1 else None
        if self._as_it_is and wanted:
            receive = wanted[0].address
        else:
            receive = _there(total if total is not None else self.scratch(gpu, self._nbytes))
        host = self._for_host(gpu) if on_host else None
        result = receive if self._as_it_is else None
        if result is None and (wanted or on_host):
            result = wanted[0].address if wanted else self.scratch(gpu, self._result_bytes).address

        def work(stream: int) -> None:
            if total is not None:
                self._fold(share, total.address, spare.address if spare is not None else 0, stream)
            self._all_reduce(share.communicator, send, receive, stream)
            if result is None:
                return
            if not self._as_it_is:
                gpu.cuda.fold(fold_of(how, finish=True), [receive], result, count, stream)
            for other in wanted[1:]:
                gpu.cuda.copy(other.address, result, self._result_bytes, stream)
            if host is not None:
                gpu.cuda.copy(host, result, self._result_bytes, stream)

        return work

    @property
    def _result_bytes(self) -> int:
        return len(self.strand.span) * self.strand.pack.result_dtype.itemsize

    def _for_host(self, gpu: Gpu) -> int:
        """Where the result is to be read by the host."""
        self._on_host = self.host(gpu, self._result_bytes)
        return int(self._on_host.ctypes.data)

    def _fold(self, share: _Share, total: int, spare: int, stream: int) -> None:
        """total = what the ranks of this GPU contribute: those that lie there first, then the others, in rank order."""
        cuda, how = share.gpu.cuda, self._how
        steps: list[Callable[[int], None]] = [
            partial(self._fold_there, share.gpu, chunk, stream=stream) for chunk in _chunks(share.own)
        ]
        for stray in share.strays:
            steps.append(partial(cuda.copy, source=stray.ctypes.data, nbytes=self._nbytes, stream=stream))
        for number, step in enumerate(steps):
            step(spare if number else total)
            if number:
                cuda.fold(fold_of(how), [total, spare], total, len(self.strand.span), stream)

    def _fold_there(self, gpu: Gpu, ranks: Sequence[Sequence[Piece]], into: int, *, stream: int) -> None:
        first, size = self.strand.span.start, self._how.partial_bytes
        for together in zip(*ranks, strict=True):
            addresses = [address_of(piece.memory) for piece in together]
            start, length = together[0].start, together[0].stop - together[0].start
            gpu.cuda.fold(fold_of(self._how, widen=True), addresses, into + (start - first) * size, length, stream)

    def _all_reduce(self, communicator: Communicator, send: int, receive: int, stream: int) -> None:
        dtype, width = self._elements
        nccl, size = communicator.nccl, self._how.partial_bytes // width
        for start, count in in_parts(len(self.strand.span) * width, nccl.capabilities.max_count):
            at = start * size
            call = partial(nccl.all_reduce, send + at, receive + at, count, dtype, self._op)
            communicator.issue(lambda handle, call=call: call(handle, stream))  # type: ignore[misc]

    def handed_out(self, outputs: Sequence[Region], result: NDArray[np.uint8] | None) -> Iterator[Wait]:
        """To ranks that read the result on the host, or on a GPU that is not in the group."""
        found = self._on_host
        if found is None:
            return
        if result is not None:
            start = self.strand.pack.result_offset + self.strand.span.start * self.strand.pack.result_dtype.itemsize
            np.copyto(result[start : start + len(found)], found)
        for output in self._elsewhere(outputs):
            target, copy = self._part(output).address, output.gpu.cuda.copy
            self.submit(output.gpu, partial(copy, target, found.ctypes.data, len(found)))
        yield from self.all_done()

    def _elsewhere(self, outputs: Sequence[Region]) -> list[Region]:
        gpus = [share.gpu for share in self._shares.values()]
        return [output for output in outputs if output.gpu not in gpus]

    def scratch(self, gpu: Gpu, size: int) -> Region:
        """Memory of a GPU, until this strand has ended."""
        region = gpu.scratch.take(size)
        self._scratch.append((gpu, region))
        return region

    def stop(self) -> None:
        if not self.over:
            self._meeting.abort()
        super().stop()


def _chunks(ranks: list[Sequence[Piece]]) -> list[list[Sequence[Piece]]]:
    """As many as one kernel takes."""
    return [ranks[at : at + MOST_SOURCES] for at in range(0, len(ranks), MOST_SOURCES)]


def _lies_so(share: _Share, how: Arithmetic, nbytes: int) -> int | None:
    """The address of the partial sums where they need not be made: one rank, one piece, no wider than it is."""
    if share.strays or len(share.own) != 1 or not how.direct:
        return None
    (pieces,) = share.own
    return address_of(pieces[0].memory) if len(pieces) == 1 and len(pieces[0].memory) == nbytes else None


def _there(region: Region | None) -> int:
    assert region is not None
    return region.address
