"""CUDA as a client sees it, without a GPU: it maps the files in which `FakeCuda` keeps device memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Sequence


class FakeClientCuda:
    """A `collectived.gpu.driver.Cuda` of GPUs with these UUIDs."""

    def __init__(self, uuids: Sequence[str] = ("GPU-fake-0", "GPU-fake-1")) -> None:
        self._uuids = tuple(uuids)
        self.mapped: dict[int, mmap.mmap] = {}
        self.copied_bytes = 0
        self.synchronized = 0
        self.events: dict[int, int] = {}  # how often each was recorded
        self.held: set[int] = set()  # streams on which nothing goes on

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
