"""One strand of a running instance: fold the local ranks, carry the plan across workers, deliver.

A generator like `execute`: yields what it waits for, and is closed to stop it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_proto.numpy_types import to_numpy
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.engine.execute import AGAIN, Buffers, Judge, Wait, execute
from collectived_runtime.engine.program import Program, Strand
from collectived_runtime.engine.results import Workspace
from collectived_runtime.engine.seat import Sources
from collectived_runtime.transport.frame import Stamp
from collectived_runtime.transport.link import Link

Array = NDArray[Any]


def run(
    program: Program,
    strand: Strand,
    sources: Sequence[Sources],
    result: NDArray[np.uint8] | None,
    workspace: Workspace,
    links: Mapping[int, Link],
    stamp: Stamp,
    judge: Judge,
) -> Iterator[Wait]:
    """Runs a strand.

    Args:
        sources: what the contributing local ranks submitted, in rank order.
        result: the instance's result slot; None where nothing is delivered on this worker.
        links: by place, at least those of `strand.peers`.
    """
    arithmetic = program.arithmetic[strand.pack_number]
    pack = strand.pack
    output: Array | None = None
    if result is not None:
        size = pack.count * pack.result_dtype.itemsize
        output = result[pack.result_offset : pack.result_offset + size].view(to_numpy(pack.result_dtype))
    if arithmetic is None:
        buffers = yield from _moved(strand, sources, output, workspace)
    else:
        buffers = yield from _folded(strand, arithmetic, sources, output, workspace)
    yield from execute(strand.plan, buffers, links, stamp, judge)


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


def _folded(
    strand: Strand,
    arithmetic: Arithmetic,
    sources: Sequence[Sources],
    output: Array | None,
    workspace: Workspace,
) -> Generator[Wait, None, Buffers]:
    """Buffers for elements that are folded: first the local ranks, in rank order, into partial sums.

    A single rank's memory is read where it lies when it needs no widening, and partial sums are kept where the result
    will be when the types allow it: nothing is copied that need not be.
    """
    count = strand.pack.count
    start, stop = strand.span.start, strand.span.stop
    if output is not None and arithmetic.in_place:
        partials = output
    else:  # shared by the shards of a pack, each of which keeps to its span
        memory = workspace.buffer(strand.pack_number, count * arithmetic.partial_bytes)
        partials = arithmetic.partials(memory, count)
    if not sources:  # a signal: nobody reads its value
        return Buffers(partials, partials, partials, arithmetic.fold, _copy, _stays)
    dtype = to_numpy(strand.pack.dtype)
    wholes = [source.whole(strand.pack_number) for source in sources]
    if len(wholes) == 1 and wholes[0] is not None and arithmetic.in_place:
        return Buffers(
            wholes[0].view(dtype), partials, output, arithmetic.fold, arithmetic.finish, arithmetic.finish_here
        )
    if all(whole is not None for whole in wholes):
        arrays = [whole.view(dtype)[start:stop] for whole in wholes if whole is not None]
        yield from _gather(arithmetic, arrays, partials[start:stop])
    else:
        by_leaf = [source.leaves(strand.pack_number) for source in sources]
        for pieces in zip(*by_leaf, strict=True):
            arrays = [memory.view(dtype) for _, memory in pieces]
            offset = pieces[0][0]
            first, last = max(offset, start), min(offset + len(arrays[0]), stop)
            if first < last:
                parts = [array[first - offset : last - offset] for array in arrays]
                yield from _gather(arithmetic, parts, partials[first:last])
    return Buffers(partials, partials, output, arithmetic.fold, arithmetic.finish, arithmetic.finish_here)


def _gather(arithmetic: Arithmetic, arrays: list[Array], out: Array) -> Iterator[Wait]:
    for _ in arithmetic.gather(arrays, out):
        yield AGAIN


def _never(left: Array, right: Array, out: Array) -> None:
    raise AssertionError("a plan folded elements that are only moved")


def _copy(source: Array, out: Array) -> None:
    np.copyto(out, source)


def _stays(out: Array) -> None:
    """What is moved is final where it is."""
