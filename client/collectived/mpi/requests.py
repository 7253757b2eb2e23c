"""Request: a call of MPI that is in flight; Status: the sender of a message, and its length."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectived.errors import CollectiveError
from collectived.mpi.constants import ANY_SOURCE, ANY_TAG, BYTE, UNDEFINED
from collectived.work import Work

Finish = Callable[[Any, "Status"], object]


class Status:
    """The source, tag and size of a received message; a call that takes one fills it.

    Attributes:
        source: the rank that sent it. tag: its tag. count: its bytes.
        cancelled: whether the receive was taken back instead.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self.fill(ANY_SOURCE)

    def fill(self, source: int, tag: int = ANY_TAG, count: int = 0) -> None:
        self.source, self.tag, self.count = source, tag, count

    def Get_source(self) -> int:
        """The rank that sent it."""
        return self.source

    def Get_tag(self) -> int:
        """Its tag."""
        return self.tag

    def Get_count(self, datatype: Any = BYTE) -> int:
        """Its elements of a datatype; `UNDEFINED` where its bytes are no whole number of such."""
        count, rest = divmod(self.count, np.dtype(datatype).itemsize)
        return UNDEFINED if rest else count

    Get_elements = Get_count

    def Is_cancelled(self) -> bool:
        """Whether the receive was taken back."""
        return self.cancelled


class Request:
    """A call in flight. True until a `Wait` or a successful `Test` has ended it: then receive buffers are filled."""

    def __init__(self, work: Work[Any] | None = None, finish: Finish | None = None) -> None:
        self._work = work
        self._finish = finish
        self._status = Status()

    def Wait(self, status: Status | None = None) -> bool:
        """Waits until the call has ended.

        Returns:
            True.

        Raises:
            CollectiveError: the call failed. ValueError: what was received does not fit its buffer.
        """
        work = self._work
        if work is not None and not self._status.cancelled:
            try:
                result = work.result()
                if work.source is not None:
                    self._status.source = work.source
                if self._finish is not None:
                    self._finish(result, self._status)
            except (CollectiveError, ValueError):
                self._work = self._finish = None
                raise
        self._work = self._finish = None  # not before: a signal's handler may raise amid it
        if status is not None:
            vars(status).update(vars(self._status))
        return True

    def Test(self, status: Status | None = None) -> bool:
        """Whether the call has ended; if so, as `Wait`."""
        return (self._work is None or self._work.done()) and self.Wait(status)

    def Cancel(self) -> None:
        """Takes a receive back if no message is there for it; `Status.Is_cancelled` says so after a `Wait`."""
        if self._work is not None:
            self._status.cancelled = self._work.cancel()

    def Free(self) -> None:
        """Lets go of the call, which goes on: a receive buffer stays as it is."""
        self._work = self._finish = None

    @staticmethod
    def Waitall(requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        """Waits for all; `statuses` gets theirs. The first error in order is raised when all have ended."""
        failures = [_wait(request, status) for request, status in _pair(requests, statuses)]
        for failure in failures:
            if failure is not None:
                raise failure
        return True

    @staticmethod
    def Testall(requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        """Whether all have ended; if so, as `Waitall`."""
        ended = all(request._work is None or request._work.done() for request in requests)
        return ended and Request.Waitall(requests, statuses)

    @staticmethod
    def Waitany(requests: Sequence[Request], status: Status | None = None) -> int:
        """Waits for one that is in flight; its index, or `UNDEFINED` where none is."""
        works = [request._work for request in requests if request._work is not None]
        if not works:
            return UNDEFINED
        ended = threading.Event()
        if not any(work.done() for work in works):
            for work in works:
                work.add_done_callback(lambda _: ended.set())
            ended.wait()
        return Request.Testany(requests, status)[0]

    @staticmethod
    def Testany(requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """The index of one that has ended, which is waited for, and whether there is one, or none in flight."""
        for index, request in enumerate(requests):
            if request._work is not None and request.Test(status):
                return index, True
        return UNDEFINED, not any(requests)

    def __bool__(self) -> bool:
        return self._work is not None


REQUEST_NULL = Request()


def _pair(requests: Sequence[Request], statuses: list[Status] | None) -> list[tuple[Request, Status]]:
    filled = [] if statuses is None else statuses
    filled += [Status() for _ in range(len(requests) - len(filled))]
    return list(zip(requests, filled, strict=False))


def _wait(request: Request, status: Status) -> Exception | None:
    try:
        request.Wait(status)
    except Exception as error:
        return error
    return None
