"""Which of many arrays lie over one another in memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate

from collectived.values.leaves import Array


class Spans:
    """The memory of contiguous arrays, by number. Looking one up takes a moment, however many there are."""

    def __init__(self, arrays: Mapping[int, Array]) -> None:
        self._by_number = {number: _find_span(array) for number, array in arrays.items()}
        ordered = sorted((begin, end, number) for number, (begin, end) in self._by_number.items() if begin < end)
        self._begins = [begin for begin, _, _ in ordered]
        self._ends = [end for _, end, _ in ordered]
        self._numbers = [number for _, _, number in ordered]
        self._highest = list(accumulate(self._ends, max))  # end of those up to each

    def find_overlapping(self, array: Array) -> list[int]:
        """Return the numbers of those that share a byte with `array`."""
        begin, end = _find_span(array)
        found = []
        at = bisect_left(self._begins, end) - 1 if begin < end else -1
        while at >= 0 and self._highest[at] > begin:
            if self._ends[at] > begin:
                found.append(self._numbers[at])
            at -= 1
        return found

    def is_same(self, number: int, array: Array) -> bool:
        """Whether the array of that number takes the same bytes as `array`."""
        return self._by_number[number] == _find_span(array)


def _find_span(array: Array) -> tuple[int, int]:
    begin: int = array.__array_interface__["data"][0]
    return begin, begin + array.nbytes
