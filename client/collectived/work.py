"""Work: a collective that was started with `async_op=True`."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import timedelta
from time import monotonic
from typing import Any

from collectived.call import Call
from collectived.doorbell import Doorbell
from collectived_proto.errors import CollectiveError, error_from_verdict
from collectived_proto.options import seconds

log = logging.getLogger("collectived")


class Work:
    """A collective in flight. Thread-safe.

    Worker memory that went in must stay untouched until it is done; ordinary arrays were copied. An error that nobody
    collects is logged, and raised by the next blocking call on the group. In a forked child every method raises
    FailedPreconditionError.
    """

    def __init__(self, call: Call, doorbell: Doorbell) -> None:
        self._call = call
        self._doorbell = doorbell
        self._lock = threading.Lock()
        self._collected = False
        self._value: Any = None

    def result(self, timeout: float | timedelta | None = None) -> Any:
        """The whole result, in the structure of the value.

        Args:
            timeout: seconds to wait; None: until the collective ends.

        Raises:
            TimeoutError: `timeout` has passed; the collective goes on.
            CollectiveError: the collective failed.
        """
        self._wait(timeout)
        self._raise_failure()
        with self._lock:
            if not self._collected:
                self._value = self._call.value()
                self._collected = True
            return self._value

    def wait(self, timeout: float | timedelta | None = None) -> Any:
        """The same as `result`."""
        return self.result(timeout)

    def done(self) -> bool:
        """Whether the collective has ended, well or not."""
        self._doorbell.check()
        if not self._call.complete:
            self._doorbell.glance()
        return self._call.complete

    def exception(self, timeout: float | timedelta | None = None) -> CollectiveError | None:
        """Waits as `result` does; the collective's error, or None where it went well."""
        self._wait(timeout)
        return self._failure()

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        """Calls `callback(work)` when the collective has ended, at once if it has; in a thread of the library's."""
        self._doorbell.check()
        if not self._doorbell.callbacks.add(self._call, lambda: callback(self)):
            callback(self)

    def as_completed(self) -> Iterator[tuple[str, Any]]:
        """(path, result) of every leaf as its pack completes, all leaves of a pack together, last leaves first.

        Raises:
            CollectiveError: the collective failed; what was yielded before is right.
        """
        call = self._call
        given = 0
        while given < len(call.prepared.layout.packs):
            self._doorbell.check()
            self._doorbell.wait(call, given + 1)
            if given >= len(call.packs):
                break
            with self._lock:
                leaves = [] if self._collected else call.leaves_of(call.packs[given])
            yield from leaves
            given += 1
        self.result()

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio  # late, for few need it

        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def tell(_: Work) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(None))

        self.add_done_callback(tell)
        yield from ended
        return self.result()

    def _wait(self, timeout: float | timedelta | None) -> None:
        self._doorbell.check()
        call = self._call
        limit = seconds(timeout, "timeout")
        if limit is None:
            self._doorbell.wait(call)
        elif not call.complete:
            self._doorbell.wait(call, until=monotonic() + limit)
            if not call.complete:
                raise TimeoutError(f"{call.prepared.op} has not ended within {limit:g} s; it goes on")

    def _failure(self) -> CollectiveError | None:
        verdict = self._call.verdict
        if verdict is None:
            return None
        self._collected = True
        return self._doorbell.error(verdict, self._call.prepared.site)

    def _raise_failure(self) -> None:
        failure = self._failure()
        if failure is not None:
            raise failure

    def __del__(self) -> None:
        verdict = self._call.verdict
        if verdict is not None and not self._collected and not self._doorbell.severed:
            log.error("nobody collected this error: %s (%s)", error_from_verdict(verdict), self._call.prepared.site)

    def __repr__(self) -> str:
        call = self._call
        state = ("failed" if call.verdict else "done") if call.complete else "in flight"
        return f"<Work {call.prepared.op} instance {call.instance} from {call.prepared.site}: {state}>"


def wait(works: Iterable[Work], timeout: float | timedelta | None = None) -> list[Any]:
    """Waits for all of them; their results in order.

    Args:
        timeout: seconds for all together; None: until they end.

    Raises:
        TimeoutError: `timeout` has passed; the collectives go on.
        CollectiveError: the first error in order; the others have been waited for.
    """
    pending = list(works)
    limit = seconds(timeout, "timeout")
    end = math.inf if limit is None else monotonic() + limit
    failures = [work.exception(None if limit is None else max(0.0, end - monotonic())) for work in pending]
    for failure in failures:
        if failure is not None:
            raise failure
    return [work.result() for work in pending]
