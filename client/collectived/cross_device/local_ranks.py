"""All ranks of one group in the hands of one client: what it submits, it submits on every rank, and waits for all."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectived import call_site
from collectived.calls.leader_follower import SIGNAL_CHECK_INTERVAL
from collectived.cross_device.timeouts import NO_DEADLINE, hold_lock, with_remaining_timeout
from collectived.errors import CollectiveError
from collectived.group import Group
from collectived.work import Work, wait
from collectived_proto.deadline import Deadline
from collectived_proto.options import CommunicationOptions


def run_in_threads(count: int, body: Callable[[int], Any], name: str) -> tuple[list[Any], list[BaseException]]:
    """Calls `body(0)` to `body(count - 1)`, each in a thread of its own, with the caller's context variables.

    Where the wait is interrupted the threads go on; they do not keep the interpreter from ending.

    Returns:
        The value that each returned, None for those that raised; and the errors, in order of time.
    """
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def one(number: int) -> None:
        try:
            results[number] = body(number)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(one, number), name=f"{name}-{number}", daemon=True
        )
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(SIGNAL_CHECK_INTERVAL)
    return results, errors


_LEAVE_TIMEOUT = 0.1  # seconds to announce to workers that ranks leave after a failure


class LocalRanks:
    """One hold on each rank, in order. Thread-safe: one collective after the other."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether this generation can carry nothing any more, as far as is known here."""
        return any(group._unusable_reason or group._channel.rank_state.is_over for group in self.groups)

    def run_collective(
        self,
        submit: Callable[[Group, CommunicationOptions], Work[Any]],
        options: CommunicationOptions,
        deadline: Deadline = NO_DEADLINE,
    ) -> list[Any]:
        """Starts a collective on every rank; the result of each, in memory of its own.

        Args:
            submit: starts it on a rank, asynchronously, with these options.
            options: their time limit counts from now; where there is a `deadline`, only what is left of it.

        Raises:
            CollectiveError: it failed; of all ranks the first one's error. TypeError, ValueError: as `submit` does.
        """
        with hold_lock(self._lock, deadline, "a collective"):
            left = with_remaining_timeout(options, deadline)
            works: list[Work[Any]] = []
            try:
                for group in self.groups:
                    works.append(submit(group, left))
                return [copy_shared(result) for result in wait(works)]
            except BaseException as error:
                # An interrupt may come when a rank has submitted and its work is not in the list yet.
                is_refusal = isinstance(error, (CollectiveError, TypeError, ValueError))
                self._handle_failure(error, submitted=bool(works) or not is_refusal)
                raise

    def run(self, body: Callable[[Group], Any]) -> list[Any]:
        """Runs `body(group)` as every rank, each in a thread of its own; results in order.

        Raises:
            Exception: the first that a body raised; the group is aborted with it, so that no other waits forever.
        """
        raised: list[BaseException] = []

        def one(rank: int) -> Any:
            group = self.groups[rank]
            try:
                return body(group)
            except BaseException as error:
                raised.append(error)  # before the error can reach the others
                with contextlib.suppress(CollectiveError):
                    group.abort(call_site.describe_error(error, error.__traceback__))
                raise

        with self._lock:
            try:
                results, _ = run_in_threads(len(self.groups), one, "replica")
            except BaseException as error:  # Ctrl-C, for one
                self.abort(f"{type(error).__name__} in the client that runs all replicas")
                self.leave()
                raise
            if raised:
                self.leave()
                raise raised[0]
        return results

    def _handle_failure(self, error: BaseException, submitted: bool) -> None:
        """Leaves, unless the group goes on: it never began, or ranks differed and all of them are in the successor."""
        if isinstance(error, CollectiveError) and error.verdict is not None:
            if error.rejoin:
                self.discard(_LEAVE_TIMEOUT)
        elif submitted:  # on some ranks, perhaps
            self.abort(f"{type(error).__name__} in the client that drives all ranks")
            self.discard(_LEAVE_TIMEOUT)

    def abort(self, reason: str) -> None:
        """Ends this generation on every rank; never raises."""
        for group in self.groups:
            with contextlib.suppress(CollectiveError):
                group.abort(reason)

    def discard(self, limit: float) -> None:
        """Leave, but wait no more than `limit` seconds for the answers of workers, for one may be stopped."""
        threads = [
            threading.Thread(target=LocalRanks([group]).leave, name="leave", daemon=True) for group in self.groups
        ]
        for thread in threads:
            thread.start()
        end = Deadline.after(limit)
        for thread in threads:
            thread.join(end.remaining())

    def leave(self) -> None:
        """Leave with every rank. Never raises: callers have got the errors before."""
        for group in self.groups:
            with contextlib.suppress(CollectiveError):
                group.leave()


def copy_shared(result: Any) -> Any:
    """A result, or a list of results, that looks into no memory which others see."""
    if isinstance(result, list):
        return [copy_shared(leaf) for leaf in result]
    return result.copy() if isinstance(result, np.ndarray) and not result.flags.writeable else result
