"""A rank's seats in the segments of its group: one engine for each generation."""

from __future__ import annotations

import os

from collectived.calls.prepare import PreparedCall
from collectived_native import core, segment
from collectived_native.segment import Geometry
from collectived_proto.across import LocalSeats, meets_in_segment
from collectived_proto.ipc import messages


class SegmentEngines:
    """Those of the rank's generation, and of one that is to follow. Under its owner's mutex where it changes.

    Args:
        local: the ranks of its worker.

    Attributes:
        seat: this rank's, in the latest of them.
        local: those ranks, in groups that have others, too, with which the worker exchanges values; else None.
        is_declined: whether the worker has said that the ranks do not meet in a segment.
    """

    def __init__(self, local: LocalSeats) -> None:
        self.seat = -1
        self.local = local if len(local.ranks) < local.size else None
        self.is_declined = False
        self._most_in_a_tick = 0
        self._engines: dict[int, core.Engine] = {}  # by generation
        self._knocker = -1

    def get(self, generation: int) -> core.Engine | None:
        return self._engines.get(generation)

    def __getitem__(self, generation: int) -> core.Engine:
        return self._engines[generation]

    def takes(self, prepared: PreparedCall) -> bool:
        """Whether the ranks bring it there, and their worker, which has a seat, takes it to other workers."""
        if self.local is None or not self._engines or self.is_declined:
            return False
        return meets_in_segment(prepared.collective, prepared.layout, self._most_in_a_tick, self.local)

    def take_in(self, message: bytes, descriptor: int, generation: int, doorbell: int) -> None:
        """Take in where the ranks of a generation meet.

        Args:
            descriptor: what came with the message. generation: the rank's own. doorbell: the descriptor of its socket.
        """
        try:
            kind = messages.parse_type(message)
            if kind is messages.MessageType.NO_SEGMENT:
                self.is_declined = True
                return
            if kind is messages.MessageType.KNOCKER:
                if self._knocker >= 0:
                    os.close(self._knocker)
                self._knocker, descriptor = descriptor, -1
                return
            given = messages.parse_segment(message)
            for old in [known for known in self._engines if known < generation]:
                self._engines.pop(old).detach()
            self.seat = given.seat
            geometry = Geometry.decode(given.geometry)
            self._most_in_a_tick = geometry.small
            self._engines[given.generation] = segment.attach(
                descriptor, geometry, given.seat, knock=self._knocker, doorbell=doorbell
            )
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def rouse(self) -> None:
        """Wake the threads that wait in the engines: there is news that did not come from the worker."""
        for engine in self._engines.values():
            engine.rouse()

    def limit(self, generation: int, instance: int) -> bool:
        """Take part in nothing from that instance on, unless others have its value; False: it goes by the worker."""
        engine = self._engines.get(generation)
        if engine is None or self.local is not None:
            return False
        engine.limit(instance)
        return True

    def leave(self) -> None:
        """Take part in nothing later."""
        for engine in self._engines.values():
            engine.leave()

    def detach(self) -> None:
        """End the native threads and let go of the memory."""
        while self._engines:
            self._engines.popitem()[1].detach()
        if self._knocker >= 0:
            os.close(self._knocker)
            self._knocker = -1

    def forget(self) -> None:
        """In a forked child: they belong to the parent, and the core lets no other process touch them."""
        self._engines.clear()
