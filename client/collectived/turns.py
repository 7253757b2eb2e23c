"""Who reads a socket that several threads wait on.

*Leader*: the one waiting thread that reads, for all. *Follower*: a thread that sleeps until the leader has heard of its
call, or hands over. Invariant: where there are followers whose calls are not ready, there is a leader, or one of those
followers has been woken and will lead.
"""

from __future__ import annotations

import math
import threading
from time import monotonic

from collectived.call import Call


class Turns:
    """Leadership over one socket. `mutex` is its owner's lock."""

    def __init__(self, mutex: threading.Lock) -> None:
        self._mutex = mutex
        self._leading = False
        self._followers: dict[threading.Lock, tuple[Call, int]] = {}

    def lead(self) -> bool:
        """Takes the lead if nobody has it; then `resign` must follow."""
        with self._mutex:
            if self._leading:
                return False
            self._leading = True
            return True

    def resign(self) -> None:
        """Gives the lead up and wakes a follower to take it."""
        with self._mutex:
            self._leading = False
            if self._followers:
                self._promote()

    def follow(self, call: Call, packs: int, end: float) -> None:
        """Sleeps until there is news of `call`, the lead is free, or the monotonic clock says `end`."""
        baton = threading.Lock()
        baton.acquire()
        with self._mutex:
            if not self._leading or call.ready(packs):
                return
            self._followers[baton] = (call, packs)
        try:
            baton.acquire(timeout=-1 if end == math.inf else max(0.0, end - monotonic()))
        finally:
            with self._mutex:
                del self._followers[baton]
                if not self._leading:  # we may have been woken to lead, and have no use for it
                    self._promote()

    def wake(self, call: Call) -> None:
        """There is news of `call`. Under the mutex."""
        for baton, (followed, _) in self._followers.items():
            if followed is call:
                _release(baton)

    def _promote(self) -> None:
        for baton, (call, packs) in self._followers.items():
            if not call.ready(packs):
                _release(baton)
                return


def _release(baton: threading.Lock) -> None:
    if baton.locked():
        baton.release()
