"""Shared memory between a worker and a client: sealed memfds, made by the worker, mapped once, reused.

Sealing is what makes sharing safe: a peer that could shrink a mapped file could kill us with SIGBUS, and one that could
write a result could change another rank's. So the worker seals the file, and a process checks the seals before it maps
the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from collectived_proto.ipc.shared_file import SharedFile

F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not named by Python's fcntl
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MAP_POPULATE = 0x8000
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_COMMIT_STEP_BYTES = 4 << 20  # bytes that come into being at a time


@dataclass(slots=True)
class Arena:
    """A mapped arena. `memory` is writable in the worker, and in a client only for inputs.

    In the worker pages exist up to `committed` bytes: address space is cheap, the first touch of a page is not.
    """

    number: int
    size: int
    descriptor: int
    memory: mmap.mmap | None
    committed: int = 0
    file: SharedFile | None = None  # in the worker
    _array: NDArray[np.uint8] | None = field(default=None, repr=False)

    def round_to_page(self, upto: int) -> int:
        """The end of the page that holds the byte before `upto`."""
        return min(self.size, -(-upto // mmap.PAGESIZE) * mmap.PAGESIZE)

    def commit(self, upto: int, wanted: Callable[[], bool] = lambda: True) -> None:
        """Make the pages below `upto` exist, so that a full tmpfs is an error here and not a SIGBUS later.

        It goes on while `wanted()`, slice by slice: the kernel fills pages with zeros, which takes long, and Python
        holds its lock while they are mapped, which must not be for long beside group loops.

        Raises:
            OSError: the memory is not to be had (ENOSPC, ENOMEM).
        """
        upto = self.round_to_page(upto)
        while self.committed < upto and self.memory is not None and wanted():
            size = min(_COMMIT_STEP_BYTES, upto - self.committed)
            os.posix_fallocate(self.descriptor, self.committed, size)
            with contextlib.suppress(OSError):  # an older kernel: pages are mapped at first touch instead
                self.memory.madvise(_MADV_POPULATE_WRITE, self.committed, size)
            self.committed += size

    def view(self) -> memoryview:
        """All of it.

        Raises:
            ValueError: it is closed.
        """
        memory = self.memory  # another thread may close it meanwhile
        if memory is None:
            raise ValueError(f"shared memory {self.number} is closed")
        return memoryview(memory)

    def slice_bytes(self, offset: int, length: int) -> NDArray[np.uint8]:
        """Those bytes of it, as far as it reaches; quick.

        Raises:
            ValueError: it is closed.
        """
        whole = self._array
        if whole is None:
            whole = self._array = np.frombuffer(self.view(), np.uint8)
        return whole[offset : offset + length]

    @property
    def shared_descriptor(self) -> int:
        """The descriptor that a client gets."""
        assert self.file is not None
        return self.file.given

    def detach(self) -> SharedFile:
        """Let go of it but for its file, which is the caller's to close."""
        assert self.file is not None
        self.unmap()
        self.descriptor = -1
        return self.file

    def discard(self) -> bool:
        """Give the pages of an arena for inputs back, even if other processes still have it, and unmap it.

        False where arrays here look into it: nothing has changed then.
        """
        self._array = None
        if self.memory is not None:
            try:
                self.memory.close()
            except BufferError:
                return False
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            with (
                contextlib.suppress(OSError),  # a kernel that cannot: they go with the client's mapping
                mmap.mmap(self.descriptor, self.size, mmap.MAP_SHARED, protection) as pages,
            ):
                pages.madvise(mmap.MADV_REMOVE)
        self.unmap()
        return True

    def unmap(self) -> None:
        """Let go of the mapping unless arrays still look into it; then it stays until its last array is collected."""
        memory, self.memory, self._array = self.memory, None, None
        if memory is not None:
            with contextlib.suppress(BufferError):  # exported: the arrays that use it keep it alive
                memory.close()

    def close(self) -> None:
        """Close file and mapping; idempotent."""
        if self.file is not None:
            self.file.close()
        self.descriptor = -1
        self.unmap()


def create(number: int, size: int, *, readers_only: bool) -> Arena:
    """A new arena without pages (see `Arena.commit`). With `readers_only`, no other process can map it writable.

    Raises:
        OSError: no descriptor or no address space.
    """
    descriptor = os.memfd_create(f"collectived-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        seals = SIZE_SEALS | (F_SEAL_FUTURE_WRITE if readers_only else 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
        file = SharedFile(descriptor, os.O_RDONLY if readers_only else os.O_RDWR)
    except BaseException:
        os.close(descriptor)
        raise
    return Arena(number, size, descriptor, memory, file=file)


def attach(number: int, size: int, descriptor: int, *, writable: bool) -> Arena:
    """Maps an arena that a worker handed over; takes the descriptor over and closes it, for the mapping is enough.

    Raises:
        ValueError: it is no memfd, is not sealed against change of size, or has another size than announced.
    """
    try:
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ValueError(f"shared memory {number} is no memory that can be sealed: {error.strerror}") from None
        if seals & SIZE_SEALS != SIZE_SEALS:
            raise ValueError(f"shared memory {number} is not sealed against shrinking and growing (seals {seals:#x})")
        if (actual := os.fstat(descriptor).st_size) != size:
            raise ValueError(f"shared memory {number} has {actual} bytes, announced were {size}")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED | (_MAP_POPULATE if writable else 0), protection)
    finally:
        os.close(descriptor)
    return Arena(number, size, -1, memory)
