"""The GPUs of a worker: which of them it offers, their memory, and the thread that launches on each.

Memory that a GPU works on lives as long as an object looks into it, as an array's does: freed under a kernel it would
take the whole device along.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectived_runtime.device.blocking_thread import BlockingCall, BlockingThread
from collectived_runtime.device.cuda.driver import Cuda, CudaError, Device
from collectived_runtime.device.exported_memory import ExportedMemory
from collectived_runtime.device.launch_thread import Launch, LaunchThread, Work

log = logging.getLogger("collectived.device")

CUDA_ERROR_OUT_OF_MEMORY = 2  # the driver's number
CLEAR_WITHIN = 5.0  # seconds for new memory to be all zero; it waits for what is under way on its GPU
MOST_FREE = 512 << 20  # bytes of a pool that wait for the next caller
_SMALLEST = 64 << 10
_PAGE = 2 << 20  # memory of a GPU comes in pieces of that size


class _Sized(Protocol):
    def __len__(self) -> int: ...


M = TypeVar("M", bound=_Sized)


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


class _GpuAllocation:
    """An allocation, as something that can be held. `on_freed`: what is called when it has been freed."""

    __slots__ = ("__weakref__", "address", "on_freed", "size")

    def __init__(self, cuda: Cuda, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self.on_freed: list[Callable[[], object]] = []
        # With the process the driver frees all of it. One finalizer alone: of several the latest is called first.
        weakref.finalize(self, _free_allocation, cuda, address, self.on_freed).atexit = False


def _free_allocation(cuda: Cuda, address: int, freed: Sequence[Callable[[], object]]) -> None:
    cuda.free(address)
    for then in freed:
        then()


class _ImportedAllocation:
    """An allocation of a client's, open here as long as this is held."""

    __slots__ = ("__weakref__", "address", "identity", "size")

    def __init__(self, cuda: Cuda, device: int, identity: int, handle: bytes) -> None:
        self.identity = identity
        self.address, self.size = cuda.open_memory(device, handle)
        weakref.finalize(self, _close_imported, cuda, device, self.address).atexit = False


def _close_imported(cuda: Cuda, device: int, address: int) -> None:
    try:
        cuda.close_memory(device, address)
    except CudaError as error:  # nothing of this worker lies there
        log.warning("memory of a client's on device %d cannot be closed: %s", device, error)


class DeviceArena:
    """Memory of a GPU that a client maps too, or has lent; see `ipc.arena.Arena` for that of the host.

    Attributes:
        descriptor: by which the client maps it; -1: it is `is_imported`, the client's own.
    """

    def __init__(self, number: int, gpu: Gpu, memory: _GpuAllocation | _ImportedAllocation, descriptor: int) -> None:
        self.number = number
        self.gpu = gpu
        self.size = memory.size
        self.descriptor = descriptor
        self.is_imported = isinstance(memory, _ImportedAllocation)
        self._memory: _GpuAllocation | _ImportedAllocation | None = memory

    def region(self, offset: int, length: int) -> Region:
        """Raise ValueError where it is closed."""
        memory = self._memory
        if memory is None:
            raise ValueError(f"memory {self.number} of the GPU is closed")
        return Region(self.gpu, memory.address + offset, length, memory)

    def detach(self) -> ExportedMemory:
        """Let go of the memory that a client was given. The result says whether a process still has it."""
        assert self._memory is not None and self.descriptor >= 0
        left = ExportedMemory(self.descriptor, self.size, self._memory)
        self.descriptor, self._memory = -1, None
        return left

    def close(self) -> None:
        """Let go of it: the memory is freed when no process looks into it any more, here and in the client."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self._memory = None


class ClearTimeout(CudaError):
    """New memory was not cleared in time. It is given back when that has ended."""


class Pool(Generic[M]):
    """Memory that is dear to make: what is given back serves again, as far as it is not too much.

    Args:
        drop: frees memory beyond the limit, which may wait for a device: not in the thread that gives it back.
        least: bytes that are the least that can be allocated, so that it makes no sense to ask for less.
    """

    def __init__(self, make: Callable[[int], M], drop: Callable[[list[M]], object], least: int = _SMALLEST) -> None:
        self._make = make
        self._drop = drop
        self._least = least
        self._free: list[M] = []
        self._lock = threading.Lock()

    def acquire(self, size: int) -> M:
        """At least `size` bytes; their content is undefined. Raises CudaError where there is no memory."""
        size = 1 << (max(size, self._least) - 1).bit_length()
        with self._lock:
            for number, free in enumerate(self._free):
                if size <= len(free) <= 4 * size:
                    return self._free.pop(number)
        return self._make(size)

    def release(self, memory: M) -> None:
        """Give back memory into which nothing looks any more."""
        with self._lock:
            self._free.append(memory)
            dropped = []
            while sum(map(len, self._free)) > MOST_FREE:
                dropped.append(self._free.pop(0))
        if dropped:
            self._drop(dropped)


class Gpu:
    """One GPU of a worker. May be used from any thread.

    Args:
        lost: called, once or more often and from any thread, with the reason why the GPU cannot be used any more.

    Attributes:
        index: as in `GPU:0`, the order of GPUs in the worker's configuration.
        device: as the driver describes it.
        scratch, pinned: memory for intermediate results, of the GPU and of the host.
        beside: threads for calls that may wait for this GPU, so that no other memory waits behind it.
    """

    def __init__(self, index: int, device: Device, cuda: Cuda, lost: Callable[[str], object]) -> None:
        self.index = index
        self.device = device
        self.cuda = cuda
        self.scratch: Pool[Region] = Pool(self._allocate_region, self._discard, _PAGE)
        self.pinned: Pool[NDArray[np.uint8]] = Pool(lambda size: allocate_pinned(cuda, size), self._discard)
        self.blocking_executor = ThreadPoolExecutor(
            2, f"gpu {device.number} memory"
        )  # they start when they are first needed
        self._on_lost = lost
        self._imported: weakref.WeakValueDictionary[bytes, _ImportedAllocation] = (
            weakref.WeakValueDictionary()
        )  # by handle
        self._import_lock = threading.Lock()  # over opening them: each is opened once
        self._launch_thread = LaunchThread(cuda, device.number)
        self._blocking_thread = BlockingThread(
            f"gpu {device.number} events", lambda: cuda.set_device(device.number), self.declare_lost
        )

    def _discard(self, memory: list[Any]) -> None:
        """The driver may wait for the device then: that is done aside."""
        with contextlib.suppress(RuntimeError):  # this process ends
            self.blocking_executor.submit(memory.clear)

    def declare_lost(self, why: str) -> None:
        """It has failed, or hangs: nothing can be done with it in this process any more."""
        self._on_lost(f"GPU:{self.index} ({self.device.name}, {self.device.uuid}) of this worker is lost: {why}")

    def create_arena(
        self, number: int, size: int, freed: Callable[[], object] = lambda: None, within: float = CLEAR_WITHIN
    ) -> DeviceArena:
        """New memory of at least `size` bytes, all zero, that can be handed to a client. Takes milliseconds.

        Args:
            freed: called, from any thread, when memory that was `ClearTimeout` has been given back.
            within: seconds in which it must be cleared.

        Raises:
            ClearTimeout: the GPU is at something else. CudaError: there is none.
        """
        memory = self._allocate(size)
        cleared = threading.Event()
        launch = self.submit(lambda stream: self.cuda.clear(memory.address, memory.size, stream), cleared.set)
        if not cleared.wait(within):
            memory.on_freed.append(freed)  # work on the stream keeps it
            launch.cancel()
            why = f"work under way on GPU:{self.index} has kept new memory from being cleared within {within:g} s"
            raise ClearTimeout("cuMemsetD8Async", -1, why)
        if launch.error is not None:
            raise launch.error
        return DeviceArena(number, self, memory, self.cuda.export(memory.address))

    def import_arena(self, number: int, identity: int, handle: bytes) -> DeviceArena:
        """An allocation of a client's; it is open until nothing looks into it any more. Takes milliseconds.

        Args:
            identity: of the allocation. A handle that has been another one's is opened when that has been closed.

        Raises:
            CudaError: it cannot be opened.
        """
        with self._import_lock:
            memory = self._imported.get(handle)
            if memory is None:
                memory = self._imported[handle] = _ImportedAllocation(self.cuda, self.device.number, identity, handle)
            elif memory.identity != identity:
                raise CudaError("cuIpcOpenMemHandle", -1, "an earlier allocation with this handle is still open")
        return DeviceArena(number, self, memory, -1)

    def open_event(self, handle: bytes, over: Callable[[], object]) -> BlockingCall:
        """Open an event of a client's in a thread of its own: the driver may wait there until the device is idle.

        Args:
            over: called from the thread; then the pending_call's result is the event.
        """
        return self._blocking_thread.submit(
            "opening of an event", lambda _: self.cuda.open_event(self.device.number, handle), over
        )

    def destroy_event(self, opened: BlockingCall) -> None:
        """End an event of `open_event`, even one that is not open yet: what looks at it now comes first."""

        def end(_: BlockingCall) -> None:
            if opened.error is None:
                self.submit(lambda _: self.cuda.destroy_event(opened.result), lambda: None)

        self._blocking_thread.submit("end of an event", end)

    def _allocate_region(self, size: int) -> Region:
        memory = self._allocate(size)
        return Region(self, memory.address, memory.size, memory)

    def _allocate(self, size: int) -> _GpuAllocation:
        return _GpuAllocation(self.cuda, *self.cuda.allocate(self.device.number, size))

    def submit(
        self,
        work: Work | None,
        over: Callable[[], object],
        waits: tuple[int, ...] = (),
        begun: Callable[[], object] = lambda: None,
        check: Callable[[], object] | None = None,
    ) -> Launch:
        """See `LaunchThread.submit`."""
        return self._launch_thread.submit(work, over, waits, begun, check)

    def enforce_timeout(self, launch: Launch) -> None:
        """End a launch that is not wanted any more. The GPU is given up where it does not end within 5 s from now."""
        self._blocking_thread.enforce_timeout(launch)

    def close(self) -> None:
        self._blocking_thread.close()
        self._launch_thread.close()


def allocate_pinned(cuda: Cuda, size: int) -> NDArray[np.uint8]:
    """Host memory that GPUs copy from and to at full speed.

    Raises:
        CudaError: there is none.
    """
    address = cuda.pin(size)
    memory: Any = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, cuda.unpin, address).atexit = False
    found: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    return found


def select_gpus(cuda: Cuda, wanted: Sequence[str] | None, lost: Callable[[str], object]) -> tuple[Gpu, ...]:
    """The GPUs that a worker is to offer.

    Args:
        wanted: numbers as the driver gives them, or UUIDs or their beginnings, in the order in which they become GPU:0,
            GPU:1, …; None: all.
        lost: as of `Gpu`.

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
    return tuple(Gpu(index, device, cuda, lost) for index, device in enumerate(found))


def _find(devices: Sequence[Device], name: str) -> Device:
    fitting = [device for device in devices if name == str(device.number) or device.uuid.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    there = ", ".join(f"{device.number} ({device.uuid})" for device in devices) or "none"
    why = "is the beginning of several" if fitting else "is not here"
    raise ValueError(f"GPU {name!r} {why}: this process may use {there}")


def is_out_of_memory(error: CudaError) -> bool:
    return error.code == CUDA_ERROR_OUT_OF_MEMORY
