"""The one place where a group loop waits: a poll over descriptors with their handlers, and a mailbox for other threads.

When a group loop is to look again though nothing has happened: for what only waits for a time.
"""

from __future__ import annotations

import heapq
import math
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from collectived_proto.ipc.spin import AdaptiveSpin

HANGUP_EVENTS = select.POLLHUP | select.POLLERR | select.POLLNVAL

_POLLED = struct.Struct("=ihh")  # struct pollfd

Handler = Callable[[int], None]  # called with the poll events that came
# Waits in place of `poll`: takes all that is waited for, an array of struct pollfd, and for how many seconds.
Wait = Callable[[bytearray, float], list[tuple[int, int]]]


class Poller:
    """Waits for descriptors and for other threads: the one place where a group loop waits.

    `call_soon_threadsafe` may be called from any thread, everything else from the group loop's.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._spin = AdaptiveSpin()
        self._handlers: dict[int, Handler] = {}
        self._events: dict[int, int] = {}  # those that are asked for
        self._callbacks: deque[tuple[Callable[[], object], Callable[[], object]]] = deque()
        self._close_lock = threading.Lock()  # no thread writes to a descriptor that has been closed, and perhaps reused
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.closed = False
        self.add(self._wake_fd, select.POLLIN, self._run_callbacks)

    def call_soon_threadsafe(
        self, callback: Callable[[], object], on_closed: Callable[[], object] = lambda: None
    ) -> None:
        """Run `callback` in the group loop's thread; `on_closed`, in any thread, if that has ended before."""
        with self._close_lock:
            if not self.closed:
                self._callbacks.append((callback, on_closed))
                os.eventfd_write(self._wake_fd, 1)
                return
        on_closed()

    def add(self, descriptor: int, events: int, handler: Handler) -> None:
        self._poll.register(descriptor, events)
        self._handlers[descriptor] = handler
        self._events[descriptor] = events

    def change(self, descriptor: int, events: int) -> None:
        self._poll.modify(descriptor, events)
        self._events[descriptor] = events

    def remove(self, descriptor: int) -> None:
        """Forget a descriptor; one that is not watched is ignored."""
        if self._handlers.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)
            del self._events[descriptor]

    def wait(self, until: float, look: bool = False, wait: Wait | None = None) -> None:
        """Waits until something happens or the monotonic clock shows `until` (inf: forever), and handles it.

        Args:
            look: look for a moment before sleeping.
            wait: waits instead, without that look, and does something itself meanwhile.
        """
        left = max(0.0, until - time.monotonic()) if until else 0.0
        found = self._spin.poll(self._poll, left) if look and left and wait is None else []
        if wait is not None and left:
            polls = bytearray(b"".join(_POLLED.pack(*asked, 0) for asked in self._events.items()))
            found = wait(polls, left)
        elif not found:
            found = self._poll.poll(None if left == math.inf else math.ceil(left * 1000))
        for descriptor, events in found:
            handler = self._handlers.get(descriptor)  # an earlier one may have removed it
            if handler is not None:
                handler(events)

    def close(self) -> None:
        with self._close_lock:
            self.closed = True
            os.close(self._wake_fd)
        while self._callbacks:
            self._callbacks.popleft()[1]()

    def _run_callbacks(self, _: int) -> None:
        os.eventfd_read(self._wake_fd)
        while self._callbacks:
            self._callbacks.popleft()[0]()


class Timers:
    """When a group loop is to wake though nothing has happened. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def wake_at(self, when: float) -> None:
        heapq.heappush(self._times, when)

    @property
    def next_deadline(self) -> float:
        """The first that is to come; inf: none is."""
        return self._times[0] if self._times else math.inf

    def discard_expired(self, now: float) -> None:
        """Forget the times that have come: the group loop looks now."""
        while self._times and self._times[0] <= now:
            heapq.heappop(self._times)
