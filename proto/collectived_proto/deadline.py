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


def check_drain_timeout(seconds: float) -> None:
    """Refuse what no clock can count to: a timer at NaN would hold up all that come after it.

    Raises:
        InvalidArgumentError: it is negative, NaN or more than a year.
    """
    if not 0.0 <= seconds <= MAX_DRAIN_SECONDS:
        raise InvalidArgumentError(
            f"a drain's timeout_seconds must be a number from 0 to {MAX_DRAIN_SECONDS:.0f} (a year), got {seconds!r}"
        )
