"""All ranks of one group in the hands of one client: what it submits, it submits on every rank, and waits for all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectived import site
from collectived.cross_device.threads import each
from collectived.errors import CollectiveError
from collectived.group import Group
from collectived.work import Work, wait


class Ranks:
    """One hold on each rank, in order. Thread-safe: one collective after the other."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        """Whether this generation can carry nothing any more, as far as is known here."""
        return any(group._unusable or group._doorbell.standing.over for group in self.groups)

    def carry_out(self, submit: Callable[[Group], Work]) -> list[Any]:
        """Starts a collective on every rank; the result of each, in memory of its own.

        Args:
            submit: starts it on a rank, asynchronously.

        Raises:
            CollectiveError: it failed; of all ranks the first one's error. TypeError, ValueError: as `submit` does.
        """
        with self._lock:
            works: list[Work] = []
            try:
                for group in self.groups:
                    works.append(submit(group))
                return [owned(result) for result in wait(works)]
            except BaseException as error:
                self._failed(error, submitted=bool(works))
                raise

    def run(self, body: Callable[[Group], Any]) -> list[Any]:
        """Runs `body(group)` as every rank, each in a thread of its own; results in order.

        Raises:
            Exception: the first that a body raised; the group is aborted with it, so that no other waits for ever.
        """
        raised: list[BaseException] = []

        def one(rank: int) -> Any:
            group = self.groups[rank]
            try:
                return body(group)
            except BaseException as error:
                raised.append(error)  # before the others can hear of it
                with contextlib.suppress(CollectiveError):
                    group.abort(site.describe(error, error.__traceback__))
                raise

        with self._lock:
            try:
                results, _ = each(len(self.groups), one, "replica")
            except BaseException as error:  # Ctrl-C, for one
                self.abort(f"{type(error).__name__} in the client that runs all replicas")
                self.leave()
                raise
            if raised:
                self.leave()
                raise raised[0]
        return results

    def _failed(self, error: BaseException, submitted: bool) -> None:
        """Leaves, unless the group goes on: it never began, or ranks differed and all of them are in the successor."""
        if isinstance(error, CollectiveError) and error.verdict is not None:
            if error.rejoin:
                self.leave()
        elif submitted:  # on some ranks, perhaps
            self.abort(f"{type(error).__name__} in the client that drives all ranks")
            self.leave()

    def abort(self, reason: str) -> None:
        """Ends this generation on every rank; never raises."""
        for group in self.groups:
            with contextlib.suppress(CollectiveError):
                group.abort(reason)

    def leave(self) -> None:
        """Leaves with every rank; never raises, for whoever was to hear of an error has heard of it."""
        for group in self.groups:
            with contextlib.suppress(CollectiveError):
                group.leave()


def owned(result: Any) -> Any:
    """A result, or a list of results, that looks into no memory which others see."""
    if isinstance(result, list):
        return [owned(leaf) for leaf in result]
    return result.copy() if isinstance(result, np.ndarray) and not result.flags.writeable else result
