"""In which order the submissions of one rank are rung, whatever the order in which their streams come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from collectived_proto.errors import FailedPreconditionError, ResourceExhaustedError
from collectived_proto.local import wire

Number = tuple[int, int]  # generation, instance
T = TypeVar("T")

_GENERATIONS = 64  # that are remembered


class Order:
    """Numbers of one rank: from 0 in each generation, sends and recvs from `wire.POST`. In the event loop.

    Args:
        name: of the group, for people.
        generation: in which it was joined.
        check: raises what keeps a rank from submitting anything more in a generation.
        overtaken: raises what keeps a number from ever having its turn.
        blocked: whether something of an earlier generation is still in flight.

    Attributes:
        current: the generation in which what does not say otherwise is submitted.
    """

    def __init__(
        self,
        name: str,
        generation: int,
        check: Callable[[int], None],
        overtaken: Callable[[Number], None],
        blocked: Callable[[int], bool],
    ) -> None:
        self.current = generation
        self._name = name
        self._check = check
        self._overtaken = overtaken
        self._blocked = blocked
        self._next: dict[int, list[int]] = {generation: [0, wire.POST]}
        self._taken: set[Number] = set()  # by streams that are about to submit
        self._waiting: dict[Number, asyncio.Event] = {}

    @contextlib.contextmanager
    def numbered(self, generation: int, instance: int | None, post: bool) -> Iterator[Number | None]:
        """Takes a number, unless it is to be the one that is next when its time comes; free again if it is not rung.

        Args:
            generation: 0 for the current one.
            post: whether it is a send or recv.

        Raises:
            FailedPreconditionError: the generation is not known, or the number has been taken.
            ResourceExhaustedError: it is too far ahead.
            CollectiveError: the rank must not submit it any more.
        """
        generation = generation or self.current
        self._check(generation)
        if generation not in self._next:
            raise FailedPreconditionError(
                f"generation {generation} of group {self._name!r} is not known to this rank, which is in generation "
                f"{self.current}"
            )
        if instance is None:
            yield None
            return
        number, following = (generation, instance), self._next[generation][post]
        if instance < following or number in self._taken:
            self._overtaken(number)
            raise FailedPreconditionError(f"instance {instance} has been submitted already; the next is {following}")
        if instance >= following + wire.MAX_OUTSTANDING:
            raise ResourceExhaustedError(
                f"instance {instance} comes before instance {following} has been submitted: at most "
                f"{wire.MAX_OUTSTANDING} may be in flight on a rank"
            )
        self._taken.add(number)
        try:
            yield number
        finally:
            self._taken.discard(number)

    def following(self, generation: int, post: bool) -> Number:
        """What is rung next in a generation, 0 for the current one."""
        generation = generation or self.current
        return generation, self._next[generation][post]

    async def turn(self, number: Number | None, generation: int, post: bool) -> Number:
        """Waits until everything before it has been rung, and everything of generations before has ended.

        Returns the number, or the one that is next where it is None.

        Raises:
            CollectiveError: its turn will not come any more.
        """
        while True:
            at = number[0] if number else generation or self.current
            self._check(at)
            following = at, self._next[at][post]
            if (number or following) == following and not self._blocked(at):
                return following
            self._overtaken(number or following)
            await self._waiting.setdefault(number or following, asyncio.Event()).wait()

    def rung(self, number: Number) -> None:
        """That number has had its turn."""
        generation, instance = number
        self._next[generation][instance >= wire.POST] = instance + 1
        self._taken.discard(number)
        self.stir((generation, instance + 1))

    def follows(self, successor: int) -> None:
        """A generation that may be submitted to from here on."""
        if successor not in self._next:
            remember(self._next, successor, [0, wire.POST])

    def stir(self, *numbers: Number) -> None:
        """Those that wait for their turn look again; without numbers, all of them."""
        for number in numbers or tuple(self._waiting):
            waiting = self._waiting.pop(number, None)
            if waiting is not None:
                waiting.set()


def remember(known: dict[int, T], generation: int, value: T) -> None:
    """Keeps what concerns a generation, of which there may be any number: that of the latest."""
    known.pop(generation, None)
    known[generation] = value
    if len(known) > _GENERATIONS:
        del known[next(iter(known))]
