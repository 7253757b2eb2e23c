"""The cases: operations and sizes, the numbers in the buffers, and the right results. Pure.

Every input of rank r holds `(i % 8 + r + 1) * factor`, so every sum is a small whole number times a power of two, and
float32 is exact. Where a library sums in place, call after call without being filled again, k calls make the result
`ranks ** (k - 1)` times as large; `REFILL` calls stay within what float32 can hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

REFILL = 40
ITEM = 4  # bytes of a float32
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
_NAME = re.compile(r"(?:([a-z_]+) +)?(?:(\d+) ?x ?)?(\d+) ?(B|KiB|MiB)")

ALL_REDUCE, BARRIER, SEND_RECV = "all_reduce", "barrier", "send_recv"
MOVING = ("broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", SEND_RECV)
"""Operations that are measured beside all_reduce. In `send_recv` neighbours send their value to and fro."""
OPERATIONS = (ALL_REDUCE, *MOVING, BARRIER)


@dataclass(frozen=True, slots=True)
class Case:
    """`tensors` arrays of `count` float32 in one call.

    Where inputs and results differ in length, `count` is that of the longer ones, as in nccl-tests. A rank's share of
    it is one element at least.
    """

    tensors: int
    count: int
    operation: str = ALL_REDUCE

    @property
    def size(self) -> int:
        """Bytes of one call on one rank."""
        return self.tensors * self.count * ITEM

    @property
    def size_name(self) -> str:
        """`64 KiB`, `64 x 1 KiB`; of a barrier nothing."""
        if not self.count:
            return ""
        bytes_each = self.count * ITEM
        unit = max((unit for unit, size in _UNITS.items() if bytes_each % size == 0), key=lambda unit: _UNITS[unit])
        each = f"{bytes_each // _UNITS[unit]} {unit}"
        return each if self.tensors == 1 else f"{self.tensors} x {each}"

    def __str__(self) -> str:
        return self.size_name if self.operation == ALL_REDUCE else f"{self.operation} {self.size_name}".strip()

    def counts(self, rank: int, ranks: int) -> tuple[int, int]:
        """How many numbers a rank gives, and how many it gets; rank 0 is the root."""
        if self.operation in (ALL_REDUCE, "broadcast", SEND_RECV, BARRIER):
            return self.count, self.count
        share = max(1, self.count // ranks)
        whole = share * ranks
        return {
            "all_gather": (share, whole),
            "gather": (share, whole if rank == 0 else 0),
            "reduce_scatter": (whole, share),
            "scatter": (whole if rank == 0 else 0, share),
            "all_to_all": (whole, whole),
        }[self.operation]


def parse(text: str) -> Case:
    """`64 KiB`, `4B`, `64 x 1 KiB`, which are all_reduce; `broadcast 1 MiB`; `barrier`.

    Raises:
        ValueError: it is not of that form, or no whole number of float32.
    """
    if text.strip() == BARRIER:
        return Case(1, 0, BARRIER)
    found = _NAME.fullmatch(text.strip())
    if not found or found[1] not in (None, ALL_REDUCE, *MOVING):
        raise ValueError(
            f"size {text!r} is not understood: expected such as '4 B', '64 KiB', '16 MiB', '64 x 1 KiB', "
            f"'broadcast 64 KiB', or barrier; operations are {', '.join(OPERATIONS)}"
        )
    size = int(found[3]) * _UNITS[found[4]]
    if size % ITEM or not size:
        raise ValueError(f"size {text!r} is no whole number of float32: expected a positive multiple of {ITEM} bytes")
    operation, tensors = found[1] or ALL_REDUCE, int(found[2] or 1)
    if tensors != 1 and operation != ALL_REDUCE:
        raise ValueError(f"{text!r}: expected one array; only all_reduce is measured with many in one call")
    return Case(tensors, size // ITEM, operation)


MANY = parse("64 x 1 KiB")
SIZES = (*map(parse, ("4 B", "1 KiB", "64 KiB", "1 MiB", "16 MiB", "64 MiB")), MANY)
OTHERS = (
    *(parse(f"{name} {size}") for name in MOVING for size in ("4 B", "64 KiB", "1 MiB", "16 MiB", "64 MiB")),
    parse(BARRIER),
)
ALL = (*SIZES, *OTHERS)


def base(case: Case, ranks: int) -> Array:
    """As many numbers as the longest input has, and at least."""
    return (np.arange(case.count + ranks) % 8).astype(np.float32)


def fill(array: Array, base: Array, rank: int, factor: float) -> None:
    """Puts into `array` what `rank` contributes."""
    np.add(base[: array.size], np.float32(rank + 1), out=array)
    np.multiply(array, np.float32(factor), out=array)


def expected(case: Case, base: Array, rank: int, ranks: int, factor: float) -> Array:
    """The right result of `rank` for each array."""
    gives, gets = case.counts(rank, ranks)
    mine = slice(rank * gets, rank * gets + gets)
    if case.operation in (ALL_REDUCE, "reduce_scatter"):
        total = (base[:gives] * np.float32(ranks) + np.float32(ranks * (ranks + 1) / 2)) * np.float32(factor)
        return total if case.operation == ALL_REDUCE else total[mine]

    def given(sender: int) -> Array:
        array = np.empty(case.counts(sender, ranks)[0], np.float32)
        fill(array, base, sender, factor)
        return array

    if case.operation in ("broadcast", BARRIER):
        return given(0)
    if case.operation == "scatter":
        return given(0)[mine]
    if case.operation == SEND_RECV:
        return given(rank ^ 1)
    if case.operation == "all_to_all":
        share = gets // ranks
        return np.concatenate([given(sender)[rank * share : (rank + 1) * share] for sender in range(ranks)])
    return np.concatenate([given(sender) for sender in range(ranks)]) if gets else given(rank)[:0]


def wrong(result: Array, expected: Array) -> int:
    """How many elements of `result` are not as expected; all of them where there are too many or too few."""
    if result.shape != expected.shape:
        return max(1, result.size)
    return int(np.count_nonzero(result != expected))


def factor_of(turn: int) -> float:
    """Buffers hold other numbers each turn, so that no library can pass with an old result."""
    return float(2 ** (turn % 5))
