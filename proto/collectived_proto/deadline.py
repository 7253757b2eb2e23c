"""A deadline: a point of this process's monotonic clock, made once at the edge and handed down.

On the wire a deadline is the remaining time in seconds; 0 there, and None here, mean that there is none.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from collectived_proto.errors import InvalidArgumentError

MAX_DRAIN_SECONDS = 365 * 86_400.0


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    at: float = math.inf

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """That many seconds from now; None and 0 mean never."""
        return cls(time.monotonic() + seconds) if seconds else cls()

    @property
    def is_set(self) -> bool:
        return self.at != math.inf

    def remaining(self) -> float:
        """Seconds left, never negative; inf where there is no deadline."""
        return max(0.0, self.at - time.monotonic())

    def to_wire(self) -> float:
        """Remaining time for a message: 0 for none, else positive even when it has just passed."""
        return max(1e-6, self.remaining()) if self.is_set else 0.0


class Patience:
    """A wait for another process, after which one goes on without it: longer where this machine is late.

    It consists of steps, and a step counts once, however late its end is seen. A busy machine that delays
    this process delays the other one too. The other process is then given so much longer.

    Attributes:
        at: when the current step ends, by the clock of `time.monotonic`.
    """

    __slots__ = ("_step", "_steps_left", "at")

    def __init__(self, seconds: float, begin: float, steps: int) -> None:
        self._step = seconds / steps
        self._steps_left = steps
        self.at = begin + self._step

    @property
    def end(self) -> float:
        """When the wait is over unless this process is late."""
        return self.at + (self._steps_left - 1) * self._step

    def is_over(self, now: float) -> bool:
        """Note that this process looks; to be called at `at`, and at any other time."""
        if now >= self.at and self._steps_left > 0:
            self._steps_left -= 1
            self.at = now + self._step
        return self._steps_left <= 0

    @property
    def is_ending(self) -> bool:
        """Whether this is the last step."""
        return self._steps_left == 1

    def skip(self, now: float) -> None:
        """Note that this process was not to look before: what has passed by the clock has passed, but for the end."""
        while now >= self.at and self._steps_left > 2:
            self._steps_left -= 1
            self.at += self._step


def check_drain_timeout(seconds: float) -> None:
    """Refuse what no clock can count to: a timer at NaN would hold up all that come after it.

    Raises:
        InvalidArgumentError: it is negative, NaN or more than a year.
    """
    if not 0.0 <= seconds <= MAX_DRAIN_SECONDS:
        raise InvalidArgumentError(
            f"a drain's timeout_seconds must be a number from 0 to {MAX_DRAIN_SECONDS:.0f} (a year), got {seconds!r}"
        )
