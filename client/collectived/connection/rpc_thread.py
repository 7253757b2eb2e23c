"""RPCs apart from the caller's thread, so that Ctrl-C in it finds nothing of gRPC half done."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from collectived.calls.leader_follower import SIGNAL_CHECK_INTERVAL
from collectived.errors import InternalError

_CANCEL_TIMEOUT = 0.05  # seconds for the thread of an RPC that was cancelled; Ctrl-C is to be over within 0.1
_FORK_TIMEOUT = 1.0  # seconds for a short RPC; gRPC waits as long for one that streams


class ForkLock:
    """Keeps `os.fork` and short RPCs apart: a child that is forked amid one may find gRPC's locks held forever."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._active_rpcs = 0
        self._is_locked = False
        self._is_registered = False

    def __enter__(self) -> None:
        with self._changed:
            self._active_rpcs += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._active_rpcs -= 1
            self._changed.notify_all()

    def register_at_fork(self) -> None:
        """To be called when gRPC has set up its own handlers of forks: what is set up later comes first."""
        if not self._is_registered and hasattr(os, "register_at_fork"):
            self._is_registered = True
            os.register_at_fork(
                before=self._before_fork,
                after_in_parent=self._after_fork_in_parent,
                after_in_child=self._after_fork_in_child,
            )

    def _before_fork(self) -> None:
        self._is_locked = self._changed.acquire(timeout=_FORK_TIMEOUT)
        if self._is_locked:
            self._changed.wait_for(lambda: not self._active_rpcs, _FORK_TIMEOUT)

    def _after_fork_in_parent(self) -> None:
        if self._is_locked:
            self._is_locked = False
            self._changed.release()

    def _after_fork_in_child(self) -> None:
        self._changed = threading.Condition()
        self._active_rpcs = 0
        self._is_locked = False


fork_lock = ForkLock()


class RpcThread:
    """An RPC in a thread of the library's, so that the caller's can wait with an end, and be interrupted.

    gRPC guards itself with Python's locks: Ctrl-C inside one of its functions would leave them held, and the next RPC
    waiting forever. So nothing of gRPC that takes one is called in a thread of the caller's, not even a finalizer.

    Args:
        start: begins the RPC.
        ours: turns an error of gRPC into the error to raise.
        answer: of a short RPC, takes what `start` returned and waits for the one answer; else it is a stream.
        intercept: of a stream, takes an answer that no caller waits for, and says whether it was one; in this thread.
    """

    def __init__(
        self,
        start: Callable[[], Any],
        ours: Callable[[Exception], Exception],
        answer: Callable[[Any], Any] | None = None,
        intercept: Callable[[Any], bool] = lambda event: False,
    ) -> None:
        self._intercept = intercept
        self._responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call: Any = None
        self._cancelled = False
        self._finished = threading.Event()
        try:
            _run_in_thread(partial(self._run, start, ours, answer))
        except BaseException:
            self.cancel()
            raise

    def _run(
        self,
        start: Callable[[], Any],
        ours: Callable[[Exception], Exception],
        answer: Callable[[Any], Any] | None,
    ) -> None:
        """Run the RPC. At its end, also after an error in this thread, waiting threads are woken."""
        last: Exception | None = None
        try:
            self._exchange(start, answer)
        except Exception as error:
            last = _explain(error, ours)
            error.__traceback__ = None  # it is the RPC itself, and is to end in this thread: no cycle, no cause
        self._call = None
        self._responses.put(last)
        self._finished.set()

    def _exchange(self, start: Callable[[], Any], answer: Callable[[Any], Any] | None) -> None:
        with fork_lock:
            self._call = call = start()
            if self._cancelled:
                call.cancel()
            if answer is not None:
                self._responses.put(answer(call))
                return
        try:
            for event in call:
                if self._intercept(event):
                    continue
                self._responses.put(event)
        except BaseException:
            with fork_lock:
                call.cancel()  # which changes nothing where the error is the RPC's own
            raise

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
                event = self._responses.get(timeout=min(SIGNAL_CHECK_INTERVAL, left))
                break
            except queue.Empty:
                if left <= SIGNAL_CHECK_INTERVAL:
                    raise
        if isinstance(event, Exception):
            raise event
        return event

    def wait(self, timeout: float) -> None:
        """Returns when the call is over, well or not, or after so many seconds; any number of threads may wait."""
        end = monotonic() + timeout
        while not self._finished.wait(min(SIGNAL_CHECK_INTERVAL, max(0.0, end - monotonic()))) and monotonic() < end:
            pass

    def fail(self, error: Exception) -> None:
        """Has the thread that waits for an answer raise this, from another one; it is to `cancel` as always."""
        self._responses.put(error)

    def cancel(self) -> None:
        """Cancels it unless it is over, and waits a little for its thread to be through."""
        self._cancelled = True
        if self._finished.is_set():
            return
        _run_in_thread(self._cancel)
        with contextlib.suppress(Exception):
            while self.next(_CANCEL_TIMEOUT) is not None:
                pass

    def _cancel(self) -> None:
        with contextlib.suppress(Exception):  # no thread waits for it any more, so its errors do not matter
            call = self._call
            if call is not None:
                with fork_lock:
                    call.cancel()


def _explain(error: Exception, ours: Callable[[Exception], Exception]) -> Exception:
    try:
        return ours(error)
    except Exception as another:  # this process has no memory left, say
        return InternalError(f"an RPC failed ({type(error).__name__}), and so did what says why: {another}")


def _run_in_thread(action: Callable[[], object]) -> None:
    try:
        threading.Thread(target=action, name="collectived-rpc", daemon=True).start()
    except RuntimeError:  # the interpreter is ending, and starts no more threads
        action()
