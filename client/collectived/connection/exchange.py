"""RPCs apart from the caller's thread, so that Ctrl-C in it finds nothing of gRPC half done."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from collectived.calls.turns import LOOK_UP

_END_WITHIN = 0.05  # seconds for the thread of an RPC that was cancelled; Ctrl-C is to be over within 0.1
_FORK_WAITS = 1.0  # seconds for a short RPC; gRPC waits as long for one that streams


class _Gate:
    """Keeps `os.fork` and short RPCs apart: a child that is forked amid one may find gRPC's locks held for ever."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False
        self._guards = False

    def __enter__(self) -> None:
        with self._changed:
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def guard(self) -> None:
        """To be called when gRPC has set up its own handlers of forks: what is set up later comes first."""
        if not self._guards and hasattr(os, "register_at_fork"):
            self._guards = True
            os.register_at_fork(before=self._close, after_in_parent=self._open, after_in_child=self._renew)

    def _close(self) -> None:
        self._closed = self._changed.acquire(timeout=_FORK_WAITS)
        if self._closed:
            self._changed.wait_for(lambda: not self._inside, _FORK_WAITS)

    def _open(self) -> None:
        if self._closed:
            self._closed = False
            self._changed.release()

    def _renew(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False


gate = _Gate()


class Exchange:
    """An RPC in a thread of the library's, so that the caller's can wait with an end, and be interrupted.

    gRPC guards itself with Python's locks: Ctrl-C inside one of its functions would leave them held, and the next RPC
    waiting for ever. So nothing of gRPC that takes one is called in a thread of the caller's, not even a finalizer.

    Args:
        start: begins the RPC.
        ours: what an error of gRPC is raised as.
        answer: of a short RPC, takes what `start` returned and waits for the one answer; else it is a stream.
    """

    def __init__(
        self,
        start: Callable[[], Any],
        ours: Callable[[Exception], Exception],
        answer: Callable[[Any], Any] | None = None,
    ) -> None:
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call: Any = None
        self._cancelled = self._finished = False
        try:
            _aside(lambda: self._run(start, ours, answer))
        except BaseException:
            self.end()
            raise

    def _run(
        self,
        start: Callable[[], Any],
        ours: Callable[[Exception], Exception],
        answer: Callable[[Any], Any] | None,
    ) -> None:
        last: Exception | None = None
        try:
            with gate:
                self._call = start()
                if self._cancelled:
                    self._call.cancel()
                if answer is not None:
                    self._arrived.put(answer(self._call))
            if answer is None:
                for event in self._call:
                    self._arrived.put(event)
        except Exception as error:
            last = ours(error)
            error.__traceback__ = None  # it is the RPC itself, and is to end in this thread: no cycle, no cause
        self._call = None
        self._finished = True
        self._arrived.put(last)

    def next(self, timeout: float | None) -> Any:
        """The next answer; None after the last.

        Raises:
            queue.Empty: none has come in time.
            CollectiveError: the call has failed.
        """
        end = math.inf if timeout is None else monotonic() + timeout
        while True:
            left = max(0.0, end - monotonic())
            try:
                event = self._arrived.get(timeout=min(LOOK_UP, left))
                break
            except queue.Empty:
                if left <= LOOK_UP:
                    raise
        if isinstance(event, Exception):
            raise event
        return event

    def withdraw(self, error: Exception) -> None:
        """Has the thread that waits for an answer raise this, from another one; that one is to `end` it as always."""
        self._arrived.put(error)

    def end(self) -> None:
        """Cancels it unless it is over, and waits a little for its thread to be through."""
        self._cancelled = True
        if self._finished:
            return
        _aside(self._cancel)
        with contextlib.suppress(Exception):
            while self.next(_END_WITHIN) is not None:
                pass

    def _cancel(self) -> None:
        call = self._call
        if call is not None:
            with gate:
                call.cancel()


def _aside(action: Callable[[], object]) -> None:
    try:
        threading.Thread(target=action, name="collectived-rpc", daemon=True).start()
    except RuntimeError:  # the interpreter is ending, and starts no more threads
        action()
