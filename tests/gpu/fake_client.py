"""CUDA as a client sees it, without a GPU: it maps the files in which `FakeCuda` keeps device memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence


class FakeClientCuda:
    """A `collectived.gpu.driver.Cuda` of GPUs with these UUIDs."""

    def __init__(self, uuids: Sequence[str] = ("GPU-fake-0", "GPU-fake-1")) -> None:
        self._uuids = tuple(uuids)
        self.mapped: dict[int, mmap.mmap] = {}
        self.copied_bytes = 0

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

    def unmap(self, address: int, size: int) -> None:
        del self.mapped[address]

    def copy(self, device: int, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)
        self.copied_bytes += nbytes

    def synchronize(self, device: int, stream: int) -> None:
        pass
