"""Flights: submissions over gRPC from the moment when they are numbered until their results are not read any more."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from collectived_proto.errors import CollectiveError, error_from_verdict
from collectived_proto.ipc import messages
from collectived_proto.types import Verdict


@dataclass(slots=True, eq=False)
class RemoteInstance:
    """One instance of one rank. Everything in the event loop.

    Attributes:
        upload: where its value lies. slot: the result slot that this rank holds for it, 0 for none.
        is_over: whether its group loop has sent the last message about it.
        abandoned: whether no call waits for it any more.
        withdrawn: the code with which a receive has ended alone; 0 for none.
        waiting_joiners: how many waited to join the group when it was complete.
    """

    generation: int
    instance: int
    upload: int
    verdict: Verdict | None = None
    slot: int = 0
    is_over: bool = False
    abandoned: bool = False
    withdrawn: int = 0
    waiting_joiners: int = 0
    _completions: deque[messages.Completion] = field(default_factory=deque)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _make_lost_error: Callable[[], CollectiveError] | None = None

    async def next_completion(self) -> messages.Completion | None:
        """The next pack that is complete; None of a receive that has ended alone.

        Raises:
            CollectiveError: the collective failed, or its rank is lost.
        """
        while not self._completions:
            self.raise_if_failed()
            if self.withdrawn:
                return None
            self._changed.clear()
            await self._changed.wait()
        self.raise_if_failed()
        return self._completions.popleft()

    def raise_if_failed(self) -> None:
        """Raise what has become of it, unless all is well; until then its results are what they were."""
        if self.verdict is not None:
            raise error_from_verdict(self.verdict)
        if self._make_lost_error is not None:
            raise self._make_lost_error()

    def on_done(self, done: messages.Completion) -> None:
        if done.has_result:
            self.slot = done.slot
        self.is_over = done.is_last
        self._completions.append(done)
        self._changed.set()

    def on_withdrawn(self, code: int) -> None:
        self.withdrawn = code
        self.is_over = True
        self._changed.set()

    def on_failed(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.is_over = True
        self._changed.set()

    def on_lost(self, why: Callable[[], CollectiveError]) -> None:
        """Wake waiting calls: the group loop will send nothing more."""
        self._make_lost_error = why
        self.is_over = True
        self._changed.set()
