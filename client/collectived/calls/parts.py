"""Copies a result to where the caller wants it while the rest of it is still coming."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from collectived.values.copying import STREAMED_BYTES, copy_into, find_copy
from collectived.values.leaves import Array


class TargetBytes(NamedTuple):
    """Bytes from `start` on, counted from where the result begins, belong into `target`, which is as long."""

    start: int
    target: Array

    @property
    def stop(self) -> int:
        return self.start + len(self.target)


def as_bytes(array: Array) -> Array | None:
    """The bytes of an array as they lie; None where they do not lie side by side."""
    return array.reshape(-1).view(np.uint8) if array.flags.c_contiguous else None


class PartwiseCopy:
    """One result on its way: its segments, and which bytes have been copied.

    Args:
        memory, offset: where the result begins.
    """

    def __init__(self, memory: Any, offset: int, segments: Iterable[TargetBytes]) -> None:
        self._memory = memory
        self._offset = offset
        self._segments = tuple(segment for segment in segments if len(segment.target))
        self._copied: list[tuple[int, int]] = []  # apart from each other, in order
        self.end = max((segment.stop for segment in self._segments), default=0)
        streamed = find_copy(streamed=True) if self.end >= STREAMED_BYTES else None
        self._copy = streamed or copy_into

    def copy(self, start: int, stop: int) -> None:
        """Bytes [start, stop) are there: copies those of them that have not been copied."""
        for first, last in self._find_gaps(start, min(stop, self.end)):
            for segment in self._segments:
                begin, finish = max(first, segment.start), min(last, segment.stop)
                if begin < finish:
                    source = np.ndarray((finish - begin,), np.uint8, self._memory, self._offset + begin)
                    self._copy(segment.target[begin - segment.start : finish - segment.start], source)
        self._copied = _merge(sorted([*self._copied, (start, stop)]))

    def finish(self) -> None:
        """All of it is there: copies the rest."""
        self.copy(0, self.end)

    def _find_gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        gaps = []
        for first, last in self._copied:
            if start < min(first, stop):
                gaps.append((start, min(first, stop)))
            start = max(start, last)
        return [*gaps, (start, stop)] if start < stop else gaps


def _merge(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found
