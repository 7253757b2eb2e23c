"""How long a caller wants to wait: what errors quote, and the deadline that was made of it."""

from __future__ import annotations

import math
import threading
from datetime import timedelta
from typing import NamedTuple, Self

from collectived_proto.deadline import Deadline
from collectived_proto.options import to_seconds

DEADLINE_GRACE = (
    0.21  # seconds after its deadline in which the worker may still answer a call; within 0.25 it has ended
)
GRACE_STEPS = 7  # of that, each of which counts once on a machine that is late: see `Patience`
MOST_RENEWALS = 4  # times that it begins anew for a worker that answers, and has not said yet what it is to say
MAX_REASON_LENGTH = 4096  # characters of what an abort says

_MIN_SECONDS = 0.01  # seconds for what must be tried once at least; 0 means something else to sockets


class Timeout(NamedTuple):
    """Made once, where the caller gives a timeout, and handed down.

    Attributes:
        requested_seconds: seconds, as the caller gave them; inf for none.
        deadline: when they are over.
    """

    requested_seconds: float
    deadline: Deadline

    @classmethod
    def of(cls, timeout: float | timedelta | None) -> Self:
        """
        Raises:
            TypeError, ValueError: it is no number of seconds, or negative.
        """
        asked = to_seconds(timeout, "timeout") or math.inf
        return cls(asked, Deadline.after(asked))

    @property
    def remaining(self) -> float:
        """Seconds left, positive, and not more than sockets take."""
        return min(max(_MIN_SECONDS, self.deadline.remaining()), threading.TIMEOUT_MAX)

    def at_most(self, most: float) -> Self:
        """The same, but not longer than so many seconds from now."""
        return self if self.deadline.remaining() <= most else type(self)(most, Deadline.after(most))
