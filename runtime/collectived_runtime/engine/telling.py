"""What the local ranks of a generation are told of its instances: that a pack is complete, or that one has failed."""

from __future__ import annotations

from collections.abc import Iterable

from collectived_proto.local import wire
from collectived_proto.types import Verdict
from collectived_runtime.engine import verdicts
from collectived_runtime.engine.bells import Bells
from collectived_runtime.engine.ledger import Instance
from collectived_runtime.engine.lingering import Lingering
from collectived_runtime.engine.program import Program
from collectived_runtime.engine.results import Slot
from collectived_runtime.engine.seat import Seat


class Telling:
    """Of one generation, in its lane's thread."""

    def __init__(self, generation: int, bells: Bells, lingering: Lingering) -> None:
        self._generation = generation
        self._bells = bells
        self._lingering = lingering
        self._told: tuple[Verdict, bytes] | None = None  # the latest verdict, as clients are told it

    def done(
        self, instance: Instance, program: Program, slot: Slot | None, pack: int, last: bool, readers: tuple[int, ...]
    ) -> None:
        """A pack is complete: nothing of it is read or written any more. `readers` have its result in the slot."""
        number = instance.number
        if slot is not None:
            begin = slot.offset + len(program.head)
            done = wire.Done(number, pack, last, True, slot.arena.number, begin, slot.number)
            for rank, offset in program.outlines.items():
                self._deliver((rank,), number, done._replace(offset=slot.offset + offset).encode())
            knowing = [rank for rank in readers if rank not in program.outlines] if program.outlines else readers
            self._deliver(knowing, number, done.encode())
        if len(readers) < len(program.receivers):  # others have it in memory of their own
            having = [rank for rank in program.receivers if rank not in readers]
            self._deliver(having, number, wire.Done(number, pack, last, False).encode())
        if last and len(program.receivers) < len(instance.arrivals):
            others = [rank for rank in instance.arrivals if rank not in program.receivers]
            self._deliver(others, number, wire.Done(number, pack, last, False).encode())

    def failed(self, seat: Seat, instance: int, verdict: Verdict) -> None:
        """This instance of a rank's has failed. Where a GPU is still at it, the rank hears once more when it is not."""
        if self._told is None or self._told[0] is not verdict:
            self._told = verdict, verdicts.encode(verdict)
        in_use = self._lingering.concerns((self._generation, instance), seat)
        message = wire.failed(instance, self._told[1], in_use)
        seat.record(instance, message)
        self._bells.tell(seat, message)

    def aborted(self, instance: Instance) -> None:
        """Nobody has decided about it yet; who asks hears whether a GPU is still at it."""
        for rank in instance.arrivals:
            self._lingering.concerns((self._generation, instance.number), self._bells.seats[rank])

    def _deliver(self, ranks: Iterable[int], instance: int, message: bytes) -> None:
        for rank in ranks:
            seat = self._bells.seats[rank]
            seat.record(instance, message)
            self._bells.tell(seat, message)
