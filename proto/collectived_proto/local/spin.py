"""Looking for a moment before sleeping, where there are cores to spare.

Somebody who sleeps in a poll is woken within some 5 µs by a kernel on bare metal and some 40 µs in a virtual machine;
somebody who looks again and again notices within one. But whoever looks keeps a core busy that others may need: so only
hosts with cores to spare do, only for as long as a small collective takes, and less and less where nothing came of it.
"""

from __future__ import annotations

import os
from time import perf_counter
from typing import Any, Protocol

LONGEST = 50e-6  # seconds
SHORTEST = 2e-6  # below which it is not worth while
AGAIN_AFTER = 64  # waits without looking, after which it is tried again


class Poll(Protocol):
    def poll(self, timeout: float | None = None, /) -> list[Any]: ...


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class Spin:
    """How long one waiter looks.

    Attributes:
        budget: in seconds, the next time.
    """

    def __init__(self) -> None:
        self.budget = LONGEST
        self._rested = 0

    def look(self, poll: Poll, longest: float) -> list[Any]:
        """What `poll` finds within the budget, and at most within `longest` seconds; [] where that is nothing."""
        if self.budget < SHORTEST:
            self._rested += 1
            if self._rested < AGAIN_AFTER:
                return []
            self._rested, self.budget = 0, SHORTEST
        end = perf_counter() + min(self.budget, longest)
        while True:
            found = poll.poll(0)
            if found:
                self.budget = min(LONGEST, 2 * self.budget)
                return found
            if perf_counter() >= end:
                self.budget /= 2
                return []
