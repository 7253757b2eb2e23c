"""The work of a group in a segment, counted once, by the counts of one of its seats."""

from __future__ import annotations

from collections.abc import Iterable

from collectived_native import core
from collectived_native.segment import Total

_MOST_BYTES = 1 << 44  # of one value: what is beyond it, a process has made up
_MOST_NANOSECONDS = 1 << 53
_MOST_MESSAGES = 1 << 32  # between two looks
_MESSAGES = (core.SENDS, core.RECEIVES)


class SegmentTotals:
    """Turns the totals of a seat, which its process wrote, into what has been done since the last look.

    There are never more calls than instances of the segment that are complete, and once `settle` was called exactly so
    many. A process that writes other numbers changes only how they are divided among operations.

    Args:
        start: number of the first instance.
    """

    def __init__(self, start: int) -> None:
        self._start = start
        self._counted = 0
        self._seen: dict[tuple[int, int], Total] = {}

    def take(self, totals: Iterable[Total], complete: int) -> list[Total]:
        """Return what the seat has added.

        Args:
            totals: of the seat, read before `complete`.
            complete: the number of the first instance that is not.
        """
        gained = []
        for total in totals:
            if total.operation in _MESSAGES:
                continue
            key = total.description, total.operation
            before = self._seen.get(key, Total(*key, 0, 0, 0))
            calls = min(total.calls - before.calls, complete - self._start - self._counted)
            if calls <= 0:
                continue
            self._counted += calls
            nbytes = _clamp(total.bytes - before.bytes, calls * _MOST_BYTES)
            nanoseconds = _clamp(total.nanoseconds - before.nanoseconds, _MOST_NANOSECONDS)
            self._seen[key] = total._replace(calls=before.calls + calls)
            gained.append(Total(*key, calls, nbytes, nanoseconds))
        return gained

    def settle(self, complete: int) -> int:
        """Return how many complete instances the seat has not counted, which will not count them any more."""
        missing = max(0, complete - self._start - self._counted)
        self._counted += missing
        return missing


class MessageTotals:
    """The same of sends and receives, of which each seat has its own."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], Total] = {}  # by seat and operation

    def take(self, seat: int, totals: Iterable[Total]) -> list[Total]:
        """Return what a seat has added."""
        gained = []
        for total in totals:
            if total.operation not in _MESSAGES:
                continue
            key = seat, total.operation
            before = self._seen.get(key, Total(-1, total.operation, 0, 0, 0))
            calls = _clamp(total.calls - before.calls, _MOST_MESSAGES)
            if calls:
                nbytes = _clamp(total.bytes - before.bytes, calls * _MOST_BYTES)
                nanoseconds = _clamp(total.nanoseconds - before.nanoseconds, _MOST_NANOSECONDS)
                self._seen[key] = total
                gained.append(Total(-1, total.operation, calls, nbytes, nanoseconds))
        return gained


def _clamp(number: int, most: int) -> int:
    return max(0, min(number, most))
