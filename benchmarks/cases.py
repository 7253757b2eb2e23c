"""What is summed: sizes, the numbers in the buffers, and what must come out. Pure.

Every buffer of rank r holds `(i % 8 + r + 1) * factor`, so every sum is a small whole number times a power of two, and
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
_NAME = re.compile(r"(?:(\d+) ?x ?)?(\d+) ?(B|KiB|MiB)")


@dataclass(frozen=True, slots=True)
class Case:
    """`tensors` arrays of `count` float32 in one call."""

    tensors: int
    count: int

    @property
    def size(self) -> int:
        """Bytes of one call on one rank."""
        return self.tensors * self.count * ITEM

    def __str__(self) -> str:
        bytes_each = self.count * ITEM
        unit = max((unit for unit, size in _UNITS.items() if bytes_each % size == 0), key=lambda unit: _UNITS[unit])
        each = f"{bytes_each // _UNITS[unit]} {unit}"
        return each if self.tensors == 1 else f"{self.tensors} x {each}"


def parse(text: str) -> Case:
    """`64 KiB`, `4B`, `64 x 1 KiB`.

    Raises:
        ValueError: it is not of that form, or no whole number of float32.
    """
    found = _NAME.fullmatch(text.strip())
    if not found:
        raise ValueError(f"size {text!r} is not understood: expected such as '4 B', '64 KiB', '16 MiB', '64 x 1 KiB'")
    size = int(found[2]) * _UNITS[found[3]]
    if size % ITEM or not size:
        raise ValueError(f"size {text!r} is no whole number of float32: expected a positive multiple of {ITEM} bytes")
    return Case(int(found[1] or 1), size // ITEM)


MANY = parse("64 x 1 KiB")
ALL = (*map(parse, ("4 B", "1 KiB", "64 KiB", "1 MiB", "16 MiB", "64 MiB")), MANY)


def base(case: Case) -> Array:
    return (np.arange(case.count) % 8).astype(np.float32)


def fill(array: Array, base: Array, rank: int, factor: float) -> None:
    """Puts into `array` what `rank` contributes."""
    np.add(base, np.float32(rank + 1), out=array)
    np.multiply(array, np.float32(factor), out=array)


def wrong(result: Array, base: Array, ranks: int, factor: float) -> int:
    """How many elements of `result` are not what the ranks' buffers sum up to."""
    expected = (base * np.float32(ranks) + np.float32(ranks * (ranks + 1) / 2)) * np.float32(factor)
    return int(np.count_nonzero(result != expected))


def factor_of(turn: int) -> float:
    """Buffers hold other numbers each turn, so that nobody can pass with an old result."""
    return float(2 ** (turn % 5))
