"""Looking for a moment before sleeping, where there are cores to spare.

A thread that sleeps in a poll is woken within some 5 µs by a kernel on bare metal and some 40 µs in a virtual machine;
a thread that looks again and again notices within one. But it keeps a core busy that others may need. So a thread spins
on hosts with cores to spare, only for as long as a small collective takes, and less and less where spinning is in vain.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, Protocol

MAX_SPIN_SECONDS = 50e-6  # seconds
MIN_SPIN_SECONDS = 2e-6  # below which it is not worth while
RETRY_AFTER = 64  # waits without looking, after which it is tried again


class Poll(Protocol):
    def poll(self, timeout: float | None = None, /) -> list[Any]: ...


class AdaptiveSpin:
    """How long one waiter looks.

    Attributes:
        budget: in seconds, the next time.
    """

    def __init__(self) -> None:
        self.budget = MAX_SPIN_SECONDS
        self._skipped = 0

    def poll(self, poll: Poll, longest: float) -> list[Any]:
        """The events that `poll` finds within the budget, and at most within `longest` seconds; [] for none."""
        if self.budget < MIN_SPIN_SECONDS:
            self._skipped += 1
            if self._skipped < RETRY_AFTER:
                return []
            self._skipped, self.budget = 0, MIN_SPIN_SECONDS
        end = perf_counter() + min(self.budget, longest)
        while True:
            found = poll.poll(0)
            if found:
                self.budget = min(MAX_SPIN_SECONDS, 2 * self.budget)
                return found
            if perf_counter() >= end:
                self.budget /= 2
                return []
