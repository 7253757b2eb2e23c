"""The inputs of ranks, the results that must follow from them, and the count of wrong elements. Pure.

Inputs repeat a short block of whole numbers, so that the answer repeats one too, and is known without a second
computation of the size of the first: element i of rank r's input is `block(r)[i % PERIOD]`. The numbers are so small
that every answer is exact, but for means; in the largest groups 8-bit integers wrap and halves round, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from collectived.bench.config import BenchConfig
from collectived.bench.operation_kinds import Extent
from collectived.values.arithmetic import HALF_DTYPES, mean_dtype
from collectived_proto.types import ReduceOp

Array = NDArray[Any]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)  # which NumPy's finfo does not know
PERIOD = 61  # a prime: a piece that begins elsewhere, or comes from elsewhere, looks different
_RANK_SHIFT = 17  # how far the blocks of neighbours are shifted
_BLOCKS_PER_TILE = 4096  # blocks that are filled in or compared in one go

_REDUCTIONS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


class Segment(NamedTuple):
    """A part of an answer: `length` elements, the first of which is element `start` of the repeated block."""

    block: Array
    start: int
    length: int


def block(order: BenchConfig, rank: int) -> Array:
    """The block of shape [PERIOD] that the input of a rank repeats."""
    return _exact_block(order, rank).astype(order.numpy_dtype)


def answer(order: BenchConfig, extent: Extent, rank: int, ranks: int) -> list[Segment] | None:
    """The result that a rank must get; None: it gets none."""
    if not order.kind.moves_data or (order.operation in ("reduce", "gather") and rank != order.root):
        return None
    piece = extent.count * rank  # where this rank's piece begins in a whole array
    match order.operation:
        case "all_reduce" | "reduce":
            return [Segment(reduced_block(order, ranks), 0, extent.count)]
        case "reduce_scatter":
            return [Segment(reduced_block(order, ranks), piece, extent.count)]
        case "broadcast":
            return [Segment(block(order, order.root), 0, extent.count)]
        case "scatter":
            return [Segment(block(order, order.root), piece, extent.count)]
        case "send_recv":
            return [Segment(block(order, (rank - 1) % ranks), 0, extent.count)]
        case "all_to_all":
            return [Segment(block(order, sender), piece, extent.count) for sender in range(ranks)]
        case _:  # all_gather, gather
            return [Segment(block(order, sender), 0, extent.count) for sender in range(ranks)]


def reduced_block(order: BenchConfig, ranks: int) -> Array:
    """The blocks of all ranks, reduced, in the type of a result."""
    op, dtype = order.reduction, order.numpy_dtype
    total = _REDUCTIONS[op].reduce(np.stack([_exact_block(order, rank) for rank in range(ranks)]), axis=0)
    if op is ReduceOp.MEAN:
        return np.asarray(total / ranks).astype(mean_dtype(dtype))
    with np.errstate(over="ignore"):  # a number too large for a half is infinite there, too
        return np.asarray(total).astype(np.float32 if dtype in HALF_DTYPES else dtype).astype(dtype)


def fill(array: Array, repeated: Array) -> None:
    """Fills a one-dimensional array with a block, again and again."""
    tile = np.tile(repeated, _BLOCKS_PER_TILE)
    for begin in range(0, len(array), len(tile)):
        part = array[begin : begin + len(tile)]
        part[:] = tile[: len(part)]


def count_wrong(result: object, expected: Sequence[Segment] | None, tolerant: bool = False) -> int:
    """Count elements of a result that are wrong: all, where its shape or type is; None is expected where there is none.

    `tolerant`: the last bit may differ, as of means.
    """
    if expected is None:
        return int(result is not None)
    length = sum(segment.length for segment in expected)
    if not isinstance(result, np.ndarray) or result.shape != (length,) or result.dtype != expected[0].block.dtype:
        return max(1, length)
    count, begin = 0, 0
    for segment in expected:
        count += _count_wrong_in(result[begin : begin + segment.length], segment, tolerant)
        begin += segment.length
    return count


def _count_wrong_in(part: Array, segment: Segment, tolerant: bool) -> int:
    tile = np.tile(np.roll(segment.block, -(segment.start % PERIOD)), _BLOCKS_PER_TILE)
    count = 0
    for begin in range(0, len(part), len(tile)):
        found = part[begin : begin + len(tile)]
        count += int(np.count_nonzero(_find_differences(found, tile[: len(found)], tolerant)))
    return count


def _find_differences(found: Array, expected: Array, tolerant: bool) -> Array:
    if not tolerant:
        return np.asarray(found != expected)
    slack = 2**-7 if found.dtype == _BFLOAT16 else float(np.finfo(found.dtype).eps)
    if found.dtype in HALF_DTYPES:
        found, expected = found.astype(np.float32), expected.astype(np.float32)
    return np.asarray(~(np.abs(found - expected) <= slack * np.abs(expected)))  # NaN is wrong, too


def _exact_block(order: BenchConfig, rank: int) -> Array:
    """The block in a type in which every reduction of it is exact."""
    index = np.arange(PERIOD)
    dtype = order.numpy_dtype
    wide = np.int64 if dtype.kind in "iub" else np.complex128 if dtype.kind == "c" else np.float64
    if order.kind.reduces and order.reduction is ReduceOp.PRODUCT:
        numbers = 1 + (index + rank) % 2
    else:
        numbers = (index + _RANK_SHIFT * rank) % PERIOD
    return np.asarray(numbers % 2 if dtype.kind == "b" else numbers).astype(wide)
