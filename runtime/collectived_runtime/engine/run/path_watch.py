"""The watch over hosts for which a task waits: whether they still answer."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable

from collectived_runtime.transport.link import Link, LinkRefused
from collectived_runtime.transport.path import measure_silence, stop_probing

_LOOKS_PER_TIMEOUT = 4


class PathWatch:
    """Looks at links from time to time, while a task waits for them.

    A path is dead if its host has answered at no look for `timeout` seconds of one wait. Silence before that wait does
    not count.

    Args:
        timeout: seconds.

    Attributes:
        next_deadline: when to look; inf while no task waits.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._interval = timeout / _LOOKS_PER_TIMEOUT
        self._began = 0.0
        self._answered_at: dict[Link, float] = {}  # of links that are looked at
        self._dead: set[Link] = set()  # of which it has been said
        self.next_deadline = math.inf

    def start(self) -> None:
        """A task begins to wait."""
        self._began = time.monotonic()
        self.next_deadline = self._began + self._interval

    def stop(self) -> None:
        """No task waits any more."""
        self.next_deadline = math.inf
        while self._answered_at:
            link, _ = self._answered_at.popitem()
            with contextlib.suppress(OSError):  # it has ended
                stop_probing(link.stream.fileno())

    def look(self, links: Iterable[Link], now: float) -> LinkRefused | None:
        """Return the error of the first link whose peer's host answers no more; None: all answer, or it is early."""
        if now < self.next_deadline:
            return None
        self.next_deadline = now + self._interval
        for link in links:
            answered_at = self._answered_at.setdefault(link, self._began)
            try:
                silence = measure_silence(link.stream.fileno(), self._interval)
            except OSError:  # its user finds that it has ended, or the next look finds a descriptor
                continue
            if not silence:
                self._answered_at[link] = now
            elif (lasted := min(silence, now - answered_at)) >= self._timeout and link not in self._dead:
                self._dead.add(link)
                why = f"its host has not answered for {lasted:.1f} s: the network between them is down"
                return LinkRefused(why, link.peer)
        return None
