"""Messages that a worker hands over to ranks that match by themselves."""

from __future__ import annotations

from collections import deque

from collectived_proto.ipc.rank_messages import Delivery
from collectived_runtime.engine.base.arenas import ResultSlot
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.p2p.message_memory import MessageMemory
from collectived_runtime.engine.run.message import MessageAddress

MOST_UNREAD = 1024  # messages on a doorbell; more wait here until its rank has read


class Deliveries:
    """Of one generation. In the group loop's thread."""

    def __init__(self, generation: int, doorbells: Doorbells, memory: MessageMemory) -> None:
        self._generation = generation
        self._doorbells = doorbells
        self._memory = memory
        self._kept: dict[int, deque[Delivery]] = {}  # by receiver

    def send(self, receiver: LocalRank, address: MessageAddress, slot: ResultSlot) -> None:
        """Hand a message over, behind those that have come before it."""
        _, sender, tag = address
        self._memory.hand_over(slot, receiver.rank)
        delivery = Delivery(self._generation, sender, tag, slot.arena.number, slot.offset, slot.number)
        if receiver.rank in self._kept or receiver.unread_count >= MOST_UNREAD:
            self._kept.setdefault(receiver.rank, deque()).append(delivery)
        else:
            self._doorbells.send(receiver, delivery.encode())

    def advance(self) -> None:
        """Hand over what ranks have room for."""
        for rank in list(self._kept):
            receiver, kept = self._doorbells.local_ranks[rank], self._kept[rank]
            while kept and receiver.unread_count < MOST_UNREAD and not receiver.closed:
                self._doorbells.send(receiver, kept.popleft().encode())
            if not kept or receiver.closed:  # all that a rank holds is released when it is let go
                self._kept.pop(rank, None)

    def close(self) -> None:
        for rank, kept in self._kept.items():
            for delivery in kept:
                self._memory.take_back(delivery.slot, rank)
        self._kept.clear()
