"""Flights: submissions over gRPC from the moment when they are numbered until nobody reads their results any more."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from collectived_proto.errors import CollectiveError, error_from_verdict
from collectived_proto.local import wire
from collectived_proto.types import Verdict


@dataclass(slots=True, eq=False)
class Flight:
    """One instance of one rank. Everything in the event loop.

    Attributes:
        upload: where its value lies. slot: the result slot that this rank holds for it, 0 for none.
        over: whether its lane has said the last about it.
        abandoned: whether nobody waits for it any more.
        waiting: how many waited to join the group when it was complete.
    """

    generation: int
    instance: int
    upload: int
    verdict: Verdict | None = None
    slot: int = 0
    over: bool = False
    abandoned: bool = False
    waiting: int = 0
    _dones: deque[wire.Done] = field(default_factory=deque)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _broken: Callable[[], CollectiveError] | None = None

    async def next(self) -> wire.Done:
        """The next pack that is complete.

        Raises:
            CollectiveError: the collective failed, or its rank is lost.
        """
        while not self._dones:
            self.check()
            self._news.clear()
            await self._news.wait()
        self.check()
        return self._dones.popleft()

    def check(self) -> None:
        """Raises what has become of it, unless all is well; until then its results are what they were."""
        if self.verdict is not None:
            raise error_from_verdict(self.verdict)
        if self._broken is not None:
            raise self._broken()

    def done(self, done: wire.Done) -> None:
        if done.result:
            self.slot = done.slot
        self.over = done.last
        self._dones.append(done)
        self._news.set()

    def failed(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.over = True
        self._news.set()

    def lost(self, why: Callable[[], CollectiveError]) -> None:
        """Its lane will say nothing more."""
        self._broken = why
        self.over = True
        self._news.set()
