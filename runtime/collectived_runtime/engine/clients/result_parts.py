"""Messages to ranks about bytes of a result that are final while the rest is still coming."""

from __future__ import annotations

from collections.abc import Mapping

from collectived_proto.ipc.parts import ResultPart
from collectived_runtime.engine.base.arenas import ResultSlot
from collectived_runtime.engine.clients.doorbells import Doorbells

MIN_RESULT_BYTES = 4 << 20  # a shorter result is copied as quickly as a rank wakes
PART_BYTES = 2 << 20
MOST_PARTS = 32  # of one result


class ResultParts:
    """The parts of one result.

    Args:
        begins: by reader, where in the slot the result begins for it.
        data_start: where in the slot the data begin.

    Attributes:
        part_bytes: how many bytes are worth a message.
        is_told: whether any rank knows of the slot.
    """

    def __init__(
        self, doorbells: Doorbells, instance: int, slot: ResultSlot, begins: Mapping[int, int], data_start: int
    ) -> None:
        self.part_bytes = max(PART_BYTES, slot.size // MOST_PARTS)
        self.is_told = False
        self._doorbells = doorbells
        self._instance = instance
        self._slot = slot
        self._begins = begins
        self._data_start = data_start

    def tell(self, start: int, stop: int) -> None:
        """Bytes [start, stop) of the data are final. A rank that does not read its messages gets only the end."""
        for rank, begin in self._begins.items():
            local_rank = self._doorbells.local_ranks[rank]
            if local_rank.is_reading:
                self.is_told = True
                at, slot = self._data_start - begin, self._slot
                offset = slot.offset + begin
                part = ResultPart(self._instance, slot.arena.number, offset, slot.number, start + at, stop + at)
                self._doorbells.send(local_rank, part.encode())
