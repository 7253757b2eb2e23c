"""Memory for messages that have come to a worker, and the limit on those that no receive has asked for.

A rank that matches by itself takes each message out of its slot as soon as a receive asks for it. So the slots that it
has not released are those of *unexpected* messages, for which there is no receive. It may release a slot a little late:
a message for which there is no room yet waits for that, before its sender is at fault: for a moment after the rank has
read what it was sent, for until then it is not known which messages are unexpected.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable

from collectived_runtime.engine.base import arenas
from collectived_runtime.engine.base.arenas import ResultArenas, ResultSlot
from collectived_runtime.engine.base.memory_budget import MemoryBudget, MemoryExhausted
from collectived_runtime.engine.clients.local_rank import LocalRank

WORKER = -1  # holds the slots of messages that it has not given to a rank yet
PATIENCE_SECONDS = 2.0  # with a rank that matches by itself and has read all messages,
MOST_PATIENCE_SECONDS = 60.0  # and with one that has not
_FEW_DIVISOR = 8  # of the limit, one part in so many is little
_FEW = 64  # slots of which not all need be held any more


class _LimitReached(MemoryExhausted):
    """Unexpected messages would take more than their share of memory."""


class MessageMemory:
    """Of one generation. In the group loop's thread.

    Attributes:
        arriving: slots whose messages come over a link, by what they come on.
    """

    def __init__(self, results: ResultArenas, budget: MemoryBudget) -> None:
        self._results = results
        self._budget = budget
        self.arriving: dict[Hashable, ResultSlot] = {}
        self._handed_over: dict[int, tuple[int, int]] = {}  # by number of the slot: its rank, and its size
        self._handed_bytes = 0
        self._next_look = _FEW  # at which of them are released: when there are so many
        # Messages without memory: when to look whether they are to wait any longer, and since when they wait.
        self._waiting: dict[Hashable, tuple[float, float]] = {}
        self._refused: set[Hashable] = set()  # those that have waited in vain

    @property
    def most_unexpected(self) -> int:
        """Bytes of unexpected messages, at most."""
        return self._budget.limit // arenas.UNEXPECTED_MEMORY_DIVISOR

    def acquire(
        self,
        message: Hashable,
        size: int,
        unexpected: Callable[[], int] | None,
        receiver: LocalRank | None,
        report: Callable[[Exception], None],
    ) -> ResultSlot | None:
        """Return memory for a message, which the worker holds; None: there is none now, and it may be asked again.

        Args:
            unexpected: counts the bytes of messages that this worker keeps for receives to come; None: a receive has
                asked for this one.
            receiver: the rank that it is for, where that matches by itself.
            report: called once where there is none in time.
        """
        if message in self._refused:
            return None
        try:
            if unexpected is not None:
                self._check_limit(size, unexpected(), receiver)
            slot = self._results.acquire(size, (WORKER,))
        except (MemoryExhausted, OSError) as error:
            if not self._may_wait(message, receiver if isinstance(error, _LimitReached) else None):
                self._waiting.pop(message, None)
                self._refused.add(message)
                report(error)
            return None
        self._waiting.pop(message, None)
        return slot

    def _may_wait(self, message: Hashable, receiver: LocalRank | None) -> bool:
        """Whether there may be memory for a message later: its receiver may have yet to read and to release slots."""
        if receiver is None:
            return False
        now = time.monotonic()
        look_at, began = self._waiting.setdefault(message, (now + PATIENCE_SECONDS, now))
        if look_at > now:
            return True
        if not receiver.has_unread or now >= began + MOST_PATIENCE_SECONDS:
            return False
        self._waiting[message] = now + PATIENCE_SECONDS, began
        return True

    def _check_limit(self, size: int, kept: int, receiver: LocalRank | None) -> None:
        """Raise where a message is too much.

        A rank that matches by itself may get one of any size, for it may have asked for it; but not if it keeps many
        bytes that it has not asked for.
        """
        most = self.most_unexpected
        kept += sum(slot.size for slot in self.arriving.values())
        if kept + self._handed_bytes + size <= most:
            return
        self._count_handed_over()
        if kept + self._handed_bytes + size <= most:
            return
        its_own = 0 if receiver is None else sum(n for one, n in self._handed_over.values() if one == receiver.rank)
        if receiver is None or its_own > most // _FEW_DIVISOR:
            raise _LimitReached(f"{kept + self._handed_bytes} bytes wait to be received already, and {most} may")

    def hand_over(self, slot: ResultSlot, rank: int) -> None:
        """A rank that matches by itself gets a message, and releases its slot."""
        slot.holders.add(rank)
        self._results.release(slot.number, WORKER)
        self._handed_over[slot.number] = rank, slot.size
        self._handed_bytes += slot.size
        if len(self._handed_over) >= self._next_look:
            self._count_handed_over()
            self._next_look = 2 * len(self._handed_over) + _FEW

    def _count_handed_over(self) -> None:
        """Forget slots that are released."""
        self._handed_over = {
            number: kept for number, kept in self._handed_over.items() if self._results.is_held(number, kept[0])
        }
        self._handed_bytes = sum(size for _, size in self._handed_over.values())

    def take_back(self, number: int, rank: int) -> None:
        """Release a slot for a rank that has not been sent it."""
        self._results.release(number, rank)

    def release(self, slot: ResultSlot) -> None:
        """Give back the memory of a message that goes to no rank."""
        self._results.release(slot.number, WORKER)

    def forget(self, message: Hashable) -> None:
        """A message comes no more."""
        self._waiting.pop(message, None)
        self._refused.discard(message)
        if (slot := self.arriving.pop(message, None)) is not None:
            self.release(slot)

    def is_refused(self, message: Hashable) -> bool:
        """Whether there was no memory for it in time."""
        return message in self._refused

    @property
    def is_awaited(self) -> bool:
        """Whether a message waits for memory."""
        return bool(self._waiting)

    @property
    def next_deadline(self) -> float:
        """When to ask again for those that wait."""
        return min((look_at for look_at, _ in self._waiting.values()), default=math.inf)

    def close(self) -> None:
        for message in list(self.arriving):
            self.forget(message)
        self._waiting.clear()
        self._refused.clear()
