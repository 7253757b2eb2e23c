"""New arrays for results and copies. Large ones get memory that an earlier one has left.

The system fills new memory with zeros, which takes as long as a large collective. The C library keeps what is freed,
but it gives the memory of large arrays back to the system each time. So this module keeps that memory once no array
looks into it, and the next array of that size gets it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from collectived.values.leaves import Array

MIN_KEPT_BYTES = 32 << 20
"""The memory of smaller arrays is the C library's: glibc mostly keeps pieces of up to 32 MiB."""

MAX_FREE_BYTES = 256 << 20
_HUGE_PAGE_BYTES = 2 << 20


class _Block(np.ndarray[Any, np.dtype[np.uint8]]):
    """The memory of an array, as its base; given back when the last view of it is collected.

    It is a subclass because NumPy lets a view of a view skip bases of its own type.
    """

    owner: ArrayMemory | None = None
    memory: Any = None

    def __del__(self) -> None:
        if self.owner is not None:
            self.owner.give_back(self.memory)


class ArrayMemory:
    """Memory of this process for large arrays, used again and again.

    Finalizers, handlers of signals and other threads may call it in the middle of a call. A call that finds the lock
    taken goes on without kept memory.

    Args:
        max_free_bytes: the most that is kept while no array has it.
    """

    def __init__(self, max_free_bytes: int = MAX_FREE_BYTES) -> None:
        self._max_free_bytes = max_free_bytes
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []  # the one that came back last stands last
        self._free_queue: deque[mmap.mmap] = deque()

    def make_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Make an array with any content, row-major.

        Raises:
            MemoryError, ValueError: as `np.empty` does.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        size = -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        memory = self._take(size) or _map(size)
        if memory is None:
            return np.empty(shape, dtype)
        block = _Block((nbytes,), np.uint8, memory)
        block.owner, block.memory = self, memory
        return np.ndarray(shape, dtype, block)

    def give_back(self, memory: mmap.mmap) -> None:
        """Keep memory for a later array, or let the system have it."""
        self._free_queue.append(memory)
        self._take(0)

    def _take(self, size: int) -> mmap.mmap | None:
        """Free memory of that size; None where there is none, or another call has the lock."""
        surplus: list[mmap.mmap] = []  # unmapped at the return, when others may have the lock
        if not self._lock.acquire(blocking=False):
            return None
        try:
            while self._free_queue:
                memory = self._free_queue.popleft()
                (self._free if len(memory) <= self._max_free_bytes else surplus).append(memory)
            while sum(map(len, self._free)) > self._max_free_bytes:
                surplus.append(self._free.pop(0))
            fitting = [place for place, memory in enumerate(self._free) if len(memory) == size]
            return self._free.pop(fitting[-1]) if fitting else None  # the last may still be in the caches
        finally:
            self._lock.release()

    def forget_lock(self) -> None:
        """Go on in a forked child: a thread that it does not have may have held the lock."""
        self._lock = threading.Lock()


def _map(size: int) -> mmap.mmap | None:
    """None where the system has no such memory."""
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        return None
    with contextlib.suppress(OSError):  # huge pages are only quicker
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_memory = ArrayMemory()
make_large_array: Callable[[tuple[int, ...], np.dtype[Any]], Array] = np.empty
if sys.platform == "linux":
    os.register_at_fork(after_in_child=_memory.forget_lock)
    make_large_array = _memory.make_array  # for arrays of at least MIN_KEPT_BYTES


def make_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Do as `np.empty` does, for an array of any size."""
    make = np.empty if math.prod(shape) * dtype.itemsize < MIN_KEPT_BYTES else make_large_array
    return make(shape, dtype)
