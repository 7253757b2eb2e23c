"""The choice of the thread that reads a socket on which several threads wait.

*Leader*: the one waiting thread that reads, for all. *Follower*: a thread that sleeps until the leader has read
the message that it awaits, or hands over. Invariant: where there are followers whose news has not come, there is a
leader, or one of those followers has been woken and will lead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Protocol

SIGNAL_CHECK_INTERVAL = (
    0.05  # seconds; a Ctrl-C just before a system call does not end it, but is seen when that returns
)


class WaitTarget(Protocol):
    """The object that a thread waits for: a call, or the answer to a question."""

    def is_ready(self, packs: int, /) -> bool: ...


class LeaderFollower:
    """Leadership over one socket. `mutex` is its owner's lock."""

    def __init__(self, mutex: threading.Lock) -> None:
        self._mutex = mutex
        self._leader = 0  # ident of the thread that leads
        self._depth = 0  # how often it took the lead: a callback that it runs may wait as well
        self._followers: dict[threading.Lock, tuple[WaitTarget, int]] = {}

    def lead(self, act: Callable[[], None]) -> bool:
        """Runs `act` as the leader; False where another thread leads.

        An error may come at any line, out of a handler of a signal say: then too this thread leads no longer than it
        did before.
        """
        me = threading.get_ident()
        depth = self._depth if self._leader == me else 0
        try:
            with self._mutex:
                if self._leader and self._leader != me:
                    return False
                self._leader = me
                self._depth = depth + 1
            act()
            self._resign(depth)
        except BaseException:
            self._resign(depth)
            raise
        return True

    @property
    def is_led_elsewhere(self) -> bool:
        """Whether another thread leads just now."""
        return self._leader not in (0, threading.get_ident())

    def _resign(self, depth: int) -> None:
        """Leads no deeper than that; a thread that leads no more wakes a follower to do so."""
        with self._mutex:
            if self._leader == threading.get_ident():
                self._depth = depth
                if not depth:
                    self._leader = 0
                    if self._followers:
                        self._promote()

    def wait_as_follower(self, awaited: WaitTarget, packs: int, end: float) -> None:
        """Sleeps a little, or until there is news of `awaited`, the lead is free, or the monotonic clock says `end`."""
        baton = threading.Lock()
        baton.acquire()
        with self._mutex:
            if not self._leader or awaited.is_ready(packs):
                return
            self._followers[baton] = (awaited, packs)
        try:
            baton.acquire(timeout=min(SIGNAL_CHECK_INTERVAL, max(0.0, end - monotonic())))
        finally:
            with self._mutex:
                del self._followers[baton]
                if not self._leader:  # we may have been woken to lead, and have no use for it
                    self._promote()

    def wake(self, awaited: WaitTarget) -> None:
        """There is news of `awaited`. Under the mutex."""
        for baton, (followed, _) in self._followers.items():
            if followed is awaited:
                _release(baton)

    def _promote(self) -> None:
        for baton, (awaited, packs) in self._followers.items():
            if not awaited.is_ready(packs):
                _release(baton)
                return


def _release(baton: threading.Lock) -> None:
    if baton.locked():
        baton.release()
