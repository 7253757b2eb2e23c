"""One strand of a running instance: fold the local ranks, carry the plan across workers, deliver.

A generator like `execute`: yields what it waits for, and is closed to stop it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_proto.numpy_types import to_numpy
from collectived_runtime.device.arithmetic import STRETCH_BYTES, Arithmetic
from collectived_runtime.engine.crew import PIECE_BYTES, SPREAD_BYTES, Help, Job
from collectived_runtime.engine.cutting import Cut, Window, one_run
from collectived_runtime.engine.execute import AGAIN, Buffers, Judge, execute
from collectived_runtime.engine.program import Program, Strand
from collectived_runtime.engine.results import Workspace
from collectived_runtime.engine.seat import Sources
from collectived_runtime.plan.moves import Buffer
from collectived_runtime.transport.frame import Stamp
from collectived_runtime.transport.link import Link

Array = NDArray[Any]
Wait = Sequence[tuple[Link | Job, int]]  # as of `execute`; a job is waited for with 0


def run(
    program: Program,
    strand: Strand,
    sources: Sequence[Sources],
    result: NDArray[np.uint8] | None,
    workspace: Workspace,
    help: Help,
    links: Mapping[int, Link],
    stamp: Stamp,
    judge: Judge,
) -> Iterator[Wait]:
    """Runs a strand.

    Args:
        sources: what the contributing local ranks submitted, in rank order.
        result: the instance's result slot; None where nothing is delivered on this worker.
        help: with folding what is large.
        links: by place, at least those of `strand.peers`.
    """
    arithmetic = program.arithmetic[strand.pack_number]
    pack, cut = strand.pack, strand.cut
    output: Array | None = None
    if result is not None:
        size = (pack.count if cut is None else cut.output) * pack.result_dtype.itemsize
        output = result[pack.result_offset : pack.result_offset + size].view(to_numpy(pack.result_dtype))
    if arithmetic is not None:
        buffers = yield from _folded(strand, arithmetic, sources, output, workspace, help)
    elif cut is not None:
        leaves = {
            rank: _whole(source, strand).view(to_numpy(pack.dtype))
            for rank, source in zip(program.sources, sources, strict=True)
        }
        buffers = yield from _handed_over(strand, cut, leaves, output, workspace)
    else:
        buffers = yield from _moved(strand, sources, output, workspace)
    yield from execute(strand.plan, buffers, links, stamp, judge)


def at_once(program: Program, sources: Sequence[Sources], result: NDArray[np.uint8]) -> None:
    """Carries out a program that says of itself that it can be; see `Program.at_once`.

    Args:
        sources, result: as of `run`.
    """
    pack, arithmetic = program.strands[0].pack, program.arithmetic[0]
    size = pack.count * pack.result_dtype.itemsize
    output = result[pack.result_offset : pack.result_offset + size].view(to_numpy(pack.result_dtype))
    dtype = to_numpy(pack.dtype)
    wholes = [whole.view(dtype) for source in sources if (whole := source.whole(0)) is not None]
    if len(wholes) == len(sources):
        _combine(arithmetic, wholes, output)
        return
    for pieces in zip(*(source.leaves(0) for source in sources), strict=True):
        arrays = [memory.view(dtype) for _, memory in pieces]
        start = pieces[0][0]
        _combine(arithmetic, arrays, output[start : start + len(arrays[0])])


def _combine(arithmetic: Arithmetic | None, arrays: list[Array], out: Array) -> None:
    if arithmetic is None:
        np.copyto(out, arrays[0])
    else:
        arithmetic.gather_at_once(arrays, out)
        arithmetic.finish_here(out)


def _moved(
    strand: Strand, sources: Sequence[Sources], output: Array | None, workspace: Workspace
) -> Generator[Wait, None, Buffers]:
    """Buffers for elements that travel as they are; at most one local rank contributes."""
    dtype = to_numpy(strand.pack.dtype)
    mine = output
    if sources:
        whole = sources[0].whole(strand.pack_number)
        if whole is not None:
            mine = whole.view(dtype)
        else:
            mine = workspace.buffer(strand.pack_number, strand.pack.count * dtype.itemsize).view(dtype)
            for offset, leaf in sources[0].leaves(strand.pack_number):
                part = leaf.view(dtype)
                np.copyto(mine[offset : offset + len(part)], part)
                yield AGAIN
    assert mine is not None
    return Buffers(mine, mine, output, _never, _copy, _stays)


def _handed_over(
    strand: Strand, cut: Cut, leaves: Mapping[int, Array], output: Array | None, workspace: Workspace
) -> Generator[Wait, None, Buffers]:
    """Buffers for rows that go their ways: what stays on this worker is put in its place at once."""
    dtype = to_numpy(strand.pack.dtype)
    if output is None:
        output = np.empty(0, dtype)
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
        sending = workspace.buffer(strand.pack_number, end * dtype.itemsize).view(dtype)
        windows[Buffer.INPUT] = cut.sending
        for part in cut.sent:
            yield from copied(leaves[part.rank][part.start : part.stop], sending[cut.sending.at(part.to) :])
    return Buffers(sending, sending, output, _never, _in_place_already, _stays, windows)


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
    workspace: Workspace,
    help: Help,
) -> Generator[Wait, None, Buffers]:
    """Buffers for elements that are folded: first the local ranks, in rank order, into partial sums.

    A single rank's memory is read where it lies when it needs no widening, and partial sums are kept where the result
    will be when the types allow it: nothing is copied that need not be.
    """
    count = strand.pack.count
    start, stop = strand.span.start, strand.span.stop
    cut = strand.cut
    windows = None if cut is None else {Buffer.OUTPUT: cut.receiving}
    if output is not None and arithmetic.in_place and len(output) == count:
        partials = output
    else:  # shared by the shards of a pack, each of which keeps to its span
        memory = workspace.buffer(strand.pack_number, count * arithmetic.partial_bytes)
        partials = arithmetic.partials(memory, count)
    if not sources:  # a signal: nobody reads its value
        return Buffers(partials, partials, partials, arithmetic.fold, _copy, _stays)
    dtype = to_numpy(strand.pack.dtype)
    wholes = [source.whole(strand.pack_number) for source in sources] if cut is None or cut.straight else [None]
    if len(wholes) == 1 and wholes[0] is not None and arithmetic.in_place:
        mine = wholes[0].view(dtype)
        return Buffers(mine, partials, output, arithmetic.fold, arithmetic.finish, arithmetic.finish_here, windows)
    if all(whole is not None for whole in wholes):
        arrays = [whole.view(dtype)[start:stop] for whole in wholes if whole is not None]
        yield from _gather(arithmetic, arrays, partials[start:stop], help)
    else:
        by_leaf = [_pieces(source, strand, index) for index, source in enumerate(sources)]
        for pieces in zip(*by_leaf, strict=True):
            arrays = [memory.view(dtype) for _, memory in pieces]
            offset = pieces[0][0]
            first, last = max(offset, start), min(offset + len(arrays[0]), stop)
            if first < last:
                parts = [array[first - offset : last - offset] for array in arrays]
                yield from _gather(arithmetic, parts, partials[first:last], help)
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


def _gather(arithmetic: Arithmetic, arrays: list[Array], out: Array, help: Help) -> Iterator[Wait]:
    """out = the arrays, combined in that order; what is large with the help of others."""
    if not help.there or out.nbytes < SPREAD_BYTES:
        for _ in arithmetic.gather(arrays, out):
            yield AGAIN
        return

    def fold(start: int, stop: int) -> None:
        arithmetic.gather_at_once([array[start:stop] for array in arrays], out[start:stop])

    job = help.begin(len(out), max(1, PIECE_BYTES // arithmetic.partial_bytes), fold)
    try:
        while job.step():
            yield AGAIN
        while not job.done:
            yield [(job, 0)]
    finally:
        job.stop()  # when this returns nobody reads or writes any of it


def _never(left: Array, right: Array, out: Array) -> None:
    raise AssertionError("a plan folded elements that are only moved")


def _copy(source: Array, out: Array) -> None:
    np.copyto(out, source)


def _in_place_already(source: Array, out: Array) -> None:
    """A worker's own rows are put in their place before the plan runs."""


def _stays(out: Array) -> None:
    """What is moved is final where it is."""
