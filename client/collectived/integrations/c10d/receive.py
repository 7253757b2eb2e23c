"""A receive of a process group that is posted only when that matters: its wait receives by itself most often."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from collectived.integrations.c10d.errors import translate
from collectived.integrations.c10d.lifetime import release
from collectived.integrations.c10d.work import NO_LIMIT, CompletedWork, FailedWork, Finish, PendingWork, Start
from collectived.integrations.futures import Future
from collectived_proto.errors import CollectiveError


class ReceiveWork(PendingWork):
    """A receive of a short tensor from a rank that is named.

    A receive that is posted ends in another thread or in a later look, which costs many times as much as a wait that
    receives. A short message is kept for it in any case. So it is posted when the next operation of its process group
    begins, other than a short send, or when its Work is asked for more than a wait.
    """

    def __init__(self, start: Start, source: int, finish: Finish | None, result: Any) -> None:
        super().__init__((), finish, result)
        self._start: Start | None = start  # until it is posted, or received
        self._source = source
        self._turn = threading.Lock()  # of the thread that posts it or receives

    def post(self) -> None:
        """Post it, unless it is posted or a thread receives."""
        if self._turn.acquire(blocking=False):
            try:
                self._post()
            finally:
                self._turn.release()

    def _post(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            try:
                self._works = (start(async_op=True),)
                self._left = 1
            except CollectiveError as error:
                self._error = translate(error)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        is_limited = timeout > NO_LIMIT
        if not self._turn.acquire(timeout=timeout.total_seconds() if is_limited else -1):
            raise dist.DistBackendError(f"[collectived] Timed out waiting: no message has come within {timeout}")
        try:
            if is_limited:
                self._post()
            start, self._start = self._start, None
            if start is not None:
                self._receive(start)
        finally:
            self._turn.release()
        if self._works:
            return super().wait(timeout)
        release(self)
        if self._error is not None:
            raise self._error
        return True

    def _receive(self, start: Start) -> None:
        try:
            received = start()
            if self._finish is not None:
                self._put_in_place(self._finish, [received])
            self._finished = True
        except CollectiveError as error:
            self._error = translate(error)
            self._error.__cause__ = error
        except Exception as error:  # of this rank alone, such as that of a value that does not fit
            self._error = error
        except BaseException:
            self._error = CancelledError("this receive was interrupted: receive again")
            raise

    def has_ended(self) -> bool:
        self.post()
        return super().has_ended() if self._works else self._finished or self._error is not None

    def cancel(self) -> None:
        """Take it back, unless its message is there or a thread receives."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self._start is not None:
                self._start, self._error = None, CancelledError("this receive was taken back before it got a message")
        finally:
            self._turn.release()
        super().cancel()

    def get_future(self) -> Future:
        with self._turn:
            self._post()
        if self._works:
            return super().get_future()
        if isinstance(self._error, Exception):
            return FailedWork(self._error, self._result).get_future()
        return CompletedWork(self._result).get_future()

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank
