"""When a lane is to look again though nothing has happened: for what only waits for a time."""

from __future__ import annotations

import heapq
import math


class Alarms:
    """Of a lane, in its thread. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def at(self, when: float) -> None:
        heapq.heappush(self._times, when)

    @property
    def wakeup(self) -> float:
        """The first that is to come; inf: none is."""
        return self._times[0] if self._times else math.inf

    def due(self, now: float) -> None:
        """The lane looks now."""
        while self._times and self._times[0] <= now:
            heapq.heappop(self._times)
