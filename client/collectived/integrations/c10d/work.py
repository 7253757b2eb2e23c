"""Work: what an operation of a process group returns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from collectived.integrations.c10d.errors import translate
from collectived.integrations.c10d.lifetime import LOSES_WORKS, keep, release
from collectived.integrations.futures import (
    Future,
    complete_future,
    gpus_of,
    is_settling,
    make_future,
    queue_after_backward,
)
from collectived.work import Work, peek_failure
from collectived_proto.errors import CollectiveError

Start = Callable[..., Any]  # takes `options` and `async_op`
Finish = Callable[[list[Any]], object]  # the step to take with the results, once
NO_LIMIT = timedelta(0)


class CompletedWork(dist._Work):  # type: ignore[misc]  # torch is not there for the type checker
    """An operation that has ended well before it was returned."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        release(self)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Future:
        release(self)
        future = make_future(self._result)
        future.set_result(self._result)
        return future


class FailedWork(dist._Work):  # type: ignore[misc]
    """An operation that could not start. Raised where it is waited for: DDP must come to the end of a backward pass."""

    def __init__(self, error: Exception, result: Any) -> None:
        super().__init__()
        self._error = error
        self._result = result

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        release(self)
        raise self._error

    synchronize = result = wait

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return False

    def exception(self) -> Exception:
        return self._error

    def get_future(self) -> Future:
        release(self)
        future = make_future(self._result)
        complete_future(future, self._result, self._error)
        queue_after_backward(future, lambda: None)
        return future


class PendingWork(dist._Work):  # type: ignore[misc]
    """An operation in flight: some works of the service, and what is to be done with their results.

    Its tensors hold the result once a wait has returned, `is_completed` has said so, or the future has its value.
    """

    def __init__(self, works: Sequence[Work[Any]], finish: Finish | None, result: Any) -> None:
        super().__init__()
        self._works = tuple(works)
        self._finish = finish
        self._result = result
        self._lock = threading.Lock()
        self._finished = False
        self._finish_events: list[tuple[Any, Any]] = []  # GPUs, and events behind what was done with the results there
        self._error: BaseException | None = None
        self._future: Future | None = None
        self._claimed = False  # a thread gives the future its value
        self._left = len(self._works)  # of those whose end the future waits for

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        release(self)
        limit = timeout.total_seconds()
        try:
            results = [work.wait(limit if limit > 0 else None) for work in self._works]
        except CollectiveError as error:
            self._error = translated = translate(error)
            raise translated from error
        except TimeoutError as error:  # of this wait alone
            if LOSES_WORKS:
                keep(self)
            raise dist.DistBackendError(f"[collectived] Timed out waiting: {error}") from error
        except ValueError as error:  # the received value does not fit: an error of this rank alone
            self._error = error
            raise
        with self._lock:
            if not self._finished:
                if self._finish is not None:
                    self._put_in_place(self._finish, results)
                self._finished = True
            else:
                for gpu, event in self._finish_events:
                    torch.cuda.current_stream(gpu).wait_event(event)
        return True

    def _put_in_place(self, finish: Finish, results: list[Any]) -> None:
        try:
            finish(results)
        except Exception as error:  # of this rank alone
            self._error = error
            raise
        # On the streams of this thread: other threads that wait have others.
        self._finish_events = [(gpu, torch.cuda.current_stream(gpu).record_event()) for gpu in gpus_of(self._result)]

    def is_completed(self) -> bool:
        """Whether it has ended; only looks where it has failed.

        A group that goes on after an error does so once the caller has been given it. That must be at one point of the
        program, the same on all ranks: where it waits, and not where one of them happens to ask.
        """
        if not self.has_ended():
            return False
        if self._error is None and not self._finished:
            failure = self._peek_failure()
            if failure is not None:
                self._error = translate(failure)
            else:
                with contextlib.suppress(Exception):
                    self.wait()
        return True

    def has_ended(self) -> bool:
        """The same, of a work of whose result nothing is to be known yet."""
        return all(work.done() for work in self._works)

    def _peek_failure(self) -> CollectiveError | None:
        return next(filter(None, (peek_failure(work) for work in self._works)), None)

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return None if self.is_success() else self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        self.wait()
        return self._result

    def cancel(self) -> None:
        """Take receives back for which nothing has come."""
        for work in self._works:
            work.cancel()

    def _source_rank(self) -> int:
        """The sender of the message of a receive; -1 where it is not known yet."""
        source = self._works[0].source
        return -1 if source is None else source

    source_rank = _source_rank

    def get_future(self) -> Future:
        """A future of the tensors. Asked for by what hangs on another future, it is complete at once.

        For these run one after another in one thread, the one that would complete it.
        """
        release(self)
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = make_future(self._result)
        if is_settling():
            self._settle()
            return future
        for work in self._works:
            work.add_done_callback(self._on_work_ended)
        queue_after_backward(future, self._settle)
        return future

    def _on_work_ended(self, _: Work[Any]) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        failure = self._peek_failure()
        if failure is None:
            self._settle()
        else:
            self._complete_future(translate(failure), partial(_collect, self._works))

    def _settle(self) -> None:
        """Wait, and give the future its value unless another thread does."""
        failure: Exception | None = None
        try:
            self.wait()
        except Exception as error:
            failure = error
        self._complete_future(failure)

    def _complete_future(self, failure: Exception | None, collect: Callable[[], object] | None = None) -> None:
        with self._lock:
            if self._claimed:
                return
            self._claimed = True
        complete_future(self._future, self._result, failure, collect)


def _collect(works: Sequence[Work[Any]]) -> None:
    """Have the caller given the error of works that have ended."""
    try:
        for work in works:
            work.wait()
    except CollectiveError as error:
        raise translate(error) from error
