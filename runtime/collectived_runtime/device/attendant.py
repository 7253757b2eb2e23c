"""A thread for calls about one GPU that may block: making, aborting and destroying communicators.

It does them one after another in the order in which they were asked for. Whoever asks goes on, and waits for the
`Errand` in a lane's poll, as for a `Launch`. A call that ought to be over and is not cannot be ended from outside: it
is told to whoever made the attendant, who ends the process.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger("collectived.device")

WITHIN = 5.0  # seconds for what must not hang


class Bounded(Protocol):
    """What has to come to its end: `what` is said of it where it does not."""

    @property
    def what(self) -> str: ...

    def wait(self, within: float) -> bool:
        """Whether it has ended within so many seconds."""


class Errand:
    """A call to be made in an attendant's thread.

    Attributes:
        result: what it has returned; read it when `done`.
        failed: what it has raised, if it has.
        given_up: whether nobody wants its result any more; a call that polls ends then.
    """

    __slots__ = ("_call", "_ended", "_over", "failed", "given_up", "result", "what")

    def __init__(self, what: str, call: Callable[[Errand], Any], over: Callable[[], object]) -> None:
        self.what = what
        self.result: Any = None
        self.failed: BaseException | None = None
        self.given_up = False
        self._call = call
        self._over = over
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, within: float) -> bool:
        """Whether it has ended in time."""
        return self._ended.wait(within)

    def run(self) -> None:
        try:
            self.result = self._call(self)
        except BaseException as error:  # whoever waits for it raises it
            self.failed = error
        self._ended.set()
        self._over()


class Attendant:
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
        within: float = WITHIN,
    ) -> None:
        self._name = name
        self._use = use
        self._overdue = overdue
        self._within = within
        self._asked: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._bounded: queue.SimpleQueue[tuple[float, Bounded] | None] = queue.SimpleQueue()
        self._threads: dict[str, threading.Thread] = {}
        self._starting = threading.Lock()

    def attend(self, what: str, call: Callable[[Errand], Any], over: Callable[[], object] = lambda: None) -> Errand:
        """Has `call(errand)` made.

        Args:
            what: it is, for people: `abort of a communicator`.
            over: called in the thread when it has ended.
        """
        errand = Errand(what, call, over)
        self._start(self._name, self._run)
        self._asked.put(errand)
        return errand

    def bound(self, errand: Bounded) -> None:
        """From now on it has `within` seconds to end."""
        self._start(f"{self._name} limit", self._guard)
        self._bounded.put((time.monotonic() + self._within, errand))

    def close(self) -> None:
        """Ends the threads after what has been asked for, or leaves them behind where that does not end."""
        with self._starting:
            threads, self._threads = self._threads, {}
        self._asked.put(None)
        self._bounded.put(None)
        for thread in threads.values():
            thread.join(self._within)

    def _start(self, name: str, run: Callable[[], None]) -> None:
        with self._starting:
            if name not in self._threads:
                self._threads[name] = threading.Thread(target=run, name=name, daemon=True)
                self._threads[name].start()

    def _run(self) -> None:
        try:
            self._use()
        except Exception:  # the calls themselves will fail, and say so
            log.exception("%s: the GPU cannot be made current", self._name)
        while (errand := self._asked.get()) is not None:
            errand.run()
            del errand

    def _guard(self) -> None:
        while (bounded := self._bounded.get()) is not None:
            until, errand = bounded
            if not errand.wait(max(0.0, until - time.monotonic())):
                self._overdue(f"{errand.what} has not ended within {self._within:g} s")
