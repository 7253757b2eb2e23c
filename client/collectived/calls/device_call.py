"""Calls that are carried from and to the memory of a GPU: the worker writes the result where the call says."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectived.calls.call import Call
from collectived.calls.places import Address
from collectived.calls.prepare import Prepared
from collectived.errors import InternalError
from collectived.gpu.array import LEGACY_STREAM, DeviceArray
from collectived.values import nest
from collectived.values.leaves import Array
from collectived_proto.types import Verdict


class DeviceCall(Call):
    """Results on a GPU look into that memory, which is this rank's own; others are copied to the host."""

    marks = True
    __slots__ = ("_held", "_streams", "output")

    def __init__(
        self, prepared: Prepared, arrays: list[Array], located: list[Address | None] | None, spec: nest.Spec
    ) -> None:
        super().__init__(prepared, arrays, located, spec)
        given: list[Any] = arrays
        on_gpus = [array for array in given if isinstance(array, DeviceArray)]
        streams = {array.stream for array in on_gpus}
        self._held: list[object] = [*on_gpus]  # what is read until this has ended, be it by a copy on a stream
        self._streams = tuple(streams) or (LEGACY_STREAM,)
        self.output = None
        if prepared.room is not None and prepared.receives:
            self.slot = prepared.room.output(prepared.layout.result_bytes)
            self.output = self.slot.address

    def lend(self, located: list[Address | None] | None, patience: float) -> list[Address | None] | None:
        room, given = self.prepared.room, [array for array in self._held if isinstance(array, DeviceArray)]
        if room is None or not self.prepared.direct or len(given) < len(self.arrays):
            return located
        found: list[Address | None] = []
        loans: list[object] = []
        for array, known in zip(given, located or [None] * len(given), strict=True):
            lent = room.lend(array, patience) if known is None else None
            if lent is not None:
                known, loan = lent
                loans.append(loan)
            elif known is None:
                return located  # they are copied, all of them
            found.append(known)
        self._held += loans
        return found

    def mark(self, number: int, events: dict[int, int]) -> bytes:
        """Records the event of that number behind what is on the streams of the value.

        Args:
            events: those of the caller, by number; a new one is made where there is none, whose handle is returned.
        """
        room = self.prepared.room
        if room is None:
            raise InternalError(f"{self.prepared.op} is not carried on a GPU")
        handle = b""
        if number not in events:
            events[number], handle = room.cuda.event(room.device)
        first, *others = self._streams
        for stream in others:  # a value of several streams; an event stands on one
            room.cuda.synchronize(room.device, stream)
        room.cuda.record(room.device, events[number], first)
        return handle

    def end(self, verdict: Verdict | None = None, retire: bool = False) -> None:
        if retire:  # the worker may still be writing it
            self.prepared.memory.retire((self.slot, self._held), ())
        self._held = []
        super().end(verdict, retire)

    def _all(self) -> list[Any]:
        return [self._taken(index) for index in range(len(self.prepared.kinds))]

    def _take(self, index: int) -> Any:
        room = self.prepared.room
        if self.slot is None or room is None:
            raise InternalError(f"{self.prepared.op} has no result")  # it is made with a place for it
        offset, dtype, shape = self.prepared.result_places[index]
        found = room.array(self.slot, offset, shape, dtype)
        if self.out is not None:
            into: Any = self.out.views[index]
            if isinstance(into, DeviceArray):
                into.assign(found)
            else:
                np.copyto(into, np.asarray(found))
            return self.out.leaves[index]
        kind = self.prepared.kinds[index]
        return kind.restore(found if kind.device else np.asarray(found))
