"""Memory of this process, for sessions that share none with their worker: arrays, staging, and results as they came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived.calls.buffers import ArenaAddress, Backing, Stageable
from collectived.values.leaves import Array

MAX_SPARE_BYTES = 256 << 20  # the most staging that is kept for later calls
_MAX_FREE_BLOCKS = 4  # blocks of results that are kept for later ones
_RATIO = 4  # a result takes no block that is larger than this many times what it needs
_SMALL = 4096

Bytes = NDArray[np.uint8]


class HeapStaging:
    """Room for the leaves of one call, laid out as Prepare said; a `buffers.StagedInputs`.

    Attributes:
        leaf_bytes: the bytes of each leaf, in the order of the leaves.
    """

    __slots__ = ("address", "leaf_bytes", "size", "views")

    def __init__(self, prepared: Stageable) -> None:
        self.size = prepared.layout.staging_bytes
        self.address: tuple[ArenaAddress, ...] = ((0, 0),)
        memory = np.empty(max(1, self.size), np.uint8)
        self.views: list[Array] = [
            np.ndarray(shape, dtype, memory, offset) for offset, dtype, shape in prepared.staging_locations
        ]
        self.leaf_bytes: list[Bytes] = [view.reshape(-1).view(np.uint8) for view in self.views]

    def fill(self, arrays: Sequence[Array]) -> None:
        for view, array in zip(self.views, arrays, strict=True):
            view[...] = array


class Heap:
    """A `buffers.StagingArea` that no worker can read: every value is staged, and sent from there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare_staging: dict[Stageable, HeapStaging] = {}
        self._spare_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array, row-major."""
        return np.empty(shape, dtype)

    def locate(self, array: Array) -> ArenaAddress | None:
        return None

    def acquire_staging(self, prepared: Stageable, patience: float = 0.0) -> HeapStaging:
        with self._lock:
            return self._pop_spare(prepared) or HeapStaging(prepared)

    def release_staging(self, prepared: Stageable, staging: HeapStaging) -> None:
        if not prepared.is_cached or staging.size > MAX_SPARE_BYTES:
            return
        with self._lock:
            self._pop_spare(prepared)
            self._spare_staging[prepared] = staging
            self._spare_bytes += staging.size
            while self._spare_bytes > MAX_SPARE_BYTES:
                self._pop_spare(next(iter(self._spare_staging)))

    def release_unused(self) -> None:
        """Nothing of it is the worker's."""

    def retire(self, staging: HeapStaging | None, arrays: Sequence[Array]) -> None:
        """Nothing to do: the sender keeps the arrays that it still sends."""

    def release_retired(self, retired: object) -> None:
        pass

    def evict(self, prepared: Stageable) -> None:
        prepared.is_cached = False
        with self._lock:
            self._pop_spare(prepared)

    def clear(self) -> None:
        self._spare_staging.clear()
        self._spare_bytes = 0

    def _pop_spare(self, prepared: Stageable) -> HeapStaging | None:
        staging = self._spare_staging.pop(prepared, None)
        if staging is not None:
            self._spare_bytes -= staging.size
        return staging


class Block:
    """Memory for a result, a `buffers.ResultBuffer`; given back when collected."""

    __slots__ = ("_free_queue", "memory", "offset", "views")

    def __init__(self, memory: Bytes, returned: deque[Bytes]) -> None:
        self.memory = memory
        self.offset = 0
        self.views: dict[tuple[int, int], list[Array]] = {}
        self._free_queue = returned

    def __del__(self) -> None:
        self._free_queue.append(self.memory)

    def acquire_backing(self, nbytes: int) -> Backing | None:
        """Nothing is shared here: results are copied from it."""
        return None


class BlockPool:
    """Memory for results, used again and again; its owner has a lock."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []
        self._free_queue: deque[Bytes] = deque()

    def acquire(self, nbytes: int) -> Block:
        """A block of at least that size."""
        while self._free_queue:
            self._free.append(self._free_queue.popleft())
        del self._free[:-_MAX_FREE_BLOCKS]
        fitting = [free for free in self._free if nbytes <= free.nbytes <= max(_RATIO * nbytes, _SMALL)]
        if not fitting:
            return Block(np.empty(max(nbytes, _SMALL), np.uint8), self._free_queue)
        memory = min(fitting, key=lambda free: free.nbytes)
        self._free = [free for free in self._free if free is not memory]
        return Block(memory, self._free_queue)

    def clear(self) -> None:
        self._free.clear()
        self._free_queue.clear()
