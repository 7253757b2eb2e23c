"""Memory of this process, for sessions that share none with their worker: arrays, staging, and results as they came."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived.calls.buffers import ArenaAddress, Backing, Stageable
from collectived.values.leaves import Array
from collectived.values.new_arrays import make_array

MAX_SPARE_BYTES = 256 << 20  # the most staging that is kept for later calls

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
        memory: Bytes = make_array((max(1, self.size),), np.dtype(np.uint8))
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
    """Memory for a result, a `buffers.ResultBuffer`."""

    __slots__ = ("memory", "offset", "views")

    def __init__(self, nbytes: int) -> None:
        self.memory: Bytes = make_array((max(1, nbytes),), np.dtype(np.uint8))
        self.offset = 0
        self.views: dict[tuple[int, int], list[Array]] = {}

    def acquire_backing(self, nbytes: int) -> Backing | None:
        """Nothing is shared here: results are copied from it."""
        return None
