"""The one place where a lane waits: a poll over descriptors with their handlers, and a mailbox for other threads."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from collectived_proto.local.spin import Spin

ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL

Handler = Callable[[int], None]  # called with the poll events that came


class Watch:
    """`ask` may be called from any thread, everything else from the lane's."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._spin = Spin()
        self._handlers: dict[int, Handler] = {}
        self._asked: deque[tuple[Callable[[], object], Callable[[], object]]] = deque()
        self._closing = threading.Lock()  # nobody writes to a descriptor that has been closed, and perhaps reused
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.closed = False
        self.add(self._wake, select.POLLIN, self._woken)

    def ask(self, what: Callable[[], object], otherwise: Callable[[], object] = lambda: None) -> None:
        """Has `what` done in the lane's thread; `otherwise`, in any thread, where that has ended before."""
        with self._closing:
            if not self.closed:
                self._asked.append((what, otherwise))
                os.eventfd_write(self._wake, 1)
                return
        otherwise()

    def add(self, descriptor: int, events: int, handler: Handler) -> None:
        self._poll.register(descriptor, events)
        self._handlers[descriptor] = handler

    def change(self, descriptor: int, events: int) -> None:
        self._poll.modify(descriptor, events)

    def remove(self, descriptor: int) -> None:
        """Forgets a descriptor; one that is not watched is none of our business."""
        if self._handlers.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def wait(self, until: float, look: bool = False) -> None:
        """Waits until something happens or the monotonic clock shows `until` (inf: for ever), and handles it.

        Args:
            look: look for a moment before sleeping.
        """
        left = max(0.0, until - time.monotonic()) if until else 0.0
        found = self._spin.look(self._poll, left) if look and left else []
        if not found:
            found = self._poll.poll(None if left == math.inf else math.ceil(left * 1000))
        for descriptor, events in found:
            handler = self._handlers.get(descriptor)  # an earlier one may have removed it
            if handler is not None:
                handler(events)

    def close(self) -> None:
        with self._closing:
            self.closed = True
            os.close(self._wake)
        while self._asked:
            self._asked.popleft()[1]()

    def _woken(self, _: int) -> None:
        os.eventfd_read(self._wake)
        while self._asked:
            self._asked.popleft()[0]()
