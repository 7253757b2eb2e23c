"""Slots in an arena: first fit over a sorted free list. Pure; offsets and lengths only."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64  # a cache line, so that slots of different ranks never share one


class FreeList:
    """Free and used ranges of `size` bytes. Invariant: free ranges are sorted, disjoint and never adjacent."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._starts = [0] if size else []
        self._ends = [size] if size else []
        self._lengths: dict[int, int] = {}

    def allocate(self, length: int) -> int | None:
        """Offset of a free range of `length` bytes, now used; None where there is none. An empty one takes a line."""
        length = max(ALIGNMENT, -(-length // ALIGNMENT) * ALIGNMENT)
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= length:
                if end - start == length:
                    del self._starts[index], self._ends[index]
                else:
                    self._starts[index] = start + length
                self._lengths[start] = length
                self.used += length
                return start
        return None

    def free(self, start: int) -> None:
        """Frees the range that began at `start`.

        Raises:
            KeyError: nothing that is in use begins there.
        """
        length = self._lengths.pop(start)
        self.used -= length
        end = start + length
        index = bisect_left(self._starts, start)
        joins_left = index > 0 and self._ends[index - 1] == start
        joins_right = index < len(self._starts) and self._starts[index] == end
        if joins_left and joins_right:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif joins_left:
            self._ends[index - 1] = end
        elif joins_right:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
