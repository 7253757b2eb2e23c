"""A receive of a process group that is posted only when that matters: its wait receives by itself most often."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from collectived.group import Group
from collectived.integrations.c10d.errors import translate
from collectived.integrations.c10d.lifetime import release
from collectived.integrations.c10d.work import NO_LIMIT, CompletedWork, FailedWork, Finish, PendingWork, Start
from collectived.integrations.futures import Future
from collectived_proto.errors import CollectiveError


class LazyReceive:
    """The last receive of a process group, if it is not posted. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler of a signal may destroy the group
        self._work: ReceiveWork | None = None

    def keep(self, work: ReceiveWork) -> None:
        with self._lock:
            self.post()
            self._work = work

    def claim(self, work: ReceiveWork) -> bool:
        """Whether this receive is not posted, and never is."""
        with self._lock:
            if self._work is not work:
                return False
            self._work = None
            return True

    def post(self) -> None:
        """Post it; it is posted when this returns."""
        if self._work is not None:  # another thread may be posting it: then wait for that
            with self._lock:
                work, self._work = self._work, None
                if work is not None:
                    work.post()


class ReceiveWork(PendingWork):
    """A receive of a short tensor from a rank that is named.

    A receive that is posted ends in another thread or in a later look, which costs many times as much as a wait that
    receives. A short message is kept for it while there is room for such. So it is posted when the next operation of
    its process group begins, other than a short send, or when its Work is asked for more than a wait by its own thread.
    """

    def __init__(self, lazy: LazyReceive, group: Group, start: Start, source: int, finish: Finish | None, result: Any):
        super().__init__((), finish, result)
        self._lazy = lazy
        self._group = group
        self._generation = group.generation
        self._start = start
        self._source = source
        self._thread = threading.get_ident()
        self._has_ended = threading.Event()  # without having been posted

    def post(self) -> None:
        """Post it. Called once, when it is claimed."""
        try:
            self._check_generation()
            self._works = (self._start(async_op=True),)
            self._left = 1
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        is_limited = timeout > NO_LIMIT
        if not is_limited and threading.get_ident() == self._thread and self._lazy.claim(self):
            self._receive()
        else:
            self._lazy.post()
        if self._works:
            return super().wait(timeout)
        if not self._has_ended.wait(timeout.total_seconds() if is_limited else None):
            raise dist.DistBackendError(f"[collectived] Timed out waiting: no message has come within {timeout}")
        release(self)
        if self._error is not None:
            raise self._error
        return True

    def _receive(self) -> None:
        try:
            self._check_generation()
            received = self._start()
            if self._finish is not None:
                self._put_in_place(self._finish, [received])
            self._finished = True
            self._has_ended.set()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _check_generation(self) -> None:
        if self._group.generation != self._generation:
            raise dist.DistBackendError("[collectived] its generation ended before a message came: receive again")

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, CollectiveError):
            self._error = translate(error)
            self._error.__cause__ = error
        else:
            interrupted = CancelledError("this receive was interrupted: receive again")
            self._error = error if isinstance(error, Exception) else interrupted
        self._has_ended.set()

    def has_ended(self) -> bool:
        self._lazy.post()
        return super().has_ended() if self._works else self._has_ended.is_set()

    def cancel(self) -> None:
        """Take it back, unless its message is there, or its thread receives."""
        if self._lazy.claim(self):
            self._fail(CancelledError("this receive was taken back before it got a message"))
        super().cancel()

    def get_future(self) -> Future:
        self._lazy.post()
        if self._works:
            return super().get_future()
        self._has_ended.wait()
        if isinstance(self._error, Exception):
            return FailedWork(self._error, self._result).get_future()
        return CompletedWork(self._result).get_future()

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank
