"""How numbers are combined: one reduce operation on one element type, by the native core.

A contribution is *widened* into partial sums, partial sums are *folded* pairwise, and the last result is *finished*:
rounded to the result type, divided by the number of contributions for a mean. `arithmetic.h` of the native core says
what is promised of the numbers. An element of a vector is one row of its array, so that a span of elements is a slice
whatever the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_native import core
from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import DType, ReduceOp

Array = NDArray[Any]

YIELD_INTERVAL_BYTES = 4 << 20  # bytes folded between two yields

_NUMBERS = {operation: number for number, operation in enumerate(ReduceOp, 1)}  # as on the wire
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_HALVES = (DType.FLOAT16, DType.BFLOAT16)
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

    @property
    def number(self) -> int:
        """The operation's, for the native core."""
        return _NUMBERS[self.operation]

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
        }
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def view_partials(self, memory: Array, count: int) -> Array:
        """Return `count` partial sums at the start of `memory` (uint8)."""
        flat = memory[: count * self.partial_bytes].view(self.partial_dtype)
        return flat.reshape(count, 2) if self.is_split else flat

    def fold(self, left: Array, right: Array, out: Array) -> None:
        """out = left ∘ right, all partial sums; `out` may be either of them."""
        self._fold_partials((left, right), out, False)

    def finish(self, partial: Array, out: Array) -> None:
        """Write the result of these partial sums into `out`."""
        self._fold_partials((partial,), out, True)

    def finish_in_place(self, partial: Array) -> None:
        """The same where partial sums lie where the result will (`can_finish_in_place`)."""
        if self.operation is ReduceOp.MEAN:
            self._fold_partials((partial,), partial, True)

    def combine(self, sources: Sequence[Array], out: Array) -> None:
        """out = the result, where `sources` are all contributions in order."""
        self._fold_inputs(sources, out, True)

    def fold_all(self, sources: Sequence[Array], out: Array) -> None:
        """out = sources[0] ∘ sources[1] ∘ …, widened, in that order."""
        self._fold_inputs(sources, out, False)

    def _fold_inputs(self, sources: Sequence[Array], out: Array, is_final: bool) -> None:
        spans = [view_bytes(source) for source in sources]
        number = _NUMBERS[self.operation]
        core.fold_inputs(self.dtype, number, view_bytes(out), spans, is_final, self.contributions, False)

    def _fold_partials(self, partials: Sequence[Array], out: Array, is_final: bool) -> None:
        spans = [view_bytes(partial) for partial in partials]
        number = _NUMBERS[self.operation]
        core.fold_partials(self.dtype, number, view_bytes(out), spans, is_final, self.contributions, False)


def view_bytes(array: Array) -> NDArray[np.uint8]:
    """The bytes of a contiguous array; the buffer protocol has no codes for ml_dtypes' own types."""
    return array.view(np.uint8)
