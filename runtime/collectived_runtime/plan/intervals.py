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
        starts, stops = self._starts, self._stops
        first, last = bisect_left(stops, start), bisect_right(starts, stop)
        if first == last:
            starts.insert(first, start)
            stops.insert(first, stop)
            return
        # The runs from `first` to `last` touch what is added: they become one, which is most often one already.
        if start < starts[first]:
            starts[first] = start
        stops[first] = max(stop, stops[last - 1])
        if last - first > 1:
            del starts[first + 1 : last], stops[first + 1 : last]

    def overlaps(self, start: int, stop: int) -> bool:
        stops = self._stops
        if not stops or start >= stops[-1] or start >= stop:
            return False
        return self._starts[bisect_right(stops, start)] < stop

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and (self._starts, self._stops) == (other._starts, other._stops)

    def covers(self, start: int, stop: int) -> bool:
        at = bisect_right(self._stops, start)
        return start >= stop or (at < len(self._starts) and self._starts[at] <= start and stop <= self._stops[at])
