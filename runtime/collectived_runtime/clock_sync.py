"""How the monotonic clocks of two processes stand to each other, as NTP finds it.

An *exchange* has four times: one side sent a request and got the answer by its clock, the other received and answered
it by its own. Had both ways taken the same time, the offset would be exact; however they differ, it is wrong by at most
half of the round trip. Clocks of different machines run at slightly different speeds, so an old exchange is worth less.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

DRIFT = 100e-6  # seconds per second by which two clocks run apart at most
MAX_OFFSETS = 8  # exchanges
INITIAL_ECHOES = 8  # so many heartbeats ask for an echo at first
ECHO_INTERVAL = 6  # and one in so many later


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Seconds to add to a time of the other clock to get this clock's; `measured_at`: when, by this clock."""

    seconds: float
    round_trip: float
    measured_at: float

    def error(self, now: float) -> float:
        """Seconds that it may be wrong by now, at most."""
        return self.round_trip / 2 + DRIFT * max(0.0, now - self.measured_at)


def compute_offset(sent: float, heard: float, answered: float, returned: float) -> ClockOffset:
    """From one exchange.

    Args:
        sent, returned: by this clock. heard, answered: by the other one.
    """
    round_trip = max(0.0, (returned - sent) - (answered - heard))
    return ClockOffset(((sent - heard) + (returned - answered)) / 2, round_trip, returned)


class ClockEstimator:
    """A worker's estimate of the coordinator's clock, from the echoes of its heartbeats."""

    def __init__(self) -> None:
        self._offsets: deque[ClockOffset] = deque(maxlen=MAX_OFFSETS)
        self._heartbeat_count = 0
        self._awaited_sent_at = 0.0

    def forget(self) -> None:
        """Forget what was measured: another coordinator may answer from now on."""
        self._offsets.clear()
        self._heartbeat_count, self._awaited_sent_at = 0, 0.0

    def on_heartbeat(self, now: float) -> float:
        """A heartbeat is sent: when, if an echo is wanted; else 0."""
        self._heartbeat_count += 1
        self._awaited_sent_at = (
            now if self._heartbeat_count <= INITIAL_ECHOES or self._heartbeat_count % ECHO_INTERVAL == 0 else 0.0
        )
        return self._awaited_sent_at

    def on_echo(self, sent: float, at: float, now: float) -> None:
        """The echo of a heartbeat: it came to the coordinator `at` that time of its clock."""
        if sent and sent == self._awaited_sent_at:
            self._offsets.append(compute_offset(sent, at, at, now))

    def best_offset(self, now: float) -> ClockOffset | None:
        return min(self._offsets, key=lambda found: found.error(now), default=None)


def clock_id() -> str:
    """Which monotonic clock this process reads: two that give the same name read the same one. '' where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""
