"""The launcher's one wait: output of processes, their ends, signals and hours, in one thread."""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE_OF_USERS = 3  # the signal at which the launcher ends on the spot and leaves the rest to the keeper


class Loop:
    """Calls back what is watched when its descriptor is readable, and collects signals in `signals`."""

    def __init__(self) -> None:
        self.signals: deque[int] = deque()
        self._seen = 0
        self._selector = selectors.DefaultSelector()
        self._former: dict[int, object] = {}
        self._hours: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()

    def __enter__(self) -> Loop:
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self.watch(self._woken.fileno(), self._swallow)
        self._former_wakeup = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for signum in SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # nohup is respected
                self._former[signum] = signal.signal(signum, self._heard)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for signum, former in self._former.items():
            signal.signal(signum, former)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._former_wakeup)
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def watch(self, descriptor: int, call: Callable[[], None], write: bool = False) -> None:
        """From now on `call` is called whenever the descriptor is readable, or writable if `write`."""
        self._selector.register(descriptor, selectors.EVENT_WRITE if write else selectors.EVENT_READ, call)

    def forget(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls once, so many seconds from now, and not before what is readable then was read."""
        heapq.heappush(self._hours, (time.monotonic() + seconds, next(self._counter), call))

    def turn(self, timeout: float | None = None) -> None:
        """Waits once, at most `timeout` seconds (None: until something happens), and calls back."""
        if self._hours:
            left = max(0.0, self._hours[0][0] - time.monotonic())
            timeout = left if timeout is None else min(timeout, left)
        for key, _ in self._selector.select(timeout):
            if self._selector.get_map().get(key.fd) == key:  # an earlier call of this turn may have ended it
                key.data()
        now = time.monotonic()
        while self._hours and self._hours[0][0] <= now:
            heapq.heappop(self._hours)[2]()

    def until(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Turns until `reached()`, for so many seconds, or until there is a signal; returns whether it was reached."""
        deadline = time.monotonic() + seconds
        while not reached():
            left = deadline - time.monotonic()
            if left <= 0 or self.signals:
                return False
            self.turn(left)
        return True

    def _swallow(self) -> None:
        self._woken.recv(4096)

    def _heard(self, signum: int, frame: FrameType | None) -> None:
        self._seen += 1
        if self._seen >= _PATIENCE_OF_USERS:
            os._exit(128 + signum)
        self.signals.append(signum)
