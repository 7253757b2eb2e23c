"""The launcher's one wait: output of processes, their ends, signals and hours, in one thread.

A long wait says every ten seconds that it goes on, with the host or process, and for how long at most.
"""

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
_SIGNALS_TO_FORCE_EXIT = 3  # the signal at which the launcher ends on the spot and leaves the rest to the reaper


class Loop:
    """Calls back what is watched when its descriptor is readable, and collects signals in `signals`."""

    def __init__(self) -> None:
        self.signals: deque[int] = deque()
        self._signal_count = 0
        self._selector = selectors.DefaultSelector()
        self._previous_handlers: dict[int, object] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()

    def __enter__(self) -> Loop:
        self._wakeup_sender, self._wakeup_receiver = socket.socketpair()
        for end in (self._wakeup_sender, self._wakeup_receiver):
            end.setblocking(False)
        self.register(self._wakeup_receiver.fileno(), self._drain_wakeups)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._wakeup_sender.fileno(), warn_on_full_buffer=False)
        for signum in SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # nohup is respected
                self._previous_handlers[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for signum, former in self._previous_handlers.items():
            signal.signal(signum, former)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        self._selector.close()
        self._wakeup_sender.close()
        self._wakeup_receiver.close()

    def register(self, descriptor: int, call: Callable[[], None], write: bool = False) -> None:
        """From now on `call` is called whenever the descriptor is readable, or writable if `write`."""
        self._selector.register(descriptor, selectors.EVENT_WRITE if write else selectors.EVENT_READ, call)

    def unregister(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls once, so many seconds from now, and not before what is readable then was read."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._counter), call))

    def run_once(self, timeout: float | None = None) -> None:
        """Waits once, at most `timeout` seconds (None: until something happens), and calls back."""
        if self._timers:
            left = max(0.0, self._timers[0][0] - time.monotonic())
            timeout = left if timeout is None else min(timeout, left)
        for key, _ in self._selector.select(timeout):
            if self._selector.get_map().get(key.fd) == key:  # an earlier call of this turn may have ended it
                key.data()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def run_until(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Turns until `reached()`, for so many seconds, or until there is a signal; returns whether it was reached."""
        deadline = time.monotonic() + seconds
        while not reached():
            left = deadline - time.monotonic()
            if left <= 0 or self.signals:
                return False
            self.run_once(left)
        return True

    def _drain_wakeups(self) -> None:
        self._wakeup_receiver.recv(4096)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signal_count += 1
        if self._signal_count >= _SIGNALS_TO_FORCE_EXIT:
            os._exit(128 + signum)
        self.signals.append(signum)


PROGRESS_INTERVAL = 10.0  # seconds until it is said that a wait goes on, and until it is said again
DRAW_INTERVAL = 1.0  # seconds until a bar is drawn, and drawn again


def run_until_with_progress(
    loop: Loop, reached: Callable[[], bool], seconds: float, say: Callable[[str], None], draw: Callable[[], None]
) -> bool:
    """As `Loop.run_until`; `say` is called with the time taken, such as `10 of 30 s`; `draw` every second."""
    began = time.monotonic()
    next_said = PROGRESS_INTERVAL
    while (passed := time.monotonic() - began) < seconds:
        if loop.run_until(reached, min(DRAW_INTERVAL, seconds - passed, max(0.0, next_said - passed))):
            return True
        if loop.signals:
            return False
        if next_said <= (passed := time.monotonic() - began) < seconds:
            say(f"{passed:.0f} of {seconds:g} s")
            next_said = passed + PROGRESS_INTERVAL
        draw()
    return reached()
