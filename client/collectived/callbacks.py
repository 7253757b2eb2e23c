"""Callbacks of calls that nobody waits for: one thread waits for them, and ends when none is left."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from collectived.call import Call

log = logging.getLogger("collectived")


class Callbacks:
    """Callbacks of one doorbell. `mutex` is its owner's lock; `wait` waits for a call."""

    def __init__(self, mutex: threading.Lock, wait: Callable[[Call], None]) -> None:
        self._mutex = mutex
        self._wait = wait
        self._due: deque[Callable[[], object]] = deque()
        self._awaited: deque[Call] = deque()
        self._running = False

    def add(self, call: Call, callback: Callable[[], object]) -> bool:
        """Has `callback` called once the call has ended; False where it has already."""
        with self._mutex:
            if call.complete:
                return False
            call.callbacks = [*(call.callbacks or ()), callback]
            self._awaited.append(call)
            if self._running:
                return True
            self._running = True
        threading.Thread(target=self._run, name="collectived-callbacks", daemon=True).start()
        return True

    def ended(self, call: Call) -> None:
        """The callbacks of `call` are due. Under the mutex."""
        if call.callbacks:
            self._due.extend(call.callbacks)
            call.callbacks = None

    def call_back(self) -> None:
        """Calls what is due. Not under the mutex: callbacks may submit."""
        while self._due:
            try:
                callback = self._due.popleft()
            except IndexError:  # another thread was quicker
                return
            try:
                callback()
            except Exception:
                log.exception("a callback of a collective failed")

    def _run(self) -> None:
        while True:
            with self._mutex:
                if not self._awaited:
                    self._running = False
                    return
                call = self._awaited.popleft()
            self._wait(call)
