"""The numbers that ranks with GPUs sum, and what must come out.

Rank r holds `i % 8 + r + 1`, so every sum is a small whole number, and exact. Arrays may be DeviceArrays, or of any
library that collectives take; they are filled and looked at in pieces, for the host need not hold all of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived.gpu.array import DeviceArray
from collectived.gpu.driver import get_cuda
from collectived.values.leaves import kind_of

ITEM = 4  # bytes of a float32
_PERIOD = 8
_PIECE = 4 << 20  # elements that are filled at a time
_WINDOW = 1024  # elements that are looked at: at the beginning, in the middle and at the end


def fill(array: Any, rank: int) -> None:
    """Put the contribution of a rank into an array of one axis, and wait until it is there."""
    view = view_of(array)
    numbers = (np.arange(min(len_of(view), _PIECE)) % _PERIOD + rank + 1).astype(np.float32)
    for start in range(0, len_of(view), _PIECE):
        write(part_of(view, start, min(start + _PIECE, len_of(view))), numbers)


def count_wrong(array: Any, ranks: int) -> int:
    """How many elements of a result are not the sum over the ranks, of those that are looked at. Waits for it."""
    view = view_of(array)
    wrong = 0
    for start, stop in windows(len_of(view)):
        expected = ranks * (np.arange(start, stop) % _PERIOD) + ranks * (ranks + 1) / 2
        wrong += int(np.count_nonzero(np.asarray(part_of(view, start, stop)) != expected))
    return wrong


def windows(length: int) -> Iterator[tuple[int, int]]:
    """Where an array of that length is looked at; all of a short one. Pure."""
    if length <= 3 * _WINDOW:
        yield 0, length
        return
    for start in (0, (length - _WINDOW) // 2, length - _WINDOW):
        yield start, start + _WINDOW


def view_of(array: Any) -> Any:
    """An array of any library as one that looks into it: on a GPU a DeviceArray, else NumPy's."""
    return array if isinstance(array, DeviceArray) else kind_of(array).to_array(array)


def len_of(view: NDArray[Any] | DeviceArray) -> int:
    return int(view.shape[0])


def part_of(view: NDArray[Any] | DeviceArray, start: int, stop: int) -> Any:
    """Elements [start, stop) of an array of one axis, without a copy."""
    if not isinstance(view, DeviceArray):
        return view[start:stop]
    address = view.address + start * view.dtype.itemsize
    return DeviceArray(get_cuda(), view.device, address, (stop - start,), view.dtype, view, view.stream)


def write(part: Any, numbers: NDArray[Any]) -> None:
    """Copies the first of these numbers there, as many as it takes."""
    if isinstance(part, DeviceArray):
        part.assign(numbers[: len_of(part)])
    else:
        part[:] = numbers[: len_of(part)]
