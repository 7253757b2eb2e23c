"""Memory on a GPU that a worker and this client share: input, staging, results, and what the client lends.

The worker writes a result into memory of the rank that gets it, so nothing is copied out of there, and no other client
can write it: on a GPU there is no memory that some may only read.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectived.calls.limit import Limit
from collectived.calls.places import Address, Place, Stageable
from collectived.errors import ResourceExhaustedError
from collectived.gpu.array import LEGACY_STREAM, DeviceArray
from collectived.gpu.driver import Cuda, CudaError
from collectived.shared.lending import Lending
from collectived.shared.memory import InputArena, Memory, Slot
from collectived_proto.local.slots import Slots


class _Mapping:
    """Memory of a worker, mapped as long as somebody holds this."""

    def __init__(self, cuda: Cuda, device: int, descriptor: int, size: int) -> None:
        self.address = cuda.map(device, descriptor, size)
        weakref.finalize(self, cuda.unmap, device, self.address, size).atexit = False


class DeviceStaging:
    """A slot for the leaves of one collective, laid out as Prepare said."""

    __slots__ = ("address", "slot", "views")

    def __init__(self, memory: DeviceMemory, slot: Slot, places: Sequence[Place]) -> None:
        self.slot = slot
        self.address = (slot.address,)
        self.views = [memory.array(slot, offset, shape, dtype) for offset, dtype, shape in places]

    def fill(self, arrays: Sequence[Any]) -> None:
        """Puts copies there on the streams of the leaves; from the host they are done when this returns."""
        for view, array in zip(self.views, arrays, strict=True):
            view.assign(array)


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
        self.kind: Any = None

    def _ask(self, size: int, limit: Limit) -> InputArena:
        number, size, descriptor = self.source.ask_device(self._index, size, limit)
        try:
            mapping = _Mapping(self.cuda, self.device, descriptor, size)
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

    def forget(self) -> None:
        super().forget()
        self._lending.forget()

    def stage(self, prepared: Stageable, patience: float = 30.0) -> Any:
        staging = self._spares.pop(prepared, None)
        if staging is None:
            slot = self._take(prepared.layout.staging_bytes, patience)
            staging = DeviceStaging(self, slot, prepared.staging_places)
        return staging

    def output(self, nbytes: int) -> Slot:
        """Where the worker is to write a result."""
        return self._take(nbytes)
