"""A thread for calls about one GPU that may block: making, aborting and destroying communicators.

It does them one after another in the order in which they were asked for. The caller goes on, and waits for the
`BlockingCall` in a group loop's poll, as for a `Launch`. A call that ought to be over and is not cannot be ended from
outside: it is reported to the maker of the thread, which ends the process.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger("collectived.device")

CALL_TIMEOUT_SECONDS = 5.0  # seconds for what must not hang


class Waitable(Protocol):
    """Work that has to come to its end. `description` is reported where it does not."""

    @property
    def description(self) -> str: ...

    def wait(self, within: float) -> bool:
        """Return whether it has ended in time."""


class BlockingCall:
    """A call to be made in an attendant's thread.

    Attributes:
        result: what it has returned; read it when `done`.
        error: what it has raised, if it has.
        cancel_requested: whether its result is not wanted any more; a call that polls ends then.
    """

    __slots__ = ("_call", "_ended", "_on_done", "error", "cancel_requested", "result", "description")

    def __init__(self, what: str, call: Callable[[BlockingCall], Any], over: Callable[[], object]) -> None:
        self.description = what
        self.result: Any = None
        self.error: BaseException | None = None
        self.cancel_requested = False
        self._call = call
        self._on_done = over
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, within: float) -> bool:
        """Return whether it has ended in time."""
        return self._ended.wait(within)

    def run(self) -> None:
        try:
            self.result = self._call(self)
        except BaseException as error:  # the waiting thread raises it
            self.error = error
        self._ended.set()
        self._on_done()


class BlockingThread:
    """See the module. May be used from any thread; threads start when they are first needed.

    Args:
        name: of the thread.
        use: called first in the thread: makes the GPU current there.
        overdue: called, in a thread of its own, with what has not ended within `within` seconds of being bounded.
    """

    def __init__(
        self,
        name: str,
        use: Callable[[], object],
        overdue: Callable[[str], object],
        within: float = CALL_TIMEOUT_SECONDS,
    ) -> None:
        self._name = name
        self._make_current = use
        self._on_timeout = overdue
        self._within = within
        self._calls: queue.SimpleQueue[BlockingCall | None] = queue.SimpleQueue()
        self._timed_calls: queue.SimpleQueue[tuple[float, Waitable] | None] = queue.SimpleQueue()
        self._threads: dict[str, threading.Thread] = {}
        self._starting = threading.Lock()

    def submit(
        self, what: str, call: Callable[[BlockingCall], Any], over: Callable[[], object] = lambda: None
    ) -> BlockingCall:
        """Has `call(pending_call)` made.

        Args:
            what: it is, for people: `abort of a communicator`.
            over: called in the thread when it has ended.
        """
        pending_call = BlockingCall(what, call, over)
        self._start(self._name, self._run)
        self._calls.put(pending_call)
        return pending_call

    def enforce_timeout(self, pending_call: Waitable) -> None:
        """Give it `within` seconds to end from now on."""
        self._start(f"{self._name} limit", self._watch_timeouts)
        self._timed_calls.put((time.monotonic() + self._within, pending_call))

    def close(self) -> None:
        """End the threads after what has been asked for, or leaves them behind where that does not end."""
        with self._starting:
            threads, self._threads = self._threads, {}
        self._calls.put(None)
        self._timed_calls.put(None)
        for thread in threads.values():
            thread.join(self._within)

    def _start(self, name: str, run: Callable[[], None]) -> None:
        with self._starting:
            if name not in self._threads:
                self._threads[name] = threading.Thread(target=run, name=name, daemon=True)
                self._threads[name].start()

    def _run(self) -> None:
        try:
            self._make_current()
        except Exception:  # the calls themselves will fail, and say so
            log.exception("%s: the GPU cannot be made current", self._name)
        while (pending_call := self._calls.get()) is not None:
            pending_call.run()
            del pending_call

    def _watch_timeouts(self) -> None:
        while (bounded := self._timed_calls.get()) is not None:
            until, pending_call = bounded
            if not pending_call.wait(max(0.0, until - time.monotonic())):
                self._on_timeout(f"{pending_call.description} has not ended within {self._within:g} s")
