"""Pace: how often a caller may ask. A caller that asks more often waits, and no other one does.

A refusal would cost as much as an answer, and a caller that floods would only ask again: so calls beyond the pace are
held back instead. Pure but for the clock that is given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

MAX_DELAY_SECONDS = 5.0  # that a call is held back: a caller that gives up and asks again makes it no longer for others
MAX_CALLERS = 4096  # that are remembered; the one that has been quiet for longest is forgotten


@dataclass(frozen=True, slots=True)
class Rate:
    """`burst` calls at once, and `per_second` in the long run."""

    per_second: float
    burst: int


class RateLimiter:
    """One pace for each caller, of a rate that all have."""

    def __init__(self, rate: Rate, most: int = MAX_CALLERS) -> None:
        self._rate = rate
        self._max_callers = most
        # When the calls of a caller so far would be over at its rate. Earlier than a burst ago is as good as never.
        self._paid_until: OrderedDict[Hashable, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._paid_until)

    def reserve(self, caller: Hashable, now: float, cost: float = 1.0) -> float:
        """Seconds until the call that comes now has its turn; it is counted, as so many calls as it costs."""
        burst = self._rate.burst / self._rate.per_second
        due = max(self._paid_until.pop(caller, now - burst), now - burst) + cost / self._rate.per_second
        self._paid_until[caller] = due = min(due, now + MAX_DELAY_SECONDS)
        if len(self._paid_until) > self._max_callers:
            self._paid_until.popitem(last=False)
        return max(0.0, due - now)

    def forget(self, caller: Hashable) -> None:
        self._paid_until.pop(caller, None)
