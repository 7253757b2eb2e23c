"""What GPUs are still at for instances that have ended: nobody can stop it, and nobody waits for it.

Its ranks hear of the end at once, with the word that their memory is in use; they hear again when it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from collectived_proto.local import wire
from collectived_runtime.engine.seat import Seat

Number = tuple[int, int]  # generation and instance


class Strand(Protocol):
    """That was stopped. It wakes the lane when it is `over`: then no GPU reads or writes for it any more."""

    @property
    def over(self) -> bool: ...


class Lingering:
    """Of a lane, in its thread.

    Args:
        tell: tells a rank something.
    """

    def __init__(self, tell: Callable[[Seat, bytes], object]) -> None:
        self._tell = tell
        self._strands: dict[Number, list[Strand]] = {}
        self._concerned: dict[Number, dict[int, Seat]] = {}  # by rank

    def __bool__(self) -> bool:
        return bool(self._strands)

    def add(self, number: Number, strand: Strand) -> None:
        self._strands.setdefault(number, []).append(strand)

    def concerns(self, number: Number, seat: Seat) -> bool:
        """Whether the memory of a rank that took part may still be in use. Then it is told when it is not."""
        if all(strand.over for strand in self._strands.get(number, ())):
            return False
        self._concerned.setdefault(number, {})[seat.rank] = seat
        return True

    def holds(self, seat: Seat) -> bool:
        """Whether any memory of a rank that was told so is still in use."""
        return any(seat.rank in seats for seats in self._concerned.values())

    def look(self) -> None:
        """Tells of what is over."""
        for number, strands in list(self._strands.items()):
            if all(strand.over for strand in strands):
                del self._strands[number]
                for seat in self._concerned.pop(number, {}).values():
                    self._tell(seat, wire.freed(*number))
