"""Whether hosts still answer that somebody waits for: of several, the first that does not."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from collectived_runtime.transport.link import Link, LinkRefused
from collectived_runtime.transport.path import measure_silence

_LOOKS_PER_TIMEOUT = 4


class PathWatch:
    """Looks at links from time to time, while somebody waits for them.

    Args:
        timeout: seconds without an answer after which a path is dead.

    Attributes:
        next_deadline: when to look; inf while nobody waits.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._interval = timeout / _LOOKS_PER_TIMEOUT
        self.next_deadline = math.inf

    def start(self) -> None:
        """Somebody begins to wait."""
        self.next_deadline = time.monotonic() + self._interval

    def stop(self) -> None:
        self.next_deadline = math.inf

    def look(self, links: Iterable[Link], now: float) -> LinkRefused | None:
        """What the first link has come to whose peer's host answers no more; None: all answer, or it is early."""
        if now < self.next_deadline:
            return None
        self.next_deadline = now + self._interval
        for link in links:
            try:
                silence = measure_silence(link.stream.fileno(), self._interval)
            except OSError:  # whoever uses it finds that it has ended, or the next look finds a descriptor
                continue
            if silence >= self._timeout:
                why = f"its host has not answered for {silence:.1f} s: the network between them is down"
                return LinkRefused(why, link.peer)
        return None
