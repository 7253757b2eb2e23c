"""In which order the submissions of one rank are rung, whatever the order in which their streams come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from collectived_proto.errors import FailedPreconditionError, ResourceExhaustedError
from collectived_proto.ipc import messages

InstanceKey = tuple[int, int]  # generation, instance
T = TypeVar("T")

_GENERATIONS = 64  # that are remembered


class Sequencer:
    """Numbers of one rank: on from those of the generation before, sends and recvs from `P2P_BASE`. In the event loop.

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
        overtaken: Callable[[InstanceKey], None],
        blocked: Callable[[int], bool],
    ) -> None:
        self.current_generation = generation
        self._name = name
        self._check_generation = check
        self._check_reachable = overtaken
        self._is_blocked = blocked
        self._next: dict[int, list[int]] = {generation: [0, messages.P2P_BASE]}
        self._reserved: set[InstanceKey] = set()  # by streams that are about to submit
        self._waiters: dict[InstanceKey, asyncio.Event] = {}

    @contextlib.contextmanager
    def reserve_number(self, generation: int, instance: int | None, post: bool) -> Iterator[InstanceKey | None]:
        """Take a number, unless it is to be the one that is next when its time comes; free again if it is not rung.

        Args:
            generation: 0 for the current one.
            post: whether it is a send or recv.

        Raises:
            FailedPreconditionError: the generation is not known, or the number has been taken.
            ResourceExhaustedError: it is too far ahead.
            CollectiveError: the rank must not submit it any more.
        """
        generation = generation or self.current_generation
        self._check_generation(generation)
        following = self._find_next(generation, post)
        if instance is None:
            yield None
            return
        number = generation, instance
        if instance < following or number in self._reserved:
            self._check_reachable(number)
            raise FailedPreconditionError(f"instance {instance} has been submitted already; the next is {following}")
        most = messages.MAX_P2P_OUTSTANDING if post else messages.MAX_OUTSTANDING
        if instance >= following + most:
            raise ResourceExhaustedError(
                f"instance {instance} comes before instance {following} has been submitted: at most {most} may be in "
                "flight on a rank"
            )
        self._reserved.add(number)
        try:
            yield number
        finally:
            self._reserved.discard(number)

    def next_number(self, generation: int, post: bool) -> InstanceKey:
        """The next number in a generation; 0 for the current generation."""
        generation = generation or self.current_generation
        return generation, self._find_next(generation, post)

    def _find_next(self, generation: int, post: bool) -> int:
        known = self._next.get(generation)
        if known is None:
            raise FailedPreconditionError(
                f"generation {generation} of group {self._name!r} is not known to this rank, which is in generation "
                f"{self.current_generation}"
            )
        return known[post]

    def is_to_come(self, number: InstanceKey) -> bool:
        """Whether a send or recv may have this number that has not had its turn."""
        generation, instance = number
        if generation not in self._next:
            return False
        return 0 <= instance - self._next[generation][True] < messages.MAX_P2P_OUTSTANDING

    async def wait_turn(self, number: InstanceKey | None, generation: int, post: bool) -> InstanceKey:
        """Wait until everything before it has been rung, and everything of generations before has ended.

        Returns the number, or the one that is next where it is None.

        Raises:
            CollectiveError: its turn will not come any more.
        """
        while True:
            at = number[0] if number else generation or self.current_generation
            self._check_generation(at)
            following = at, self._find_next(at, post)
            if (number or following) == following and not self._is_blocked(at):
                return following
            self._check_reachable(number or following)
            await self._waiters.setdefault(number or following, asyncio.Event()).wait()

    def advance(self, number: InstanceKey) -> None:
        """Go on: that number has had its turn."""
        generation, instance = number
        self._next[generation][instance >= messages.P2P_BASE] = instance + 1
        self._reserved.discard(number)
        self.wake_waiters((generation, instance + 1))

    def add_generation(self, successor: int, first: int) -> None:
        """A generation that may be submitted to from here on, beginning with instance `first`."""
        if successor not in self._next:
            current = self._next.pop(self.current_generation, None)
            store_latest(self._next, successor, [first, messages.P2P_BASE])
            if current is not None:  # where this rank is, however many have begun since
                self._next[self.current_generation] = current

    def wake_waiters(self, *numbers: InstanceKey) -> None:
        """Those that wait for their turn look again; without numbers, all of them."""
        for number in numbers or tuple(self._waiters):
            waiting = self._waiters.pop(number, None)
            if waiting is not None:
                waiting.set()


def store_latest(known: dict[int, T], generation: int, value: T) -> None:
    """Keep what concerns a generation, of which there may be any number: that of the latest."""
    known.pop(generation, None)
    known[generation] = value
    if len(known) > _GENERATIONS:
        del known[next(iter(known))]
