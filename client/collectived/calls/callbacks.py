"""Callbacks of calls that no thread waits for. They run in threads of the library, which end when idle."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from collectived.calls.call import Call

log = logging.getLogger("collectived")


class Callbacks:
    """Callbacks of one doorbell, called one after another. `mutex` is its owner's lock; `wait` waits for a call."""

    def __init__(self, mutex: threading.Lock, wait: Callable[[Call], None]) -> None:
        self._mutex = mutex
        self._wait = wait
        self._due_callbacks: deque[Callable[[], object]] = deque()
        self._watched_calls: deque[Call] = deque()
        self._waiter = 0  # ident of the thread that waits for calls
        self._dispatch_thread = 0  # ident of the thread that calls back; -1: it is about to start

    def add(self, call: Call, callback: Callable[[], object]) -> None:
        """Has `callback` called once the call has ended, or soon where it has already."""
        with self._mutex:
            ended = call.complete
            if ended:
                self._due_callbacks.append(callback)
            else:
                call.callbacks = [*(call.callbacks or ()), callback]
                self._watched_calls.append(call)
                start, self._waiter = not self._waiter, self._waiter or -1
        if ended:
            self.dispatch()
        elif start:
            _thread(self._wait_loop).start()

    def on_call_ended(self, call: Call) -> None:
        """The callbacks of `call` are due. Under the mutex."""
        if call.callbacks:
            self._due_callbacks.extend(call.callbacks)
            call.callbacks = None
        verdict, uncollected = call.verdict, call.error_sink
        if verdict is not None and uncollected is not None and uncollected.record(verdict):
            self._due_callbacks.append(partial(uncollected.log, verdict, call.prepared.site))

    def dispatch(self) -> None:
        """Has called what is due. Not under the mutex: callbacks may submit."""
        if not self._due_callbacks:
            return
        me = threading.get_ident()
        if me == self._dispatch_thread:  # a callback waits for another call
            self._run_due()
            return
        with self._mutex:
            if self._dispatch_thread:
                return
            self._dispatch_thread = me if me == self._waiter else -1
        try:
            if me == self._waiter:
                self._dispatch_loop()
            else:
                _thread(self._dispatch_loop).start()
        except RuntimeError:  # the interpreter is ending, and starts no more threads
            self._dispatch_loop()
        except BaseException:
            self._dispatch_thread = 0
            raise

    def _dispatch_loop(self) -> None:
        self._dispatch_thread = threading.get_ident()
        while True:
            self._run_due()
            with self._mutex:
                if not self._due_callbacks:
                    self._dispatch_thread = 0
                    return

    def _run_due(self) -> None:
        while self._due_callbacks:
            callback = self._due_callbacks.popleft()
            try:
                callback()
            except Exception:  # not of the user's function, but of this process: it may have more memory now
                call_back(callback)

    def _wait_loop(self) -> None:
        self._waiter = threading.get_ident()
        while True:
            with self._mutex:
                if not self._watched_calls:
                    self._waiter = 0
                    return
                call = self._watched_calls.popleft()
            self._wait(call)


def call_back(callback: Callable[[], object]) -> None:
    """Call it and handle its exceptions. An exception would end the thread before the other callbacks."""
    try:
        callback()
    except (Exception, SystemExit):
        log.exception("a callback of a collective failed")


def _thread(action: Callable[[], object]) -> threading.Thread:
    return threading.Thread(target=action, name="collectived-callbacks", daemon=True)
