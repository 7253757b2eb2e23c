"""The latest instances of a segment, one by one, as its ranks remember them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from collectived_native.segment import Past

_MOST_READ = 1024  # of all ranks together, in one look
_NS = 1_000_000_000


class PastArrival(NamedTuple):
    """When a rank submitted an instance, by the monotonic clock, and the number of its description."""

    rank: int
    at: float
    description: int


class PastInstance(NamedTuple):
    """An instance that is complete. `arrivals`: in their order. `ended_at`: when the last of these ranks had it."""

    number: int
    arrivals: tuple[PastArrival, ...]
    ended_at: float


class SegmentHistory:
    """Turns the memories of a segment's ranks into instances, each reported once.

    Ranks remember the latest few hundred, and one look reads no more than `_MOST_READ` entries: a group that does more
    between two looks is reported in part.

    Args:
        start: number of the first instance.
    """

    def __init__(self, ranks: Collection[int], start: int) -> None:
        self._size = len(ranks)
        self._next = start

    def find_first(self, complete: int) -> int:
        """Return from which instance on ranks are to be read, where `complete` is the first that is not."""
        return max(self._next, complete - max(1, _MOST_READ // self._size))

    def take(
        self, pasts: Mapping[int, Iterable[Past]], complete: int, now: float, is_over: bool = False
    ) -> list[PastInstance]:
        """Return what is new.

        Args:
            pasts: by rank, from `find_first` on to `complete`.
            is_over: no rank will add anything.
        """
        remembered: dict[int, list[tuple[int, Past]]] = {}
        for rank, kept in pasts.items():
            for past in kept:
                remembered.setdefault(past.instance, []).append((rank, past))
        found = []
        for number in sorted(number for number in remembered if self._next <= number < complete):
            entries = remembered[number]
            # No rank begins an instance before it has ended the one before: of the last alone more may be to come.
            if number == complete - 1 and len(entries) < self._size and not is_over:
                break
            arrivals = [PastArrival(rank, _clamp(past.began, now), past.description) for rank, past in entries]
            arrivals.sort(key=lambda one: one.at)
            ended_at = max(arrivals[-1].at, *(_clamp(past.ended, now) for _, past in entries))
            found.append(PastInstance(number, tuple(arrivals), ended_at))
            self._next = number + 1
        return found


def _clamp(nanoseconds: int, now: float) -> float:
    return min(nanoseconds / _NS, now)
