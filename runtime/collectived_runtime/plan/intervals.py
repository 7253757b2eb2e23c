"""A set of elements as disjoint runs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Intervals:
    """A set of elements, kept as few disjoint runs."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def overlaps(self, start: int, stop: int) -> bool:
        at = bisect_right(self._stops, start)
        return start < stop and at < len(self._starts) and self._starts[at] < stop

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and (self._starts, self._stops) == (other._starts, other._stops)

    def covers(self, start: int, stop: int) -> bool:
        at = bisect_right(self._stops, start)
        return start >= stop or (at < len(self._starts) and self._starts[at] <= start and stop <= self._stops[at])
