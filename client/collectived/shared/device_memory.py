"""Memory on a GPU that a worker and this client share: input, staging, results, and what the client lends.

The worker writes a result into memory of the rank that gets it, so nothing is copied out of there, and no other client
can write it: on a GPU there is no memory that some may only read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectived.calls.limit import Limit
from collectived.calls.places import Address, Place, Stageable
from collectived.errors import ResourceExhaustedError, UnavailableError
from collectived.gpu.array import LEGACY_STREAM, DeviceArray
from collectived.gpu.driver import Cuda, CudaError
from collectived.gpu.mappings import mappings
from collectived.shared.lending import Lending
from collectived.shared.memory import InputArena, Memory, Slot
from collectived_proto.local.slots import Slots


def _over(cuda: Cuda, event: int) -> bool:
    """Not where the device has failed: then nobody knows what it still reads."""
    try:
        return cuda.over(event)
    except CudaError:
        return False


class DeviceStaging:
    """A slot for the leaves of one collective, laid out as Prepare said."""

    __slots__ = ("_memory", "address", "slot", "views")

    def __init__(self, memory: DeviceMemory, slot: Slot, places: Sequence[Place]) -> None:
        self._memory = memory
        self.slot = slot
        self.address = (slot.address,)
        self.views = [memory.array(slot, offset, shape, dtype) for offset, dtype, shape in places]

    def fill(self, arrays: Sequence[Any]) -> None:
        """Puts copies there on the streams of the leaves; what lies on the host has been read when this returns.

        No stream is waited for: it may wait itself for a collective that has not ended, and perhaps never will. So what
        lies on the host, which may be pinned, is copied to where the driver reads it at once.

        Raises:
            UnavailableError: the driver refuses.
        """
        try:
            self._fill(arrays)
        except CudaError as error:
            self._memory.retire(self, arrays)  # some copies may be under way
            raise UnavailableError(f"its value cannot be copied to where the worker reads it: {error}") from error

    def _fill(self, arrays: Sequence[Any]) -> None:
        for view, array in zip(self.views, arrays, strict=True):
            if isinstance(array, DeviceArray):
                view.assign(array)
            else:
                host = np.array(array, view.dtype, order="C")
                self._memory.cuda.copy(self._memory.device, view.address, host.ctypes.data, host.nbytes, view.stream)


class DeviceMemory(Memory):
    """All of a session's memory on one GPU of its worker. Thread-safe.

    Args:
        host: the session's memory on the host, over whose socket this one is asked for too.
        index: of the GPU in the worker, and `device` in this process.
        openings: allocations of this process that the worker opens there at a time.

    Attributes:
        kind: of arrays that lie here, as `values.leaves` keeps it.
    """

    def __init__(self, host: Memory, index: int, cuda: Cuda, device: int, openings: int = 0) -> None:
        super().__init__(host.source)
        self._lock = host._lock  # questions over the socket are answered in their order
        self._lending = Lending(host.source, self._lock, index, cuda, device, openings)
        self._index = index
        self.cuda = cuda
        self.device = device
        self._mappings = mappings(cuda, device)
        self._mappings.opened()
        self.kind: Any = None
        self._recording = threading.Lock()  # over all that follow
        self._stream = 0
        self._events: list[int] = []  # that serve again
        self._busy: list[tuple[int, Slot, int]] = []  # slots that a stream reads, and the event behind that

    def _ask(self, size: int, limit: Limit) -> InputArena:
        number, size, descriptor = self.source.ask_device(self._index, size, limit)
        try:
            mapping = self._mappings.map(descriptor, size)
        except CudaError as error:
            self.source.drop(number)
            raise ResourceExhaustedError(f"memory of GPU:{self._index} cannot be mapped here: {error}") from error
        return InputArena(number, mapping, mapping.address, Slots(size))

    def array(self, slot: Slot, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """What lies at an offset of a slot, which it keeps."""
        address = slot.arena.base + slot.offset + offset
        return DeviceArray(self.cuda, self.device, address, shape, dtype, slot, LEGACY_STREAM, self)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:  # type: ignore[override]
        """An uninitialised array there, row-major."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self.array(self._take(size), 0, shape, dtype)

    def locate(self, array: Any) -> Address | None:
        """(arena, byte offset) of an array that lies there, whoever made it of one of ours; else None."""
        if not isinstance(array, DeviceArray) or array.address % array.dtype.itemsize:
            return None
        return self._find(array.address, array.nbytes)

    def lend(self, array: DeviceArray, patience: float) -> tuple[Address, object] | None:
        """Where an array of the caller's own lies for the worker, as long as what is returned with it is held.

        None: it has to be copied. See `Lending.loan`.
        """
        loan = self._lending.loan(array, patience)
        return None if loan is None else ((loan.number, array.address - loan.allocation.address), loan)

    def stage(self, prepared: Stageable, patience: float = 30.0) -> Any:
        staging = self._spares.pop(prepared, None)
        if staging is None:
            slot = self._take(prepared.layout.staging_bytes, patience)
            staging = DeviceStaging(self, slot, prepared.staging_places)
        return staging

    def output(self, nbytes: int, patience: float) -> Slot:
        """Where the worker is to write a result, had within so many seconds."""
        return self._take(nbytes, patience)

    @property
    def stream(self) -> int:
        """See `DeviceRoom`."""
        with self._recording:
            if not self._stream:
                self._stream = self.cuda.stream(self.device)
            return self._stream

    def join(self, stream: int, other: int) -> None:
        """See `DeviceRoom`."""
        with self._recording:
            event = self._event()
            self.cuda.record(self.device, event, other)
            self.cuda.wait(self.device, event, stream)
            self._events.append(event)

    def busy(self, slot: Slot, stream: int) -> None:
        """See `DeviceRoom`."""
        with self._recording:
            again = bool(self._busy) and self._busy[-1][1:] == (slot, stream)
            event = self._busy.pop()[0] if again else self._event()
            self.cuda.record(self.device, event, stream)
            self._busy.append((event, slot, stream))

    def follow(self, event: int, stream: int) -> bool:
        """See `DeviceRoom`."""
        return self._mappings.follow(event, stream)

    def forget(self) -> None:
        super().forget()
        self._lending.forget()
        with self._recording:
            events = self._events + [event for event, _, _ in self._busy]
            stream, self._busy, self._events, self._stream = self._stream, [], [], 0
        with contextlib.suppress(CudaError):  # which matters to nobody any more
            for event in events:
                self.cuda.end_event(event)
            if stream:
                self.cuda.end_stream(stream)
        self._mappings.closed()

    def _event(self) -> int:
        return self._events.pop() if self._events else self.cuda.event(self.device)[0]

    def _fit(self, nbytes: int) -> Slot | None:
        with self._recording:
            still = [one for one in self._busy if not _over(self.cuda, one[0])]
            self._events += [one[0] for one in self._busy if one not in still]
            self._busy = still
        return super()._fit(nbytes)
