"""Hard caps and facts: nothing in a drill waits without an end, and nothing sleeps to be on the safe side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

LOOK_SECONDS = 0.005  # between two looks at a fact that no message announces


class Hang(AssertionError):
    """Something did not come about before the cap of its cell."""


class Limit:
    """A point of the monotonic clock at which everything in a cell is given up."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self, what: str) -> float:
        """Seconds that are left; raises Hang where none are."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise Hang(f"{what} did not come about within the cell's cap of {self.seconds:g} s")
        return left

    def until(self, fact: Callable[[], bool], what: str) -> None:
        """Returns when `fact` holds."""
        while not fact():
            self.left(what)
            time.sleep(LOOK_SECONDS)


class Pace:
    """How late this machine wakes a thread that has nothing to do: what clocks of a busy machine must be forgiven."""

    _NAP_SECONDS = 0.01

    def __init__(self) -> None:
        self._worst = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    @property
    def late(self) -> float:
        """The worst so far, in seconds."""
        return self._worst

    def _run(self) -> None:
        asleep = time.monotonic()
        while not self._over.wait(self._NAP_SECONDS):
            now = time.monotonic()
            self._worst = max(self._worst, now - asleep - self._NAP_SECONDS)
            asleep = now
