"""Calls that are carried from and to the memory of a GPU: the worker writes the result where the call says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from collectived.calls.call import ALL, LAUNCHED, Call
from collectived.calls.places import Address, DeviceRoom
from collectived.calls.prepare import Prepared
from collectived.errors import InternalError, UnavailableError
from collectived.gpu.array import LEGACY_STREAM, DeviceArray, brought, fetched
from collectived.gpu.driver import CudaError
from collectived.values import nest
from collectived.values.leaves import Array, kind_of
from collectived_proto.types import Verdict

_NOT_COPIED = "its result is there, but cannot be copied to where it is wanted"


@contextlib.contextmanager
def _driver(what: str) -> Iterator[None]:
    """Where the driver refuses, the caller hears what could not be done."""
    try:
        yield
    except CudaError as error:
        raise UnavailableError(f"{what}: {error}") from error


class DeviceCall(Call):
    """Results on a GPU look into that memory, which is this rank's own; others are copied to the host.

    What lies on another GPU than the rank's passes by the host, to and fro: streams and events are of one GPU.
    """

    marks = True
    __slots__ = ("_away", "_copied", "_current", "_given", "_held", "_writing", "ordered", "output")

    def __init__(
        self, prepared: Prepared, arrays: list[Array], located: list[Address | None] | None, spec: nest.Spec
    ) -> None:
        given: list[Any] = arrays
        if prepared.room is not None:
            with _driver("its value cannot be brought to the host"):
                given = brought(arrays, prepared.room.device)
        self._away = [one is not array for one, array in zip(given, arrays, strict=True)]  # by leaf
        super().__init__(prepared, given, located, spec)
        self._held: list[object] = [array for array in given if isinstance(array, DeviceArray)]  # read until the end
        self._given = [array.stream if isinstance(array, DeviceArray) else 0 for array in given]  # by leaf
        self._current: list[int] = []  # by leaf, the streams that wait for it
        self._copied: dict[int, int] = {}  # by leaf of `out`, the stream on which it is copied there
        self._writing: Any = None  # where the worker may be writing
        self.ordered = False
        self.output = None

    def reserve(self, patience: float) -> None:
        prepared = self.prepared
        if prepared.room is not None and prepared.receives:
            self._writing = self.slot = prepared.room.output(prepared.layout.result_bytes, patience)
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

    @property
    def _room(self) -> DeviceRoom:
        if self.prepared.room is None:
            raise InternalError(f"{self.prepared.op} is not carried on a GPU")
        return self.prepared.room

    def mark(self, number: int, events: dict[int, int]) -> bytes:
        """Records the event of that number behind what is on the streams of the value.

        Args:
            events: those of the caller, by number; a new one is made where there is none, whose handle is returned.

        Raises:
            CudaError: the driver refuses; the worker has been told of nothing.
        """
        room, event, handle = self._room, events.get(number), b""
        if event is None:
            event, handle = room.cuda.event(room.device)
        # What lay on the host is copied on the legacy stream; see `DeviceStaging.fill`.
        first, *others = dict.fromkeys(stream or LEGACY_STREAM for stream in self._given)
        for other in others:  # a value of several streams; an event stands on one
            room.join(first, other)
        room.cuda.record(room.device, event, first)
        events[number] = event  # not before, for the worker is told of it once
        return handle

    def order(self) -> None:
        """Asks the worker for a word when all is launched; not where part of the result is for the host, or for a
        library that reads it on streams of its own."""
        on_gpu = bool(self._given) and all(self._given) and all(kind.ordered for kind in self.prepared.kinds)
        if self.out is not None:
            views: list[Any] = self.out.views
            on_gpu = on_gpu and all(self._near(view) for view in views)
        self.ordered = on_gpu and self.prepared.receives

    def _near(self, array: object) -> bool:
        """Whether it lies on the rank's GPU."""
        return isinstance(array, DeviceArray) and array.device == self._room.device

    def open_event(self, handle: bytes) -> int:
        """An event of the worker."""
        room = self._room
        return room.cuda.open_event(room.device, handle)

    def follow(self, event: int) -> bool:
        """Makes the caller's current streams wait for the event; then its value may be had, for use on them.

        False: that cannot be done just now, and the value is to be waited for.
        """
        room = self._room
        self._current = [
            given if kind.stream is None else kind.stream()
            for kind, given in zip(self.prepared.kinds, self._given, strict=True)
        ]
        if all([room.follow(event, stream) for stream in dict.fromkeys(self._current)]):
            return True
        self._current = []
        return False

    def ready(self, packs: int = ALL) -> bool:
        if packs == LAUNCHED:
            return self.complete or self.launched is not None
        return super().ready(packs)

    def end(self, verdict: Verdict | None = None, retire: bool = False) -> None:
        if retire:  # the worker may still be writing it
            self.retired += (self.prepared.memory.retire((self._writing, self._held), ()),)
        if verdict is not None and self.staging is not None:
            self._leave_staging(retire)
        self._writing = self.launched = None
        self._held = []
        super().end(verdict, retire)

    def abandon(self) -> None:
        if self.staging is not None:
            self._leave_staging(retire=False)

    def _leave_staging(self, retire: bool) -> None:
        """Whether the worker reads it or not, copies into it may still be under way: it serves again after them."""
        staging, self.staging = self.staging, None
        if retire:
            self.retired += (self.prepared.memory.retire(staging, ()),)
        try:
            for stream in dict.fromkeys(given or LEGACY_STREAM for given in self._given):
                self._room.busy(staging.slot, stream)
        except CudaError:
            self.prepared.memory.retire(staging, ())

    def reach_out(self) -> None:
        for index, stream in self._copied.items():
            current = self._current_of(index)
            if current != stream:
                with _driver("the stream that is current now cannot wait for its result"):
                    self._room.join(current, stream)

    def _current_of(self, index: int) -> int:
        """The stream on which the caller uses a leaf of `out` now."""
        if self.out is None:
            raise InternalError(f"{self.prepared.op} has no `out`")  # nothing is copied there then
        view: Any = self.out.views[index]
        stream = kind_of(self.out.leaves[index]).stream
        return view.stream if stream is None else stream()

    def _all(self) -> list[Any]:
        kinds = self.prepared.kinds
        if self.out is None and not self._leaves and not any(kind.device for kind in kinds):
            with _driver(_NOT_COPIED):
                arrays = fetched([self._found(index, self._room.stream) for index in range(len(kinds))])
            return [kind.restore(array) for kind, array in zip(kinds, arrays, strict=True)]
        return [self._taken(index) for index in range(len(kinds))]

    def _taken(self, index: int) -> Any:
        with _driver(_NOT_COPIED):
            return super()._taken(index)

    def _found(self, index: int, stream: int) -> DeviceArray:
        """A leaf of the result, where the worker has written it, for use on a stream."""
        if self.slot is None:
            raise InternalError(f"{self.prepared.op} has no result")  # it is made with a place for it
        offset, dtype, shape = self.prepared.result_places[index]
        found = self._room.array(self.slot, offset, shape, dtype)
        found.stream = stream
        return found

    def _take(self, index: int) -> Any:
        kind, current = self.prepared.kinds[index], self._current[index] if self._current else 0
        if self.out is None:
            if kind.device and not self._away[index]:
                return kind.restore(self._found(index, current or LEGACY_STREAM))
            return kind.restore(self._on_host(index))
        into: Any = self.out.views[index]
        if self._near(into):
            found = self._found(index, current or into.stream)
            into.assign(found)
            self._room.busy(self.slot, found.stream)
            self._copied[index] = found.stream
        elif isinstance(into, DeviceArray):
            into.assign(self._on_host(index))
        else:
            np.copyto(into, self._on_host(index))
        return self.out.leaves[index]

    def _on_host(self, index: int) -> Array:
        (found,) = fetched([self._found(index, self._room.stream)])
        return found
