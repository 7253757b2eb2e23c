"""CUDA as a client sees it, without a GPU: it maps the files in which `FakeCuda` keeps device memory."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from collectived.gpu.driver import Allocation, CudaError

INVALID = 1
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
        self.mapped: dict[int, mmap.mmap] = {}
        self.copied_bytes = 0
        self.synchronized = 0
        self.events: dict[int, int] = {}  # how often each was recorded
        self.held: set[int] = set()  # streams on which nothing goes on
        self.handles = 0  # that were asked for
        self._own: dict[int, _Own] = {}
        self._identities = itertools.count(1)

    def devices(self) -> Sequence[str]:
        return self._uuids

    def map(self, device: int, descriptor: int, size: int) -> int:
        try:
            mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(mapped))
        self.mapped[address] = mapped
        return address

    def unmap(self, device: int, address: int, size: int) -> None:
        del self.mapped[address]

    def malloc(self, size: int, device: int = 0, exportable: bool = True) -> int:
        """Memory of the client's own; without `exportable`, of an allocator whose memory has no handle."""
        mapped = mmap.mmap(descriptor := _file(size, device), size)
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(mapped))
        told = Allocation(next(self._identities), address, size, device, exportable)
        self._own[address] = _Own(mapped, descriptor, told)
        return address

    def free(self, address: int) -> None:
        os.close(self._own.pop(address).descriptor)

    def replace(self, address: int) -> None:
        """Frees an allocation; another one of its size, all zero, gets its address."""
        own = self._own[address]
        os.close(own.descriptor)
        own.descriptor, size = _file(own.told.size, own.told.device), own.told.size
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        got = _libc.mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, own.descriptor, 0)
        assert got == address
        own.told = own.told._replace(identity=next(self._identities))

    def allocation(self, address: int) -> Allocation:
        for own in self._own.values():
            if own.told.address <= address < own.told.address + own.told.size:
                return own.told
        for base, mapped in self.mapped.items():
            if base <= address < base + len(mapped):
                return Allocation(0, base, len(mapped), 0, False)
        raise CudaError("cuPointerGetAttributes", INVALID, f"{address:#x} is no memory of a GPU")

    def handle(self, device: int, address: int) -> bytes:
        own = self._own.get(address)
        if own is None or not own.told.exportable or own.told.device != device:
            raise CudaError("cuIpcGetMemHandle", INVALID, "invalid argument")
        self.handles += 1
        path = f"/proc/{os.getpid()}/fd/{own.descriptor}#{own.told.identity}"
        return path.encode().ljust(64, b"\0")

    def copy(self, device: int, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)
        self.copied_bytes += nbytes

    def event(self, device: int) -> tuple[int, bytes]:
        descriptor = os.memfd_create("fake-event")
        os.ftruncate(descriptor, 16)
        self.events[descriptor] = 0
        return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}".encode().ljust(64, b"\0")

    def end_event(self, event: int) -> None:
        del self.events[event]
        os.close(event)

    def record(self, device: int, event: int, stream: int) -> None:
        self.events[event] += 1
        self._tell(event, stream in self.held)

    def let_go(self) -> None:
        """What was held up goes on."""
        self.held.clear()
        for event in self.events:
            self._tell(event, False)

    def _tell(self, event: int, held: bool) -> None:
        recorded = self.events[event]
        os.pwrite(event, struct.pack("<2q", recorded, recorded - held), 0)

    def synchronize(self, device: int, stream: int) -> None:
        self.synchronized += 1


def _file(size: int, device: int) -> int:
    descriptor = os.memfd_create(f"fake-lent-{device}")
    os.ftruncate(descriptor, size)
    return descriptor
