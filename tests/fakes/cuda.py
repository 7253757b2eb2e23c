"""CUDA without a GPU: device memory is in files that processes share, a stream is a queue that a test can hold up.

It refuses what the driver refuses: addresses that nobody has allocated, or that lie on another device than a kernel
runs on, more memory than there is, handles that have ended.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_proto.numpy_types import to_numpy
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.cuda.driver import CudaError, Device, FoldSpec

PAGE = 2 << 20
TOTAL_BYTES = 1 << 30
LOWEST = 1 << 16  # no address is below
INVALID, OUT_OF_MEMORY, NO_CONTEXT, BAD_HANDLE, ILLEGAL_ADDRESS = 1, 2, 201, 400, 700


Step = Callable[[], object]  # of what is on a stream; False: it is not over, and is to be called again


def view_host_memory(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Those bytes of this process's memory; whoever asks keeps them alive."""
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    found: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    return found


class _Memory:
    def __init__(self, size: int, name: str, device: int = -1, descriptor: int = -1) -> None:
        self.size = size
        self.device = device
        self.descriptor = descriptor if descriptor >= 0 else os.memfd_create(name)
        if descriptor < 0:
            os.ftruncate(self.descriptor, size)
        self.mapped = mmap.mmap(self.descriptor, size)
        self.address = ctypes.addressof(ctypes.c_uint8.from_buffer(self.mapped))

    def close(self) -> None:
        """May be called again."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class FakeCuda:
    """A `Cuda` of `count` GPUs.

    Args:
        hold: while this file is there, nothing on any stream goes on.
        broken: while this file is there, looking at an event says that work on the device has failed.
    """

    def __init__(self, count: int = 1, hold: Path | None = None, broken: Path | None = None) -> None:
        self._devices = tuple(
            Device(number, f"GPU-fake-{number}", "Fake", TOTAL_BYTES, f"0000:{number:02x}:00.0")
            for number in range(count)
        )
        self._hold = hold
        self._broken = broken
        self._lock = threading.RLock()
        self._memory: dict[int, _Memory] = {}
        self._pinned: dict[int, _Memory] = {}
        self._lent: dict[bytes, tuple[_Memory, int]] = {}  # by handle, and how often it is open
        self._streams: dict[int, deque[Step]] = {}
        self._device_of: dict[int, int] = {}  # by stream
        self._current = threading.local()  # device of a thread
        self._events: dict[int, list[int]] = {}  # how often recorded, how often over
        self._shared: dict[int, int] = {}  # events that other processes see: the same in files
        self._opened: dict[int, int] = {}  # events of other processes: files of how often recorded, how often over
        self._handles = itertools.count(1)
        self.copied_bytes = 0
        self.folds: list[tuple[FoldSpec, int]] = []  # and how many sources each had

    def close(self) -> None:
        """After a test, when nobody is handed memory any more: as the end of the process, which others outlive."""
        for memory in (*self._memory.values(), *self._pinned.values()):
            memory.close()

    @property
    def used_bytes(self) -> int:
        return sum(memory.size for memory in self._memory.values())

    @property
    def lent(self) -> dict[bytes, int]:
        """How often each handle is open."""
        return {handle: times for handle, (_, times) in self._lent.items()}

    @property
    def shared_events(self) -> int:
        return len(self._shared)

    def devices(self) -> Sequence[Device]:
        return self._devices

    def set_device(self, device: int) -> None:
        self._check_device("cuCtxSetCurrent", device)
        self._current.device = device

    def current(self) -> int:
        """The device of the calling thread, as libraries ask for it."""
        found: int | None = getattr(self._current, "device", None)
        if found is None:
            raise CudaError("cuCtxGetDevice", NO_CONTEXT, "no device is current in this thread")
        return found

    def allocate(self, device: int, size: int) -> tuple[int, int]:
        self._check_device("cuMemCreate", device)
        size = -(-size // PAGE) * PAGE
        with self._lock:
            if self.used_bytes + size > TOTAL_BYTES:
                raise CudaError("cuMemCreate", OUT_OF_MEMORY, "out of memory")
            memory = _Memory(size, f"fake-gpu-{device}", device)
            self._memory[memory.address] = memory
        return memory.address, size

    def export(self, address: int) -> int:
        return os.dup(self._found("cuMemExportToShareableHandle", self._memory, address).descriptor)

    def free(self, address: int) -> None:
        self._found("cuMemRelease", self._memory, address).close()
        del self._memory[address]

    def open_memory(self, device: int, handle: bytes) -> tuple[int, int]:
        self._check_device("cuIpcOpenMemHandle", device)
        with self._lock:
            known = self._lent.get(handle)
            memory, times = known if known is not None else (_opened(device, handle), 0)
            self._lent[handle] = memory, times + 1
        return memory.address, memory.size

    def close_memory(self, device: int, address: int) -> None:
        self._check_device("cuIpcCloseMemHandle", device)
        with self._lock:
            handles = {memory.address: handle for handle, (memory, _) in self._lent.items()}
            memory, times = self._lent.pop(self._found("cuIpcCloseMemHandle", handles, address))
            if times > 1:
                self._lent[handles[address]] = memory, times - 1
            else:
                memory.close()

    def pin(self, size: int) -> int:
        memory = _Memory(max(1, size), "pinned")
        self._pinned[memory.address] = memory
        return memory.address

    def unpin(self, address: int) -> None:
        self._found("cuMemFreeHost", self._pinned, address).close()
        del self._pinned[address]

    def create_stream(self, device: int) -> int:
        self._check_device("cuStreamCreate", device)
        handle = next(self._handles)
        self._streams[handle] = deque()
        self._device_of[handle] = device
        return handle

    def destroy_stream(self, stream: int) -> None:
        self._found("cuStreamDestroy", self._streams, stream)
        del self._streams[stream]

    def create_event(self, device: int) -> int:
        self._check_device("cuEventCreate", device)
        handle = next(self._handles)
        self._events[handle] = [0, 0]
        return handle

    def create_shared_event(self, device: int) -> tuple[int, bytes]:
        event = self.create_event(device)
        descriptor = self._shared[event] = os.memfd_create("worker-event")
        self._tell(event)
        return event, f"/proc/{os.getpid()}/fd/{descriptor}".encode().ljust(64, b"\0")

    def _tell(self, event: int) -> None:
        if event in self._shared:
            os.pwrite(self._shared[event], struct.pack("<2q", *self._events[event]), 0)

    def open_event(self, device: int, handle: bytes) -> int:
        self._check_device("cuIpcOpenEventHandle", device)
        try:
            opened = os.open(handle.rstrip(b"\0"), os.O_RDONLY)
        except OSError as error:
            raise CudaError("cuIpcOpenEventHandle", INVALID, str(error)) from None
        event = next(self._handles)
        self._opened[event] = opened
        return event

    def destroy_event(self, event: int) -> None:
        if event in self._opened:
            os.close(self._opened.pop(event))
            return
        self._found("cuEventDestroy", self._events, event)
        del self._events[event]
        if event in self._shared:
            os.close(self._shared.pop(event))

    def record(self, event: int, stream: int) -> None:
        state = self._found("cuEventRecord", self._events, event)
        state[0] += 1
        number = state[0]
        self._tell(event)

        def reached() -> None:
            state[1] = max(state[1], number)
            if self._events.get(event) is state:
                self._tell(event)

        self._put("cuEventRecord", stream, reached)

    def is_event_done(self, event: int) -> bool:
        if event in self._opened:
            recorded, done = struct.unpack("<2q", os.pread(self._opened[event], 16, 0))
            return bool(done >= recorded)
        state = self._found("cuEventQuery", self._events, event)
        if self._broken is not None and self._broken.exists():
            raise CudaError("cuEventQuery", ILLEGAL_ADDRESS, "an illegal memory access was encountered")
        self._go_on()
        return bool(state[1] >= state[0])

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        into, from_ = self._bytes(target, nbytes), self._bytes(source, nbytes)

        def copied() -> None:
            into[:] = from_
            self.copied_bytes += nbytes

        self._put("cuMemcpyAsync", stream, copied)

    def clear(self, address: int, nbytes: int, stream: int) -> None:
        into = self.reachable(address, nbytes, stream)
        whole = self._memory.get(address)

        def cleared() -> None:
            if whole is not None and whole.size == nbytes:
                whole.mapped.madvise(mmap.MADV_REMOVE)  # no page of the file is left, so that all of it is zero
            else:
                into.fill(0)

        self._put("cuMemsetD8Async", stream, cleared)

    def fold(self, fold: FoldSpec, sources: Sequence[int], outs: Sequence[int], count: int, stream: int) -> None:
        how = Arithmetic(fold.operation, fold.dtype, fold.result_dtype, fold.contributions)

        def partials(address: int) -> NDArray[Any]:
            return how.view_partials(self.reachable(address, count * how.partial_bytes, stream), count)

        def elements(address: int, dtype: np.dtype[Any]) -> NDArray[Any]:
            return self.reachable(address, count * dtype.itemsize, stream).view(dtype)

        given = [elements(one, to_numpy(fold.dtype)) if fold.widen else partials(one) for one in sources]
        into = [elements(out, to_numpy(fold.result_dtype)) if fold.finish else partials(out) for out in outs]

        def folded() -> None:
            self.folds.append((fold, len(given)))
            total = how.view_partials(np.empty(count * how.partial_bytes, np.uint8), count)
            if fold.widen:
                how.fold_all(given, total)
            else:
                np.copyto(total, given[0])
                for one in given[1:]:
                    how.fold(total, one, total)
            for out in into:
                if fold.finish:
                    how.finish(total, out)
                else:
                    np.copyto(out, total)

        self._put("cuLaunchKernel", stream, folded)

    def reachable(self, address: int, nbytes: int, stream: int) -> NDArray[np.uint8]:
        """What a kernel on a stream may read and write: memory of its own device, and what is pinned."""
        device = self._found("a launch", self._device_of, stream)
        for memory in self._known():
            if memory.address <= address and address + nbytes <= memory.address + memory.size:
                if memory.device in (-1, device):
                    return view_host_memory(address, nbytes)
                raise CudaError("a launch", ILLEGAL_ADDRESS, f"{address:#x} is of GPU {memory.device}, not {device}")
        raise _nobodys(address, nbytes)

    def enqueue(self, call: str, stream: int, step: Step) -> None:
        """Has a library's kernel run on a stream of the calling thread's device."""
        if self._found(call, self._device_of, stream) != self.current():
            raise CudaError(call, BAD_HANDLE, f"stream {stream} is not of GPU {self.current()}, which is current")
        self._put(call, stream, step)

    def _put(self, call: str, stream: int, step: Step) -> None:
        self._found(call, self._streams, stream).append(step)
        self._go_on()

    def _go_on(self) -> None:
        if self._hold is not None and self._hold.exists():
            return
        with self._lock:
            for stream in list(self._streams.values()):
                while stream and stream[0]() is not False:
                    stream.popleft()

    def _known(self) -> list[_Memory]:
        """All memory that is no ordinary memory of the host."""
        lent = [memory for memory, _ in list(self._lent.values())]
        return [*self._memory.values(), *self._pinned.values(), *lent]

    def _bytes(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """What a copy may read and write: of any device, pinned, or the host's."""
        within, across = False, False
        for memory in self._known():
            within |= memory.address <= address and address + nbytes <= memory.address + memory.size
            if memory.device >= 0:
                across |= memory.address - nbytes < address < memory.address + memory.size
        if within or (address > LOWEST and not across):
            return view_host_memory(address, nbytes)
        raise _nobodys(address, nbytes)

    def _check_device(self, call: str, device: int) -> None:
        if not 0 <= device < len(self._devices):
            raise CudaError(call, INVALID, f"no device {device}")

    def _found(self, call: str, known: dict[int, Any], handle: int) -> Any:
        if handle not in known:
            raise CudaError(call, BAD_HANDLE, f"{handle} is not known")
        return known[handle]


def _nobodys(address: int, nbytes: int) -> CudaError:
    return CudaError("a launch", ILLEGAL_ADDRESS, f"{nbytes} bytes at {address:#x} are nobody's")


def _opened(device: int, handle: bytes) -> _Memory:
    """Memory of another process, as `FakeClientCuda` names it."""
    path = handle.rstrip(b"\0").partition(b"#")[0].decode(errors="replace")
    if path.startswith(f"/proc/{os.getpid()}/"):
        raise CudaError("cuIpcOpenMemHandle", NO_CONTEXT, "invalid device context: it is of this process")
    try:
        if not os.readlink(path).startswith(f"/memfd:fake-lent-{device} "):
            raise CudaError("cuIpcOpenMemHandle", INVALID, f"{path} is no memory of device {device}")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise CudaError("cuIpcOpenMemHandle", INVALID, str(error)) from None
    return _Memory(os.fstat(descriptor).st_size, "", device, descriptor)
