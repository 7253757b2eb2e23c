"""When a daemon that ended by itself is started again: after a pause that doubles, and only so often.

    serving ── it ended ──► waiting until `due` ── the pause is over ──► starting ── it serves ──► serving
                               ▲                                            │
                               └── it ended, or was killed at `ready_by` ───┘

No clock, no process in here: times are seconds of the launcher's monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MOST = 5  # restarts within the window, unless the user wishes otherwise
FIRST_PAUSE = 0.2  # seconds
LONGEST_PAUSE = 10.0
WINDOW = 300.0  # seconds that count: what happened before them is forgotten
_ENOUGH_DOUBLING = 32  # the pause is the longest long before


@dataclass(frozen=True, slots=True)
class Watched:
    """One daemon, and the times at which it was started again within the window."""

    restarts: tuple[float, ...] = ()
    due: float | None = None  # it has ended, and is to be started again
    ready_by: float | None = None  # it was started again, and does not serve yet

    @property
    def serves(self) -> bool:
        return self.due is None and self.ready_by is None

    @property
    def wakeup(self) -> float:
        """When something is to be done about it; `math.inf` for never."""
        return min(math.inf if time is None else time for time in (self.due, self.ready_by))


def pause(count: int, chance: float) -> float:
    """Seconds between the end of a daemon and its restart number `count` within the window, from 1.

    Args:
        chance: in [0, 1). Up to half of the pause is taken off by it, so that daemons which ended together do not all
            come back in one moment.
    """
    longest = min(LONGEST_PAUSE, math.ldexp(FIRST_PAUSE, min(count - 1, _ENOUGH_DOUBLING)))
    return longest * (1 - chance / 2)


def ended(daemon: Watched, most: int, chance: float, now: float) -> Watched | None:
    """A daemon has ended by itself; None where it has been started again `most` times within the window."""
    recent = tuple(time for time in daemon.restarts if time > now - WINDOW)
    if len(recent) >= most:
        return None
    return Watched(recent, due=now + pause(len(recent) + 1, chance))


def started(daemon: Watched, ready_within: float, now: float) -> Watched:
    """It has been started again, and has `ready_within` seconds to serve."""
    return Watched((*daemon.restarts, now), ready_by=now + ready_within)


def late(daemon: Watched) -> Watched:
    """It has not come to serve in time and is being killed; what follows is its end."""
    return replace(daemon, ready_by=math.inf)


def ready(daemon: Watched) -> Watched:
    """It serves."""
    return replace(daemon, ready_by=None)
