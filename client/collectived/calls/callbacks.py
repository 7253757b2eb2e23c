"""Callbacks of calls that nobody waits for, in threads of the library's that end when there is nothing left to do."""

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
        self._due: deque[Callable[[], object]] = deque()
        self._awaited: deque[Call] = deque()
        self._waiter = 0  # ident of the thread that waits for calls
        self._caller = 0  # ident of the thread that calls back; -1: it is about to start

    def add(self, call: Call, callback: Callable[[], object]) -> None:
        """Has `callback` called once the call has ended, or soon where it has already."""
        with self._mutex:
            ended = call.complete
            if ended:
                self._due.append(callback)
            else:
                call.callbacks = [*(call.callbacks or ()), callback]
                self._awaited.append(call)
                start, self._waiter = not self._waiter, self._waiter or -1
        if ended:
            self.call_back()
        elif start:
            _thread(self._await).start()

    def ended(self, call: Call) -> None:
        """The callbacks of `call` are due. Under the mutex."""
        if call.callbacks:
            self._due.extend(call.callbacks)
            call.callbacks = None
        verdict, uncollected = call.verdict, call.uncollected
        if verdict is not None and uncollected is not None and uncollected.note(verdict):
            self._due.append(partial(uncollected.log, verdict, call.prepared.site))

    def call_back(self) -> None:
        """Has called what is due. Not under the mutex: callbacks may submit."""
        if not self._due:
            return
        me = threading.get_ident()
        if me == self._caller:  # a callback waits for another call
            self._call_all()
            return
        with self._mutex:
            if self._caller:
                return
            self._caller = me if me == self._waiter else -1
        if me == self._waiter:
            self._serve()
            return
        try:
            _thread(self._serve).start()
        except RuntimeError:  # the interpreter is ending, and starts no more threads
            self._serve()
        except BaseException:
            self._caller = 0
            raise

    def _serve(self) -> None:
        self._caller = threading.get_ident()
        while True:
            self._call_all()
            with self._mutex:
                if not self._due:
                    self._caller = 0
                    return

    def _call_all(self) -> None:
        while self._due:
            callback = self._due.popleft()
            try:
                callback()
            except (Exception, SystemExit):  # which would end the thread alone, and leave others uncalled
                log.exception("a callback of a collective failed")

    def _await(self) -> None:
        self._waiter = threading.get_ident()
        while True:
            with self._mutex:
                if not self._awaited:
                    self._waiter = 0
                    return
                call = self._awaited.popleft()
            self._wait(call)


def _thread(action: Callable[[], object]) -> threading.Thread:
    return threading.Thread(target=action, name="collectived-callbacks", daemon=True)
