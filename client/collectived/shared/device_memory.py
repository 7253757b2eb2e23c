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

from collectived.calls.buffers import ArenaAddress, LeafLocation, Stageable
from collectived.calls.timeout import Timeout
from collectived.errors import ResourceExhaustedError, UnavailableError
from collectived.gpu.array import DeviceArray
from collectived.gpu.driver import Cuda, CudaError
from collectived.gpu.mappings import get_mappings
from collectived.shared.ipc_export import IpcExports
from collectived.shared.memory import InputArena, InputSlot, SharedMemory
from collectived_proto.ipc.free_list import FreeList


def _is_event_done(cuda: Cuda, event: int) -> bool:
    """Whether the event is over. False where the device has failed, because it may still read."""
    try:
        return cuda.is_event_done(event)
    except CudaError:
        return False


class DeviceStaging:
    """A slot for the leaves of one collective, laid out as Prepare said."""

    __slots__ = ("_memory", "address", "slot", "views")

    def __init__(self, memory: DeviceMemory, slot: InputSlot, places: Sequence[LeafLocation]) -> None:
        self._memory = memory
        self.slot = slot
        self.address = (slot.address,)
        self.views = [memory.array(slot, offset, shape, dtype) for offset, dtype, shape in places]

    def fill(self, arrays: Sequence[Any]) -> None:
        """Put copies there on the streams of the leaves. Leaves on the host have been read when this returns.

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


class DeviceMemory(SharedMemory):
    """All of a session's memory on one GPU of its worker. Thread-safe.

    Args:
        host: the session's memory on the host, over whose socket this one is asked for too.
        index: of the GPU in the worker, and `device` in this process.
        openings: allocations of this process that the worker opens there at a time.

    Attributes:
        kind: of arrays that lie here, as `values.leaves` keeps it.
    """

    def __init__(self, host: SharedMemory, index: int, cuda: Cuda, device: int, openings: int = 0) -> None:
        super().__init__(host.session_socket)
        self._lock = host._lock  # questions over the socket are answered in their order
        self._ipc_exports = IpcExports(host.session_socket, self._lock, index, cuda, device, openings)
        self._index = index
        self.cuda = cuda
        self.device = device
        self._mappings = get_mappings(cuda, device)
        self._mappings.add_session()
        self.kind: Any = None
        self._stream_lock = threading.Lock()  # over all that follow
        self._copy_stream = 0
        self._free_events: list[int] = []  # that serve again
        self._busy_slots: list[tuple[int, InputSlot, int]] = []  # slots that a stream reads, and the event behind that

    def _request_arena(self, size: int, limit: Timeout) -> InputArena:
        number, size, descriptor = self.session_socket.request_device_arena(self._index, size, limit)
        try:
            mapping = self._mappings.map(descriptor, size)
        except CudaError as error:
            self.session_socket.release_arena(number)
            raise ResourceExhaustedError(f"memory of GPU:{self._index} cannot be mapped here: {error}") from error
        return InputArena(number, mapping, mapping.address, FreeList(size))

    def array(self, slot: InputSlot, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """The array at an offset of a slot, which it keeps."""
        address = slot.arena.base + slot.offset + offset
        array = DeviceArray(self.cuda, self.device, address, shape, dtype, slot)
        array.origin = self
        return array

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:  # type: ignore[override]
        """An uninitialised array there, row-major."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self.array(self._allocate(size), 0, shape, dtype)

    def locate(self, array: Any) -> ArenaAddress | None:
        """(arena, byte offset) of an array in this memory, also if another library made it; None elsewhere."""
        if not isinstance(array, DeviceArray) or array.address % array.dtype.itemsize:
            return None
        return self._find(array.address, array.nbytes)

    def export_array(self, array: DeviceArray, patience: float) -> tuple[ArenaAddress, object] | None:
        """Where an array of the caller's own lies for the worker, as long as what is returned with it is held.

        None: it has to be copied. See `IpcExports.acquire`.
        """
        loan = self._ipc_exports.acquire(array, patience)
        return None if loan is None else ((loan.number, array.address - loan.allocation.address), loan)

    def acquire_staging(self, prepared: Stageable, patience: float = 30.0) -> Any:
        staging = self._spare_staging.pop(prepared, None)
        if staging is None:
            slot = self._allocate(prepared.layout.staging_bytes, patience)
            staging = DeviceStaging(self, slot, prepared.staging_locations)
        return staging

    def acquire_output(self, nbytes: int, patience: float) -> InputSlot:
        """Where the worker is to write a result, had within so many seconds."""
        return self._allocate(nbytes, patience)

    @property
    def copy_stream(self) -> int:
        with self._stream_lock:
            if not self._copy_stream:
                self._copy_stream = self.cuda.create_stream(self.device)
            return self._copy_stream

    def wait_stream(self, stream: int, other: int) -> None:
        with self._stream_lock:
            event = self._acquire_event()
            self.cuda.record_event(self.device, event, other)
            self.cuda.wait_event(self.device, event, stream)
            self._free_events.append(event)

    def record_stream(self, slot: InputSlot, stream: int) -> None:
        with self._stream_lock:
            again = bool(self._busy_slots) and self._busy_slots[-1][1:] == (slot, stream)
            event = self._busy_slots.pop()[0] if again else self._acquire_event()
            self.cuda.record_event(self.device, event, stream)
            self._busy_slots.append((event, slot, stream))

    def wait_event(self, event: int, stream: int) -> bool:
        return self._mappings.wait_event(event, stream)

    def clear(self) -> None:
        super().clear()
        self._ipc_exports.clear()
        with self._stream_lock:
            events = self._free_events + [event for event, _, _ in self._busy_slots]
            stream, self._busy_slots, self._free_events, self._copy_stream = self._copy_stream, [], [], 0
        with contextlib.suppress(CudaError):  # which does not matter any more
            for event in events:
                self.cuda.destroy_event(event)
            if stream:
                self.cuda.destroy_stream(stream)
        self._mappings.remove_session()

    def _acquire_event(self) -> int:
        return self._free_events.pop() if self._free_events else self.cuda.create_event(self.device)[0]

    def _try_allocate(self, nbytes: int) -> InputSlot | None:
        with self._stream_lock:
            still = [one for one in self._busy_slots if not _is_event_done(self.cuda, one[0])]
            self._free_events += [one[0] for one in self._busy_slots if one not in still]
            self._busy_slots = still
        return super()._try_allocate(nbytes)
