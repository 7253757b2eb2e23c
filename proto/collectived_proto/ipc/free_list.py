"""Slots in an arena: first fit over a sorted free list. Pure; offsets and lengths only."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64  # a cache line, so that slots of different ranks never share one


class FreeList:
    """Free and used ranges of `size` bytes. Invariant: free ranges are sorted, disjoint and never adjacent.

    The list of free ranges changes in one step each time: an error before or after, such as KeyboardInterrupt, may
    lose a range, but never lets two ranges overlap.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)] if size else []
        self._lengths: dict[int, int] = {}

    @property
    def is_unused(self) -> bool:
        return not self._lengths

    def allocate(self, length: int) -> int | None:
        """Offset of a free range of `length` bytes, now used; None where there is none. An empty one takes a line."""
        length = max(ALIGNMENT, -(-length // ALIGNMENT) * ALIGNMENT)
        for index, (start, end) in enumerate(self._free):
            if end - start >= length:
                self._free[index : index + 1] = [(start + length, end)] if end - start > length else []
                self._lengths[start] = length
                return start
        return None

    def free(self, start: int) -> None:
        """Frees the range that began at `start`.

        Raises:
            KeyError: nothing that is in use begins there.
        """
        length = self._lengths.pop(start)
        first, end = start, start + length
        low = high = bisect_left(self._free, (start,))
        if low and self._free[low - 1][1] == start:
            low -= 1
            first = self._free[low][0]
        if high < len(self._free) and self._free[high][0] == end:
            end = self._free[high][1]
            high += 1
        self._free[low:high] = [(first, end)]
