"""CUDA as a client sees it, without a GPU: it maps the files in which `FakeCuda` keeps device memory.

A stream is a queue. What is at its head is done at once, unless a test holds the stream or it waits for an event; then
a thread looks again until nothing is left.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from collectived.gpu import driver
from collectived.gpu.driver import Allocation, CudaError

INVALID, _BAD_HANDLE, _ILLEGAL = 1, 400, 700
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


@dataclass
class _Own:
    """An allocation of the client's."""

    mapped: mmap.mmap
    descriptor: int
    told: Allocation


class FakeClientCuda:
    """A `collectived.gpu.driver.Cuda` of GPUs with these UUIDs."""

    def __init__(self, uuids: Sequence[str] = ("GPU-fake-0", "GPU-fake-1")) -> None:
        self._uuids = tuple(uuids)
        self._lock = threading.RLock()
        self._streams: dict[int, deque[Callable[[], bool]]] = {}  # each says whether it is done
        self._looking: threading.Thread | None = None
        self._closed = False
        self._made = itertools.count(1000)
        self.mapped: dict[int, mmap.mmap] = {}
        self._devices: dict[int, int] = {}  # on which they are, by address
        self.copied_bytes = 0
        self.synchronized = 0
        self.events: dict[int, int] = {}  # how often each was recorded
        self.opened: dict[int, bytes] = {}  # those of the worker
        self.waits: list[int] = []  # the streams that were told to wait
        self.held: set[int] = set()  # streams on which nothing goes on
        self.handles = 0  # that were asked for
        self.opening: Callable[[], object] = lambda: None  # called before an event of the worker is opened
        self.refused: set[str] = set()  # of the driver's functions, those that fail
        self._own: dict[int, _Own] = {}
        self._identities = itertools.count(1)

    def close(self) -> None:
        """Nobody waits for its streams any more: what they wait for may never come."""
        with self._lock:
            self._closed = True

    def device_uuids(self) -> Sequence[str]:
        return self._uuids

    def map(self, device: int, descriptor: int, size: int) -> int:
        try:
            mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(mapped))
        self.mapped[address] = mapped
        self._devices[address] = device
        return address

    def unmap(self, device: int, address: int, size: int) -> None:
        for stream in list(self._streams):
            self._wait_for(stream)
        del self.mapped[address], self._devices[address]

    def malloc(self, size: int, device: int = 0, exportable: bool = True) -> int:
        """Memory of the client's own; without `exportable`, of an allocator whose memory has no handle."""
        mapped = mmap.mmap(descriptor := _file(size, device), size)
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(mapped))
        told = Allocation(next(self._identities), address, size, device, exportable)
        self._own[address] = _Own(mapped, descriptor, told)
        return address

    def free(self, address: int) -> None:
        os.close(self._own.pop(address).descriptor)

    def free_all(self) -> None:
        """After a test, when nobody looks into what it has allocated any more."""
        for address in list(self._own):
            self.free(address)

    def replace(self, address: int) -> None:
        """Frees an allocation; another one of its size, all zero, gets its address."""
        own = self._own[address]
        os.close(own.descriptor)
        own.descriptor, size = _file(own.told.size, own.told.device), own.told.size
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        got = _libc.mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, own.descriptor, 0)
        assert got == address
        own.told = own.told._replace(buffer_id=next(self._identities))

    def find_allocation(self, address: int) -> Allocation:
        for own in self._own.values():
            if own.told.address <= address < own.told.address + own.told.size:
                return own.told
        for base, mapped in self.mapped.items():
            if base <= address < base + len(mapped):
                return Allocation(0, base, len(mapped), self._devices[base], False)
        raise CudaError("cuPointerGetAttributes", INVALID, f"{address:#x} is no memory of a GPU")

    def get_ipc_handle(self, device: int, address: int) -> bytes:
        own = self._own.get(address)
        if own is None or not own.told.exportable or own.told.device != device:
            raise CudaError("cuIpcGetMemHandle", INVALID, "invalid argument")
        self.handles += 1
        path = f"/proc/{os.getpid()}/fd/{own.descriptor}#{own.told.buffer_id}"
        return path.encode().ljust(64, b"\0")

    def copy(self, device: int, target: int, source: int, nbytes: int, stream: int) -> None:
        self._asked("cuMemcpyAsync")
        places = [self._devices[base] for one in (target, source) for base in list(self.mapped) if self._in(one, base)]
        if any(place != device for place in places):
            raise CudaError("cuMemcpyAsync", INVALID, f"memory of GPUs {places} on a stream of GPU {device}")
        there = any(self._in(source, base) for base in list(self.mapped)) or self._is_own(source)
        read = None if there else ctypes.string_at(source, nbytes)

        def copied() -> bool:
            ctypes.memmove(target, source if read is None else read, nbytes)
            self.copied_bytes += nbytes
            return True

        self._put(stream, copied)

    def _is_own(self, address: int) -> bool:
        told = [own.told for own in list(self._own.values())]
        return any(one.address <= address < one.address + one.size for one in told)

    def _in(self, address: int, base: int) -> bool:
        return base <= address < base + len(self.mapped[base])

    def create_stream(self, device: int) -> int:
        return next(self._made)

    def destroy_stream(self, stream: int) -> None:
        self._wait_for(stream)

    def create_event(self, device: int) -> tuple[int, bytes]:
        descriptor = os.memfd_create("fake-event")
        os.ftruncate(descriptor, 16)
        self.events[descriptor] = 0
        return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}".encode().ljust(64, b"\0")

    def open_event(self, device: int, handle: bytes) -> int:
        self.opening()
        self._asked("cuIpcOpenEventHandle")
        try:
            opened = os.open(handle.rstrip(b"\0"), os.O_RDONLY)
        except OSError as error:
            raise CudaError("cuIpcOpenEventHandle", INVALID, str(error)) from None
        self.opened[opened] = handle
        return opened

    def destroy_event(self, event: int) -> None:
        with self._lock:
            if self.events.pop(event, None) is None:
                del self.opened[event]
        os.close(event)

    def record_event(self, device: int, event: int, stream: int) -> None:
        self._asked("cuEventRecord")
        with self._lock:
            self.events[event] += 1
            number = self.events[event]
            os.pwrite(event, struct.pack("<q", number), 0)
            told = os.dup(event)  # what is on the stream goes on when the event is ended

        def reached() -> bool:
            os.pwrite(told, struct.pack("<q", number), 8)
            os.close(told)
            return True

        self._put(stream, reached)

    def wait_event(self, device: int, event: int, stream: int) -> None:
        with self._lock:
            if event not in self.events and event not in self.opened:
                raise CudaError("cuStreamWaitEvent", _BAD_HANDLE, f"{event} is not known")
            awaited = os.dup(event)
            recorded, _ = _state(awaited)
            self.waits.append(stream)

        def is_event_done() -> bool:
            if _state(awaited)[1] < recorded:
                return False
            os.close(awaited)
            return True

        self._put(stream, is_event_done)

    def is_event_done(self, event: int) -> bool:
        recorded, reached = _state(event)
        return reached >= recorded

    def let_go(self) -> None:
        """What was held up goes on."""
        self.held.clear()
        self._go_on()

    def synchronize(self, device: int, stream: int) -> None:
        self.synchronized += 1
        self._wait_for(stream)

    def under_way(self, stream: int) -> bool:
        """Whether something on the stream is not done."""
        self._go_on()
        return bool(self._streams.get(stream))

    def _asked(self, function: str) -> None:
        if function in self.refused:
            raise CudaError(function, _ILLEGAL, "an illegal memory access was encountered")

    def _wait_for(self, stream: int) -> None:
        while self.under_way(stream):
            threading.Event().wait(0.0005)

    def _put(self, stream: int, work: Callable[[], bool]) -> None:
        with self._lock:
            self._streams.setdefault(stream, deque()).append(work)
            self._go_on()
            if any(self._streams.values()) and self._looking is None:
                self._looking = threading.Thread(target=self._look, name="fake streams", daemon=True)
                self._looking.start()

    def _go_on(self) -> None:
        with self._lock:
            for stream, queue in self._streams.items():
                while queue and stream not in self.held and queue[0]():
                    queue.popleft()

    def _look(self) -> None:
        while True:
            with self._lock:
                self._go_on()
                if self._closed or not any(self._streams.values()):
                    self._looking = None
                    return
            threading.Event().wait(0.0005)


@contextmanager
def fake_gpus(fake: FakeClientCuda | None = None) -> Iterator[FakeClientCuda]:
    """Lets this process speak to fake GPUs alone."""
    cuda = fake or FakeClientCuda()
    driver.set_cuda(cuda)
    try:
        yield cuda
    finally:
        driver.set_cuda(None)
        cuda.close()


def _state(event: int) -> tuple[int, int]:
    """How often it was recorded, and how often reached."""
    recorded, reached = struct.unpack("<2q", os.pread(event, 16, 0))
    return recorded, reached


def _file(size: int, device: int) -> int:
    descriptor = os.memfd_create(f"fake-lent-{device}")
    os.ftruncate(descriptor, size)
    return descriptor
