"""Work: a collective that was started with `async_op=True`."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, Generic, TypeVar

from collectived.calls.call import ALL_PACKS, LAUNCHED, Call
from collectived.calls.callbacks import call_back
from collectived.calls.channel import RankChannel
from collectived.calls.unobserved_errors import UnobservedErrors
from collectived.values import nest
from collectived_proto.errors import CollectiveError, error_from_verdict
from collectived_proto.options import to_seconds
from collectived_proto.types import ANY_SOURCE, Recv, Verdict

T_co = TypeVar("T_co", covariant=True)


class Work(Generic[T_co]):
    """A collective in flight. Thread-safe.

    Worker memory that went in must stay untouched until it is done; ordinary arrays were copied. `out` holds the result
    when `done()` says so, a wait has returned, or callbacks are called. On GPUs `wait` returns earlier than all others:
    then the value, `out` and the inputs are to be used on the stream that was made to wait. The error of a work that is
    dropped before the program asked for it is logged once, and raised by the next call on the group. In a forked child
    every method raises FailedPreconditionError.
    """

    _observed = True  # of one that was never made

    def __init__(self, calls: Sequence[Call], route: RankChannel, uncollected: UnobservedErrors) -> None:
        self._call = calls[0]
        self._calls = tuple(calls)  # several of a `CompositeWork`; in order of submission
        self._channel = route
        self._unobserved_errors = uncollected
        self._lock = threading.Lock()
        self._has_value = False
        self._value: Any = None
        self._observed = False  # the caller knows how it ended

    def result(self, timeout: float | timedelta | None = None) -> T_co:
        """The whole result, in the structure of the value.

        Args:
            timeout: seconds to wait; None: until the collective ends.

        Raises:
            TimeoutError: `timeout` has passed; the collective goes on.
            CollectiveError: the collective failed.
            ValueError: the received value does not fit the `out` of a `recv`, or cannot be rebuilt without one; it is
                lost.
        """
        return self._result(timeout, monotonic())

    def wait(self, timeout: float | timedelta | None = None) -> T_co:
        """The whole result, for use on the caller's current stream; the same as `result` if it is not all on GPUs.

        On GPUs it returns once all of the collective has been launched there, and makes the caller's current stream
        wait for it. The value may be used on that stream at once. An error found later is raised by `result` and by
        the next call on the group; the value is undefined then.

        Args:
            timeout: seconds to wait on the host; None: until the collective is launched, or has ended.

        Raises:
            TimeoutError, CollectiveError, ValueError: as `result`.
        """
        began = monotonic()
        if self._call.is_stream_ordered:
            self._wait(timeout, LAUNCHED, began)
            with self._lock:
                if self._channel.wait_on_stream(self._call):
                    return self._get_value()
        return self._result(timeout, began)

    def done(self) -> bool:
        """Whether the collective has ended, well or not; on GPUs, there too."""
        self._channel.check_usable()
        if not self._is_complete:
            self._channel.poll()
        if not self._is_complete:
            return False
        self._copy_to_out()
        return True

    def exception(self, timeout: float | timedelta | None = None) -> CollectiveError | None:
        """Waits as `result` does; the collective's error, or None if it succeeded."""
        self._wait(timeout)
        return self._failure()

    @property
    def source(self) -> int | None:
        """Of a receive: the rank that sends what it takes; None where that is any rank, and nothing has come yet."""
        operation = self._call.prepared.collective.operation
        if not isinstance(operation, Recv):
            return None
        return self._call.source if operation.source == ANY_SOURCE else operation.source

    def cancel(self) -> bool:
        """Takes a posted receive back, unless a message is there for it already.

        Returns:
            True: it takes no message; later receives may take it; `result` raises `CancelledError`, and
            the group goes on. False: it has its message, or has ended otherwise: ask for its `result`. A send or
            another collective cannot be taken back: False.
        """
        self._channel.check_usable()
        if not isinstance(self._call.prepared.collective.operation, Recv):
            return False
        taken_back = self._channel.cancel_receive(self._call)
        self._observed |= taken_back
        return taken_back

    def add_done_callback(self, callback: Callable[[Work[T_co]], object]) -> None:
        """Has `callback(work)` called when the collective has ended, or soon if it has already.

        It is called in a thread of the library, one callback of a group after another; its exceptions are logged.

        Raises:
            TypeError: it cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"callback must be a function of this Work, got {callback!r}")
        self._channel.check_usable()
        self._schedule_callback([callback], 0)

    def as_completed(self) -> Iterator[tuple[nest.KeyPath, Any]]:
        """(path, result) of every leaf as its pack completes, all leaves of a pack together.

        A path is a tuple of keys, indices and names of fields: `('layer1', 0)`; `()` where the value is the leaf.

        Packs are sent last leaves first, and usually complete so. But they travel side by side, so their order may
        differ between ranks and from one call to the next: start no collectives from within the loop, or ranks start
        them in different orders. Sparse values come last, each by itself; a value for a rank that had none of its own
        comes together.

        Raises:
            CollectiveError: the collective failed; values yielded before are right.
            ValueError: as for `result`.
        """
        given: set[nest.KeyPath] = set()
        for call in self._calls:
            for number in range(call.prepared.pack_count):
                self._channel.check_usable()
                self._channel.wait(call, number + 1)
                if number >= len(call.completed_packs):  # it has failed
                    break
                with self._lock:
                    leaves = [] if self._has_value else self._get_pack_leaves(call, call.completed_packs[number])
                given.update(path for path, _ in leaves)
                yield from leaves
        spec, results = nest.flatten(self.result())
        for path, result in reversed(list(zip(nest.key_paths(spec), results, strict=True))):
            if path not in given:  # another thread has collected the whole result before
                yield path, result

    def __await__(self) -> Generator[Any, None, T_co]:
        import asyncio  # late, for few need it

        if self.done():
            return self.result()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def tell(_: Work[T_co]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no coroutine waits any more
                loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(None))

        for call in self._calls:
            call.has_awaiter = True
        self.add_done_callback(tell)
        yield from ended
        return self.result()

    @property
    def _is_complete(self) -> bool:
        return all(call.complete for call in self._calls)

    @property
    def _verdict(self) -> Verdict | None:
        return next((call.verdict for call in self._calls if call.verdict is not None), None)

    def _result(self, timeout: float | timedelta | None, began: float) -> T_co:
        self._wait(timeout, ALL_PACKS, began)
        self._raise_failure()
        with self._lock:
            value = self._get_value()
            self._observed = True
            return value

    def _get_value(self) -> T_co:
        """The value, made once. Under the lock."""
        if not self._has_value:
            self._value = self._build_value()
            self._has_value = True
            self._channel.rank_state.on_result_taken(self._calls[-1])
        self._call.sync_out_streams()
        value: T_co = self._value
        return value

    def _build_value(self) -> Any:
        return self._call.take_value()

    def _get_pack_leaves(self, call: Call, pack: int) -> list[tuple[nest.KeyPath, Any]]:
        return call.get_pack_leaves(pack)

    def _schedule_callback(self, once: list[Callable[[Work[T_co]], object]], first: int) -> None:
        """Calls back once the calls from the first one on have ended; those before it have.

        `once` holds the callback until it is called: where something fails on the way, it is gone again.
        """
        callbacks = self._channel.callbacks
        for number in range(first, len(self._calls)):
            if not self._calls[number].complete:
                callbacks.add(self._calls[number], partial(self._schedule_callback, once, number + 1))
                return
        callbacks.add(self._calls[-1], partial(self._run_callback, once))

    def _run_callback(self, once: list[Callable[[Work[T_co]], object]]) -> None:
        try:
            self._copy_to_out()
        finally:  # where that fails, `result` says why
            if once:
                call_back(partial(once.pop(), self))

    def _wait(self, timeout: float | timedelta | None, packs: int = ALL_PACKS, began: float | None = None) -> None:
        """Waits for `timeout` from now on, or from when it `began` by the monotonic clock."""
        self._channel.check_usable()
        limit = to_seconds(timeout, "timeout")
        end = math.inf if limit is None else (monotonic() if began is None else began) + limit
        for call in self._calls:
            if not call.complete:
                self._channel.wait(call, packs, until=end)
            if not (call.complete or (packs == LAUNCHED and call.is_ready(packs))):
                raise TimeoutError(f"{call.prepared.op} has not ended within {limit:g} s; it goes on")
        if packs == ALL_PACKS:
            self._copy_to_out()

    def _copy_to_out(self) -> None:
        if self._call.out is not None:
            with self._lock:
                if not self._has_value:
                    self._call.copy_to_out()
                self._call.sync_out_streams()

    def _failure(self) -> CollectiveError | None:
        verdict = self._verdict
        if verdict is None:
            return None
        self._observed = True
        return self._channel.report_verdict(verdict, self._call.prepared.site, self._call.is_out_intact)

    def _raise_failure(self) -> None:
        failure = self._failure()
        if failure is not None:
            raise failure

    def __del__(self) -> None:
        if self._observed or self._channel.invalid_reason:
            return
        for call in self._calls:  # a call without a verdict yet reports it when it comes
            call.error_sink = self._unobserved_errors
        verdict = self._verdict
        if verdict is not None and self._unobserved_errors.record(verdict):
            self._unobserved_errors.log(verdict, self._call.prepared.site)

    def __repr__(self) -> str:
        call = self._call
        state = ("failed" if self._verdict else "done") if self._is_complete else "in flight"
        more = f" and {len(self._calls) - 1} more" if len(self._calls) > 1 else ""
        return f"<Work {call.prepared.op} {call.display_number}{more} from {call.prepared.site}: {state}>"


def wait(works: Iterable[Work[T_co]], timeout: float | timedelta | None = None) -> list[T_co]:
    """Waits for all of them; their results in order.

    Args:
        timeout: seconds for all together; None: until they end.

    Raises:
        TypeError: one of them is no `Work`.
        TimeoutError: `timeout` has passed; the collectives go on.
        CollectiveError: the first error in order; the others have been waited for.
    """
    if not isinstance(works, Iterable):
        raise TypeError(f"works must be several Works, such as a list of them, got {works!r}")
    pending = list(works)
    for number, work in enumerate(pending):
        if not isinstance(work, Work):
            raise TypeError(f"works[{number}] must be a Work, as async_op=True returns them, got {work!r}")
    limit = to_seconds(timeout, "timeout")
    end = math.inf if limit is None else monotonic() + limit
    failures = [work.exception(None if limit is None else max(0.0, end - monotonic())) for work in pending]
    for failure in failures:
        if failure is not None:
            raise failure
    return [work.result() for work in pending]


def peek_failure(work: Work[Any]) -> CollectiveError | None:
    """The error of a work that is done, as in `exception`, but the caller counts as not having been given it.

    For callbacks: a group that goes on after an error does so once the caller has been given it.
    """
    verdict = work._verdict
    return None if verdict is None else error_from_verdict(verdict, work._call.prepared.site)
