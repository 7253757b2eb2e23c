"""How numbers are combined: one reduce operation on one element type.

A contribution is *widened* into partial sums, partial sums are *folded* pairwise, and the last result is *finished*:
rounded to the result type, divided by the number of contributions for a mean. Partial sums are wide enough that only
the last step rounds away from what the type promises:

- float16 and bfloat16 fold in float32;
- a mean of integers is exact until its one division: up to 32 bits fold in int64, 64-bit ones in two int64 per element
  (the upper and the lower 32 bits), which cannot overflow below 2**31 contributions;
- sums of integers wrap, as in NumPy, C and MPI.

An element of a vector is one row of its array, so that a span of elements is a slice whatever the width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numkong
import numpy as np
from numpy.typing import NDArray

from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import DType, ReduceOp

Array = NDArray[Any]

BLOCK_BYTES = 256 << 10  # what is folded at a stretch when there are more than two sources: stays in the cache
YIELD_INTERVAL_BYTES = 4 << 20  # what is folded between two looks at the world

_UFUNCS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
# NumPy adds both, and casts all but bfloat16 to float32, several times slower than numkong, which calls them so.
_HALVES: dict[DType, Literal["float16", "bfloat16"]] = {DType.FLOAT16: "float16", DType.BFLOAT16: "bfloat16"}
_LONG = (DType.INT64, DType.UINT64)


def unsupported_reason(operation: ReduceOp, dtype: DType) -> str:
    """Why this operation is not defined on this type, or ''."""
    if dtype is DType.BOOL:
        return f"{operation.value} of bool is not defined; convert to uint8"
    if operation in _BITWISE and not dtype.is_integer:
        return f"{operation.value} needs integers, not {dtype.label}"
    if operation in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex:
        return f"{operation.value} is not defined on {dtype.label}: complex numbers have no order"
    return ""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`operation` on `dtype` over `contributions` ranks; results are of `result_dtype`.

    Attributes:
        partial_dtype: the element type of partial sums (of each of the two halves of a split one).
        is_split: whether a partial sum is two int64.
        partial_bytes: bytes of one partial sum.
        can_finish_in_place: whether partial sums may live where the result will, for finishing changes at most the
            value.
        needs_no_widening: whether contributions are partial sums as they are.
        ufunc: what folds two of them.
    """

    operation: ReduceOp
    dtype: DType
    result_dtype: DType
    contributions: int
    partial_dtype: np.dtype[Any] = field(init=False, compare=False)
    is_split: bool = field(init=False, compare=False)
    partial_bytes: int = field(init=False, compare=False)
    can_finish_in_place: bool = field(init=False, compare=False)
    needs_no_widening: bool = field(init=False, compare=False)
    ufunc: np.ufunc = field(init=False, compare=False)

    def __post_init__(self) -> None:
        partial, split = to_numpy(self.dtype), False
        if self.dtype in _HALVES:
            partial = np.dtype(np.float32)
        elif self.operation is ReduceOp.MEAN and self.dtype.is_integer:
            partial, split = np.dtype(np.int64), self.dtype in _LONG
        facts = {
            "partial_dtype": partial,
            "is_split": split,
            "partial_bytes": partial.itemsize * (2 if split else 1),
            "can_finish_in_place": partial == to_numpy(self.result_dtype) and not split,
            "needs_no_widening": partial == to_numpy(self.dtype) and not split,
            "ufunc": _UFUNCS[self.operation],
        }
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def view_partials(self, memory: Array, count: int) -> Array:
        """Return `count` partial sums at the start of `memory` (uint8)."""
        flat = memory[: count * self.partial_bytes].view(self.partial_dtype)
        return flat.reshape(count, 2) if self.is_split else flat

    def widen(self, source: Array, target: Array) -> None:
        """Write `source` into `target`, as partial sums."""
        if self.is_split:
            np.right_shift(source, 32, out=target[:, 0], casting="unsafe")
            np.bitwise_and(source, 0xFFFFFFFF, out=target[:, 1], casting="unsafe")
        elif self.dtype is DType.FLOAT16:
            numkong.astype(source, "float32", out=target)
        else:
            np.copyto(target, source, casting="same_kind")

    def fold(self, left: Array, right: Array, out: Array) -> None:
        """out = left ∘ right, all partial sums; `out` may be either of them."""
        self.ufunc(left, right, out=out)

    def finish(self, partial: Array, out: Array) -> None:
        """Write the result of these partial sums into `out`."""
        if self.operation is not ReduceOp.MEAN:
            self._narrow(partial, out)
        elif self.is_split:
            upper = partial[:, 0].astype(np.float64) * 4294967296.0
            np.true_divide(upper + partial[:, 1], self.contributions, out=out)
        elif self.can_finish_in_place:
            np.true_divide(partial, self.contributions, out=out)
        else:
            self._narrow(np.true_divide(partial, self.contributions), out)

    def _narrow(self, values: Array, out: Array) -> None:
        """Rounds to the result type, to nearest, ties to even."""
        if self.result_dtype in _HALVES and values.dtype == np.float32:
            # NaNs stay what they are, for what halves are summed to has no bits that halves have not.
            numkong.astype(values, _HALVES[self.result_dtype], out=out)
        else:
            np.copyto(out, values, casting="same_kind")

    def finish_in_place(self, partial: Array) -> None:
        """The same where partial sums lie where the result will (`can_finish_in_place`)."""
        if self.operation is ReduceOp.MEAN:
            np.true_divide(partial, self.contributions, out=partial)

    def combine(self, sources: Sequence[Array], out: Array) -> None:
        """out = the result, where `sources` are all contributions in order; by blocks that stay in the cache."""
        if self.can_finish_in_place and self.operation is not ReduceOp.MEAN:
            self.fold_all(sources, out)
            return
        if self.dtype in _HALVES and self.operation is ReduceOp.SUM and len(sources) == 2:
            numkong.add(sources[0], sources[1], out=out)  # in single precision, rounded once
            return
        block = max(1, min(len(out), BLOCK_BYTES // self.partial_bytes))
        spare = (
            None
            if self.can_finish_in_place
            else self.view_partials(np.empty(block * self.partial_bytes, np.uint8), block)
        )
        for start in range(0, len(out), block):
            into = out[start : start + block]
            pieces = [source[start : start + block] for source in sources]
            if spare is None:
                self.fold_all(pieces, into)
                self.finish_in_place(into)
            else:
                partials = spare[: len(into)]
                self.fold_all(pieces, partials)
                if self.dtype in _HALVES and self.operation is ReduceOp.MEAN:  # in place, for these are ours
                    np.true_divide(partials, self.contributions, out=partials)
                    self._narrow(partials, into)
                else:
                    self.finish(partials, into)

    def fold_all(self, sources: Sequence[Array], out: Array) -> None:
        """out = sources[0] ∘ sources[1] ∘ …, widened, in that order."""
        if self.needs_no_widening and len(sources) == 2:
            self.fold(sources[0], sources[1], out)
        elif len(sources) == 1:
            self.widen(sources[0], out)
        else:
            self._fold_blocks(sources, out)

    def _fold_blocks(self, sources: Sequence[Array], out: Array) -> None:
        block = max(1, BLOCK_BYTES // self.partial_bytes)
        adds_halves = self.dtype is DType.FLOAT16 and self.ufunc is np.add
        spare = None if self.needs_no_widening or adds_halves else np.empty_like(out[:block])
        for start in range(0, len(out), block):
            into = out[start : start + block]
            pieces = [source[start : start + block] for source in sources]
            if self.needs_no_widening:
                self.fold(pieces[0], pieces[1], into)
                pieces = pieces[2:]
            else:
                self.widen(pieces[0], into)
                pieces = pieces[1:]
            for piece in pieces:
                if adds_halves:
                    numkong.add(into, piece, out=into)  # widens on the way
                    continue
                if spare is not None:
                    self.widen(piece, spare[: len(piece)])
                    piece = spare[: len(piece)]
                self.fold(into, piece, into)
