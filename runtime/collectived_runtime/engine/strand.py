"""One strand of a running instance: fold the local ranks, carry the plan across workers, deliver.

A generator like `execute`: yields what it waits for, and is closed to stop it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectived_runtime.device.arithmetic import STRETCH_BYTES, Arithmetic
from collectived_runtime.engine.alarms import Alarms
from collectived_runtime.engine.counters import Counters
from collectived_runtime.engine.crew import PIECE_BYTES, SPREAD_BYTES, Help
from collectived_runtime.engine.cutting import Cut, Window, one_run
from collectived_runtime.engine.execute import AGAIN, Buffers, Judge, execute
from collectived_runtime.engine.ledger import Mark
from collectived_runtime.engine.lingering import Lingering
from collectived_runtime.engine.program import Program, Strand
from collectived_runtime.engine.recorder import FOLD, MOST_MOVES
from collectived_runtime.engine.results import Workspace
from collectived_runtime.engine.seat import Sources
from collectived_runtime.plan.moves import Buffer
from collectived_runtime.transport.frame import Stamp
from collectived_runtime.transport.link import Link

Array = NDArray[Any]


class Elsewhere(Protocol):
    """What others do. Whoever does it wakes the lane when it is `done`."""

    @property
    def done(self) -> bool: ...


Wait = Sequence[tuple[Link | Elsewhere, int]]  # as of `execute`; what others do is waited for with 0


@dataclass(frozen=True, slots=True)
class Tools:
    """What the strands of a lane work with.

    Attributes:
        workspace: scratch memory. help: with folding what is large. counters: are told how much is folded and copied.
        wake: wakes the lane, from any thread. lingering: what GPUs are still at for strands that were stopped.
        alarms: wake the lane when a time has come.
    """

    workspace: Workspace
    help: Help
    counters: Counters
    wake: Callable[[], object]
    lingering: Lingering
    alarms: Alarms = field(default_factory=Alarms)


def run(
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
        sources: what the contributing local ranks submitted, in rank order.
        result: the instance's result slot; None where nothing is delivered on this worker.
        tools: of the lane.
        links: by place, at least those of `strand.peers`.
        marks: are told of folds and moves.
    """
    arithmetic = program.arithmetic[strand.pack_number]
    output = None if result is None else _output(strand, result)
    if arithmetic is not None and program.alone and strand.cut is None:
        if output is not None and sources:
            yield from _combined(strand, arithmetic, sources, output, tools)
        return
    began = time.monotonic()
    tools.workspace.begin(strand.pack_number)
    try:
        buffers = yield from _buffers(program, strand, sources, output, tools)
        if marks is not None and len(marks) < MOST_MOVES:
            marks.append((FOLD, strand.pack_number, strand.shard, 0, -1, began, time.monotonic()))
        yield from execute(strand.plan, buffers, links, stamp, judge, marks)
    finally:
        tools.workspace.end(strand.pack_number)


def _buffers(
    program: Program, strand: Strand, sources: Sequence[Sources], output: Array | None, tools: Tools
) -> Generator[Wait, None, Buffers]:
    """What the plan works on: what the local ranks have, folded or put side by side."""
    arithmetic, cut = program.arithmetic[strand.pack_number], strand.cut
    if arithmetic is not None:
        return (yield from _folded(strand, arithmetic, sources, output, tools))
    if cut is None:
        return (yield from _moved(strand, sources, output, tools))
    dtype = strand.dtype
    leaves = {rank: _whole(source, strand).view(dtype) for rank, source in zip(program.sources, sources, strict=True)}
    return (yield from _handed_over(strand, cut, leaves, output, tools))


def at_once(program: Program, sources: Sequence[Sources], result: NDArray[np.uint8], counters: Counters) -> None:
    """Carries out a program that says of itself that it can be; see `Program.at_once`.

    Args:
        sources, result, counters: as of `run`.
    """
    strand, arithmetic = program.strands[0], program.arithmetic[0]
    for arrays, out in _side_by_side(strand, sources, _output(strand, result)):
        if arithmetic is None:
            np.copyto(out, arrays[0])
            counters.copied_bytes += out.nbytes
        else:
            arithmetic.combine(arrays, out)
            counters.folded_bytes += len(arrays) * arrays[0].nbytes


def _combined(
    strand: Strand, arithmetic: Arithmetic, sources: Sequence[Sources], output: Array, tools: Tools
) -> Iterator[Wait]:
    """The result, where all that contribute are here."""
    for arrays, out in _side_by_side(strand, sources, output):
        yield from spread(arithmetic.combine, arithmetic.partial_bytes, arrays, out, tools)


def _output(strand: Strand, result: NDArray[np.uint8]) -> Array:
    """Where the result of a pack lies."""
    return result[strand.result].view(strand.result_dtype)


def _side_by_side(strand: Strand, sources: Sequence[Sources], out: Array) -> Iterable[tuple[list[Array], Array]]:
    """What all sources have for the same stretch of the strand, and that stretch of `out`: all of it, or by leaf."""
    start, stop, number = strand.span.start, strand.span.stop, strand.pack_number
    arrays = []
    for source in sources:
        whole = source.whole(number) if strand.straight else None
        if whole is None:
            return _by_leaf(strand, sources, out)
        arrays.append(whole.view(strand.dtype)[start:stop])
    return [(arrays, out[start:stop])]


def _by_leaf(strand: Strand, sources: Sequence[Sources], out: Array) -> Iterator[tuple[list[Array], Array]]:
    dtype, start, stop = strand.dtype, strand.span.start, strand.span.stop
    by_leaf = [_pieces(source, strand, index) for index, source in enumerate(sources)]
    for pieces in zip(*by_leaf, strict=True):
        arrays = [memory.view(dtype) for _, memory in pieces]
        offset = pieces[0][0]
        first, last = max(offset, start), min(offset + len(arrays[0]), stop)
        if first < last:
            yield [array[first - offset : last - offset] for array in arrays], out[first:last]


def _moved(
    strand: Strand, sources: Sequence[Sources], output: Array | None, tools: Tools
) -> Generator[Wait, None, Buffers]:
    """Buffers for elements that travel as they are; at most one local rank contributes."""
    dtype = strand.dtype
    mine = output
    if sources:
        whole = sources[0].whole(strand.pack_number)
        if whole is not None:
            mine = whole.view(dtype)
        else:
            mine = tools.workspace.buffer(strand.pack_number, strand.pack.count * dtype.itemsize).view(dtype)
            for offset, leaf in sources[0].leaves(strand.pack_number):
                part = leaf.view(dtype)
                np.copyto(mine[offset : offset + len(part)], part)
                tools.counters.copied_bytes += part.nbytes
                yield AGAIN
    assert mine is not None
    return Buffers(mine, mine, output, never, copy_over, stays)


def _handed_over(
    strand: Strand, cut: Cut, leaves: Mapping[int, Array], output: Array | None, tools: Tools
) -> Generator[Wait, None, Buffers]:
    """Buffers for rows that go their ways: what stays on this worker is put in its place at once."""
    dtype = strand.dtype
    if output is None:
        output = np.empty(0, dtype)
    tools.counters.copied_bytes += sum(part.stop - part.start for part in cut.local) * dtype.itemsize
    for part in cut.local:
        yield from copied(leaves[part.rank][part.start : part.stop], output[part.to :])
    windows = {Buffer.OUTPUT: cut.receiving}
    sending = output
    if cut.sent and (run := one_run(cut.sent)) is not None:
        rank, ahead = run
        sending = leaves[rank]
        windows[Buffer.INPUT] = Window((ahead,))
    elif cut.sent:
        end = max(cut.sending.at(part.to) + part.stop - part.start for part in cut.sent)
        sending = tools.workspace.buffer(strand.pack_number, end * dtype.itemsize).view(dtype)
        windows[Buffer.INPUT] = cut.sending
        tools.counters.copied_bytes += sum(part.stop - part.start for part in cut.sent) * dtype.itemsize
        for part in cut.sent:
            yield from copied(leaves[part.rank][part.start : part.stop], sending[cut.sending.at(part.to) :])
    return Buffers(sending, sending, output, never, _in_place_already, stays, windows)


def copied(source: Array, target: Array) -> Iterator[Wait]:
    """Copies to the start of `target`, with looks at the world in between."""
    stretch = STRETCH_BYTES // source.itemsize
    for start in range(0, len(source), stretch):
        piece = source[start : start + stretch]
        np.copyto(target[start : start + len(piece)], piece)
        if start + stretch < len(source):
            yield AGAIN


def _folded(
    strand: Strand,
    arithmetic: Arithmetic,
    sources: Sequence[Sources],
    output: Array | None,
    tools: Tools,
) -> Generator[Wait, None, Buffers]:
    """Buffers for elements that are folded: first the local ranks, in rank order, into partial sums.

    A single rank's memory is read where it lies when it needs no widening, and partial sums are kept where the result
    will be when the types allow it: nothing is copied that need not be.
    """
    count = strand.pack.count
    cut = strand.cut
    windows = None if cut is None else {Buffer.OUTPUT: cut.receiving}
    if output is not None and arithmetic.in_place and len(output) == count:
        partials = output
    else:  # shared by the shards of a pack, each of which keeps to its span
        memory = tools.workspace.buffer(strand.pack_number, count * arithmetic.partial_bytes)
        partials = arithmetic.partials(memory, count)
    if not sources:  # a signal: nobody reads its value
        return Buffers(partials, partials, partials, arithmetic.fold, copy_over, stays)
    whole = sources[0].whole(strand.pack_number) if len(sources) == 1 and strand.straight else None
    if whole is not None and arithmetic.in_place:
        mine = whole.view(strand.dtype)
        return Buffers(mine, partials, output, arithmetic.fold, arithmetic.finish, arithmetic.finish_here, windows)
    for arrays, out in _side_by_side(strand, sources, partials):
        yield from spread(arithmetic.gather, arithmetic.partial_bytes, arrays, out, tools)
    return Buffers(partials, partials, output, arithmetic.fold, arithmetic.finish, arithmetic.finish_here, windows)


def _pieces(source: Sources, strand: Strand, index: int) -> list[tuple[int, NDArray[np.uint8]]]:
    """(position in the pack, bytes) of what source number `index` contributes."""
    if strand.cut is None:
        return source.leaves(strand.pack_number)
    whole, itemsize = _whole(source, strand), strand.pack.dtype.itemsize
    ranks = list(dict.fromkeys(part.rank for part in strand.cut.sent))
    parts = [part for part in strand.cut.sent if part.rank == ranks[index]]
    return [(part.to, whole[part.start * itemsize : part.stop * itemsize]) for part in parts]


def _whole(source: Sources, strand: Strand) -> NDArray[np.uint8]:
    whole = source.whole(strand.pack_number)
    assert whole is not None, "a leaf that is cut travels by itself"
    return whole


def spread(
    fold: Callable[[list[Array], Array], None], row_bytes: int, arrays: list[Array], out: Array, tools: Tools
) -> Iterator[Wait]:
    """fold(arrays, out), stretch by stretch with looks at the world in between; what is large with the help of others.

    Args:
        row_bytes: that one row of `out` takes while it is folded.
    """

    tools.counters.folded_bytes += len(arrays) * arrays[0].nbytes

    def part(start: int, stop: int) -> None:
        fold([array[start:stop] for array in arrays], out[start:stop])

    length = len(out)
    if not tools.help.there or length * row_bytes < SPREAD_BYTES:
        stretch = max(1, STRETCH_BYTES // row_bytes)
        for start in range(0, length, stretch):
            if start:
                yield AGAIN
            part(start, min(start + stretch, length))
        return
    job = tools.help.begin(length, max(1, PIECE_BYTES // row_bytes), part)
    try:
        while job.step():
            yield AGAIN
        while not job.done:
            yield [(job, 0)]
    finally:
        job.stop()  # when this returns nobody reads or writes any of it
    if job.failed is not None:
        raise job.failed


def never(left: Array, right: Array, out: Array) -> None:
    raise AssertionError("a plan folded elements that are only moved")


def copy_over(source: Array, out: Array) -> None:
    np.copyto(out, source)


def _in_place_already(source: Array, out: Array) -> None:
    """A worker's own rows are put in their place before the plan runs."""


def stays(out: Array) -> None:
    """What is moved is final where it is."""
