"""In which order a worker launches what NCCL carries out, so that all workers launch in the same order.

Kernels of two groups on the same GPUs wait for each other forever where two workers launch them in different orders.
So every such collective gets a *ticket*, and a worker launches in the order of tickets. For each collective every
worker of its group *proposes* a number above all that it knows; the highest proposal is its ticket, which all of them
*settle* on. A collective's *turn* has come when it is settled and no other one, settled or only proposed, has a lower
number: later proposals will be higher. Groups may share any workers, and no other worker need know which.

A worker proposes only when all have come (`gpu/launch_agreement.py`), so that no collective waits for one that a rank
has not submitted.

Source: D. Skeen's ordered multicast, in K. Birman and T. Joseph, "Reliable communication in the presence of failures",
ACM Transactions on Computer Systems 5(1), 1987.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple


class TicketKey(NamedTuple):
    """A collective: `step` tells several of one instance apart. Equal tickets go by key."""

    group: int
    generation: int
    instance: int
    step: int = 0


class LamportTickets:
    """The tickets of one worker, as numbers alone. Pure."""

    def __init__(self) -> None:
        self._clock = 0
        self._open: dict[TicketKey, tuple[int, bool]] = {}  # number, and whether it is settled

    def propose(self, key: TicketKey) -> int:
        """This worker's number for a collective."""
        self._clock += 1
        self._open[key] = self._clock, False
        return self._clock

    def settle(self, key: TicketKey, ticket: int) -> None:
        """All workers have agreed: `ticket` is the highest of their proposals."""
        self._clock = max(self._clock, ticket)
        self._open[key] = ticket, True

    def next_ready(self) -> TicketKey | None:
        """The ticket that may be launched now; it stays so until `remove`."""
        if not self._open:
            return None
        first = min(self._open, key=lambda key: (self._open[key][0], key))
        return first if self._open[first][1] else None

    def remove(self, key: TicketKey) -> None:
        """Forget a collective that has been launched, or never will be."""
        self._open.pop(key, None)


class QueueTurn:
    """One collective's place in the order. `done` when it may be launched."""

    __slots__ = ("_wake", "done")

    def __init__(self, wake: Callable[[], object]) -> None:
        self.done = False
        self._wake = wake

    def grant(self) -> None:
        if not self.done:
            self.done = True
            self._wake()


class LaunchQueue:
    """The tickets of a worker, for its group loops; may be used from any thread."""

    def __init__(self) -> None:
        self._tickets = LamportTickets()
        self._turns: dict[TicketKey, QueueTurn] = {}
        self._lock = threading.Lock()

    def propose(self, key: TicketKey) -> int:
        with self._lock:
            return self._tickets.propose(key)

    def settle(self, key: TicketKey, ticket: int, wake: Callable[[], object]) -> QueueTurn:
        """Its turn, which a group loop waits for; `wake` is called from any thread when it has come."""
        with self._lock:
            turn = self._turns[key] = QueueTurn(wake)
            self._tickets.settle(key, ticket)
            self._grant_next()
        return turn

    def remove(self, key: TicketKey) -> None:
        """Forget a collective that has been launched, or never will be; call it once for whatever was proposed."""
        with self._lock:
            self._turns.pop(key, None)
            self._tickets.remove(key)
            self._grant_next()

    def _grant_next(self) -> None:
        key = self._tickets.next_ready()
        if key is not None and key in self._turns:
            self._turns[key].grant()
