"""Which receive takes which message. Pure.

Messages of one sender, receiver and tag are taken in the order in which they have come, and no receive overtakes one
that was posted before it: of the receives that could take a message, from its sender or from any, the first does. A
receive from any sender takes what has come first. The native core matches the letters of a segment by the same rules.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import count
from typing import Generic, TypeVar

from collectived_proto.types import ANY_SOURCE

R = TypeVar("R")
M = TypeVar("M")


class _Queue(Generic[R, M]):
    """The messages and receives of one receiver and tag; of two sides that match one is always empty."""

    def __init__(self) -> None:
        self.posted: dict[int, OrderedDict[R, int]] = {}  # receives by source, and when each was posted
        self.messages: OrderedDict[int, tuple[int, M]] = OrderedDict()  # by arrival: the sender, and what it sent
        self.arrivals: dict[int, deque[int]] = {}  # of each sender

    def pop_posted(self, source: int) -> R | None:
        """Take out the receive that gets a message of that sender."""
        first: tuple[int, int] | None = None
        for wanted in (source, ANY_SOURCE):
            receives = self.posted.get(wanted)
            if receives:
                when = next(iter(receives.values()))
                first = (when, wanted) if first is None else min(first, (when, wanted))
        if first is None:
            return None
        wanted = first[1]
        receive, _ = self.posted[wanted].popitem(last=False)
        if not self.posted[wanted]:
            del self.posted[wanted]
        return receive

    def find_message(self, source: int) -> M | None:
        """The message that a receive from that source would get."""
        if source == ANY_SOURCE:
            return next(iter(self.messages.values()))[1] if self.messages else None
        arrivals = self.arrivals.get(source)
        return self.messages[arrivals[0]][1] if arrivals else None

    def pop_message(self, source: int) -> tuple[int, M] | None:
        """Take out the message that a receive from that source gets, and return it with its sender."""
        if source == ANY_SOURCE:
            if not self.messages:
                return None
            _, found = self.messages.popitem(last=False)
            arrivals = self.arrivals[found[0]]
            arrivals.popleft()
        else:
            arrivals = self.arrivals.get(source, deque())
            if not arrivals:
                return None
            found = self.messages.pop(arrivals.popleft())
        if not arrivals:
            del self.arrivals[found[0]]
        return found


class Matcher(Generic[R, M]):
    """Posted receives and unexpected messages, of any number of receivers. A receive is posted once at a time."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], _Queue[R, M]] = {}  # by receiver and tag
        self._places: dict[R, tuple[tuple[int, int], int]] = {}  # of posted receives: the queue, and the source
        self._clock = count()

    def post(self, receive: R, receiver: int, source: int, tag: int) -> tuple[int, M] | None:
        """Post a receive.

        Args:
            source: a rank, or ANY_SOURCE.

        Returns:
            The sender and the message where one is there for it; None: it waits.
        """
        key = receiver, tag
        queue = self._queues.setdefault(key, _Queue())
        found = queue.pop_message(source)
        if found is None:
            queue.posted.setdefault(source, OrderedDict())[receive] = next(self._clock)
            self._places[receive] = key, source
        self._tidy(key)
        return found

    def deliver(self, message: M, receiver: int, source: int, tag: int) -> R | None:
        """A message has come; the receive that takes it, None: it waits to be asked for."""
        key = receiver, tag
        queue = self._queues.setdefault(key, _Queue())
        receive = queue.pop_posted(source)
        if receive is None:
            arrival = next(self._clock)
            queue.messages[arrival] = source, message
            queue.arrivals.setdefault(source, deque()).append(arrival)
        else:
            del self._places[receive]
        self._tidy(key)
        return receive

    def claim(self, receiver: int, source: int, tag: int) -> R | None:
        """A message begins to come: take out the receive that gets it. None: none waits for it; see `deliver`."""
        key = receiver, tag
        queue = self._queues.get(key)
        receive = None if queue is None else queue.pop_posted(source)
        if receive is not None:
            del self._places[receive]
            self._tidy(key)
        return receive

    def find(self, receiver: int, source: int, tag: int) -> M | None:
        """The message that a receive would get if it were posted now; None: it would wait."""
        queue = self._queues.get((receiver, tag))
        return None if queue is None else queue.find_message(source)

    def take(self, receiver: int, source: int, tag: int) -> tuple[int, M]:
        """Take out the message that `find` has found, with its sender."""
        key = receiver, tag
        found = self._queues[key].pop_message(source)
        assert found is not None
        self._tidy(key)
        return found

    def withdraw(self, receive: R) -> bool:
        """Take a posted receive back; False where it waits no more."""
        place = self._places.pop(receive, None)
        if place is None:
            return False
        key, source = place
        receives = self._queues[key].posted[source]
        del receives[receive]
        if not receives:
            del self._queues[key].posted[source]
        self._tidy(key)
        return True

    def expects(self, receiver: int, source: int, tag: int) -> bool:
        """Whether a receive waits for a message of that address."""
        queue = self._queues.get((receiver, tag))
        return queue is not None and (source in queue.posted or ANY_SOURCE in queue.posted)

    def list_messages(self) -> Iterator[M]:
        """The messages that no receive has asked for."""
        for queue in self._queues.values():
            for _, message in queue.messages.values():
                yield message

    def take_messages(self, receiver: int) -> list[tuple[int, int, M]]:
        """Take out the messages for a receiver for which nothing is matched any more.

        Returns:
            (sender, tag, message), in the order in which they have come.
        """
        found = []
        for key in [key for key in self._queues if key[0] == receiver]:
            queue = self._queues[key]
            found += [(arrival, source, key[1], message) for arrival, (source, message) in queue.messages.items()]
            queue.messages.clear()
            queue.arrivals.clear()
            self._tidy(key)
        found.sort(key=lambda one: one[0])
        return [(source, tag, message) for _, source, tag, message in found]

    def _tidy(self, key: tuple[int, int]) -> None:
        """Keep nothing of addresses at which nothing waits."""
        queue = self._queues[key]
        if not (queue.posted or queue.messages):
            del self._queues[key]
