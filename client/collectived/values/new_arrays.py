"""New arrays for results and copies. Large ones get memory that an earlier one has left.

The system fills new memory with zeros, which takes as long as a large collective. The C library keeps what is freed,
but of large arrays it gives the memory back to the system each time. So that is kept here when nothing looks into it
any more, and given to the next array of that size.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
from collections import deque
from typing import Any

import numpy as np

from collectived.values.leaves import Array

MIN_KEPT_BYTES = 32 << 20
"""The memory of smaller arrays is the C library's: glibc keeps up to 32 MiB in a piece."""

MAX_FREE_BYTES = 256 << 20
_HUGE_PAGE_BYTES = 2 << 20


class _Block(np.ndarray[Any, np.dtype[np.uint8]]):
    """The memory of an array, as its base; given back when the last view of it is collected.

    It is a subclass because NumPy lets a view of a view skip bases of its own type.
    """

    returned: deque[Any] | None = None
    memory: Any = None

    def __del__(self) -> None:  # anywhere, also while a thread holds the lock of the memory
        if self.returned is not None:
            self.returned.append(self.memory)


class ArrayMemory:
    """Memory of this process for large arrays, used again and again. Thread-safe."""

    def __init__(self, max_free_bytes: int = MAX_FREE_BYTES) -> None:
        self._max_free_bytes = max_free_bytes
        self._lock = threading.Lock()
        self._free: deque[mmap.mmap] = deque()  # the one that came back last stands last
        self._free_bytes = 0
        self._returned: deque[mmap.mmap] = deque()

    def make_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Make an array with any content, row-major.

        Raises:
            MemoryError: the system has no memory for it.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._take(-(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES)
        block = _Block((nbytes,), np.uint8, memory)
        block.returned, block.memory = self._returned, memory
        return np.ndarray(shape, dtype, block)

    def _take(self, size: int) -> mmap.mmap:
        with self._lock:
            self._sweep()
            for memory in reversed(self._free):  # most likely it is still in the caches
                if len(memory) == size:
                    self._free.remove(memory)
                    self._free_bytes -= size
                    return memory
        return _map(size)

    def _sweep(self) -> None:
        """Take in what has come back, and give the system what is too much."""
        while self._returned:
            memory = self._returned.popleft()
            self._free.append(memory)
            self._free_bytes += len(memory)
        while self._free_bytes > self._max_free_bytes:
            self._free_bytes -= len(self._free.popleft())

    def forget_lock(self) -> None:
        """Go on in a forked child: a thread that it does not have may have held the lock."""
        self._lock = threading.Lock()


def _map(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for an array of {size} bytes: {error.strerror}") from None
    with contextlib.suppress(OSError):  # it is only quicker
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_memory = ArrayMemory()
os.register_at_fork(after_in_child=_memory.forget_lock)

make_large_array = _memory.make_array
"""Of at least `MIN_KEPT_BYTES`."""


def make_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """`np.empty`, for arrays of any size."""
    make = np.empty if math.prod(shape) * dtype.itemsize < MIN_KEPT_BYTES else make_large_array
    return make(shape, dtype)
