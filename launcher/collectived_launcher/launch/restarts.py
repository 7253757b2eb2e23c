"""When a daemon that ended by itself is started again: after a pause that doubles, and only so often.

    serving ── it ended ──► waiting ── it is `restart_at` ──► starting ── it serves ──► serving
                               ▲                                 │
                               └── it ended, or was killed at `ready_deadline`

No clock, no process in here: times are seconds of the launcher's monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

DEFAULT_MAX_RESTARTS = 5  # restarts within the window, unless the user wishes otherwise
INITIAL_BACKOFF = 0.2  # seconds
MAX_BACKOFF = 10.0
WINDOW = 300.0  # seconds that count: what happened before them is forgotten
_MAX_DOUBLINGS = 32  # the pause is the longest long before


@dataclass(frozen=True, slots=True)
class DaemonRestartState:
    """One daemon, and the times at which it was started again within the window."""

    restart_times: tuple[float, ...] = ()
    restart_at: float | None = None  # it has ended, and is to be started again
    ready_deadline: float | None = None  # it was started again, and does not serve yet

    @property
    def is_serving(self) -> bool:
        return self.restart_at is None and self.ready_deadline is None

    @property
    def next_deadline(self) -> float:
        """When something is to be done about it; `math.inf` for never."""
        return min(math.inf if time is None else time for time in (self.restart_at, self.ready_deadline))


def compute_backoff(count: int, chance: float) -> float:
    """Seconds between the end of a daemon and its restart number `count` within the window, from 1.

    Args:
        chance: in [0, 1). Up to half of the pause is taken off by it, so that daemons which ended together do not all
            come back in one moment.
    """
    longest = min(MAX_BACKOFF, math.ldexp(INITIAL_BACKOFF, min(count - 1, _MAX_DOUBLINGS)))
    return longest * (1 - chance / 2)


def record_exit(daemon: DaemonRestartState, most: int, chance: float, now: float) -> DaemonRestartState | None:
    """A daemon has ended by itself; None where it has been started again `most` times within the window."""
    recent = tuple(time for time in daemon.restart_times if time > now - WINDOW)
    if len(recent) >= most:
        return None
    return DaemonRestartState(recent, restart_at=now + compute_backoff(len(recent) + 1, chance))


def record_restart(daemon: DaemonRestartState, ready_within: float, now: float) -> DaemonRestartState:
    """It has been started again, and has `ready_timeout` seconds to serve."""
    return DaemonRestartState((*daemon.restart_times, now), ready_deadline=now + ready_within)


def record_ready_timeout(daemon: DaemonRestartState) -> DaemonRestartState:
    """It has not come to serve in time and is being killed; its end follows."""
    return replace(daemon, ready_deadline=math.inf)


def record_ready(daemon: DaemonRestartState) -> DaemonRestartState:
    """It serves."""
    return replace(daemon, ready_deadline=None)
