"""The GPUs of a worker: which of them it offers, their memory, and the thread that launches on each.

Memory that a GPU is given lives as long as somebody looks into it, as an array's does: freed under a kernel it would
take the whole device along.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_runtime.device.cuda.driver import Cuda, CudaError, Device
from collectived_runtime.device.launching import Launch, Launching, Work

OUT_OF_MEMORY = 2  # the driver's number


def view(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Those bytes of this process's memory; whoever asks keeps them alive."""
    return _array((ctypes.c_uint8 * nbytes).from_address(address))


def _array(memory: Any) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    return found


class Region:
    """Bytes in the memory of a GPU; parts of it are had by slicing, as of an array of bytes. Keeps its memory."""

    __slots__ = ("address", "gpu", "memory", "nbytes")

    def __init__(self, gpu: Gpu, address: int, nbytes: int, memory: object) -> None:
        self.gpu = gpu
        self.address = address
        self.nbytes = nbytes
        self.memory = memory

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> Region:
        start, stop, _ = part.indices(self.nbytes)
        return Region(self.gpu, self.address + start, max(0, stop - start), self.memory)


class _Memory:
    """An allocation, as something that can be held."""

    __slots__ = ("__weakref__", "address", "size")

    def __init__(self, cuda: Cuda, address: int, size: int) -> None:
        self.address = address
        self.size = size
        weakref.finalize(self, cuda.free, address).atexit = False  # with the process the driver frees all of it


class DeviceArena:
    """Memory of a GPU that a client maps too; see `local.arena.Arena` for that of the host."""

    def __init__(self, number: int, gpu: Gpu, memory: _Memory, descriptor: int) -> None:
        self.number = number
        self.gpu = gpu
        self.size = memory.size
        self.descriptor = descriptor
        self._memory: _Memory | None = memory

    def region(self, offset: int, length: int) -> Region:
        """Raises ValueError where it is closed."""
        memory = self._memory
        if memory is None:
            raise ValueError(f"arena {self.number} is closed")
        return Region(self.gpu, memory.address + offset, length, memory)

    def close(self) -> None:
        """Lets go of it: the memory is freed when nobody looks into it any more, here and in the client."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self._memory = None


class Gpu:
    """One GPU of a worker. May be used from any thread.

    Attributes:
        index: as in `GPU:0`, the order in which the worker was told of its GPUs.
        device: as the driver describes it.
    """

    def __init__(self, index: int, device: Device, cuda: Cuda) -> None:
        self.index = index
        self.device = device
        self.cuda = cuda
        self._launching = Launching(cuda, device.number)

    def arena(self, number: int, size: int) -> DeviceArena:
        """New memory of at least `size` bytes, all zero, that can be handed to a client. Takes milliseconds.

        Raises:
            CudaError: there is none.
        """
        memory = self._allocate(size)
        cleared = threading.Event()
        launch = self.submit(lambda stream: self.cuda.clear(memory.address, memory.size, stream), cleared.set)
        cleared.wait()
        if launch.failed is not None:
            raise launch.failed
        return DeviceArena(number, self, memory, self.cuda.export(memory.address))

    def scratch(self, size: int) -> Region:
        """Memory for intermediate results, which never leaves the worker. Raises CudaError where there is none."""
        memory = self._allocate(size)
        return Region(self, memory.address, memory.size, memory)

    def _allocate(self, size: int) -> _Memory:
        return _Memory(self.cuda, *self.cuda.allocate(self.device.number, size))

    def submit(self, work: Work, over: Callable[[], object], waits: tuple[int, ...] = ()) -> Launch:
        """See `Launching.submit`."""
        return self._launching.submit(work, over, waits)

    def close(self) -> None:
        self._launching.close()


def pinned(cuda: Cuda, size: int) -> NDArray[np.uint8]:
    """Host memory that GPUs copy from and to at full speed.

    Raises:
        CudaError: there is none.
    """
    address = cuda.pin(size)
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, cuda.unpin, address).atexit = False
    return _array(memory)


def chosen(cuda: Cuda, wanted: Sequence[str] | None) -> tuple[Gpu, ...]:
    """The GPUs that a worker is to offer.

    Args:
        wanted: numbers as the driver gives them, or UUIDs or their beginnings, in the order in which they become GPU:0,
            GPU:1, …; None: all.

    Raises:
        ValueError: one of them is not there, or is wanted twice.
    """
    devices = cuda.devices()
    if wanted is None:
        found = list(devices)
    else:
        found = [_find(devices, name) for name in wanted]
        twice = next((device for device in found if found.count(device) > 1), None)
        if twice is not None:
            raise ValueError(f"GPU {twice.number} ({twice.uuid}) is wanted twice: name each GPU once")
    return tuple(Gpu(index, device, cuda) for index, device in enumerate(found))


def _find(devices: Sequence[Device], name: str) -> Device:
    fitting = [device for device in devices if name == str(device.number) or device.uuid.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    there = ", ".join(f"{device.number} ({device.uuid})" for device in devices) or "none"
    why = "is the beginning of several" if fitting else "is not here"
    raise ValueError(f"GPU {name!r} {why}: this process may use {there}")


def out_of_memory(error: CudaError) -> bool:
    return error.code == OUT_OF_MEMORY
