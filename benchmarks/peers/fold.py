"""A floor: one process folds the buffers of all ranks, as a worker must, and does nothing else.

Blocks that stay in the cache, in rank order, over as many threads as there are processors; small ones in the caller's.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from benchmarks.cases import ITEM, Array, Case, fill

BLOCK = (128 << 10) // ITEM
SPREAD = (1 << 20) // ITEM


class Fold:
    rank = 0

    def __init__(self) -> None:
        self.size = int(os.environ["WORLD_SIZE"])
        self.threads = len(os.sched_getaffinity(0))
        self.pool = ThreadPoolExecutor(self.threads)
        self.versions = {"numpy": np.__version__}

    def trial(self, case: Case, variant: str) -> Folding:
        return Folding(self, case)

    def close(self) -> None:
        self.pool.shutdown()


class Folding:
    in_place = False

    def __init__(self, peer: Fold, case: Case) -> None:
        self._peer = peer
        self._inputs = [[_shared(case.count) for _ in range(case.tensors)] for _ in range(peer.size)]
        self._outputs = [_shared(case.count) for _ in range(case.tensors)]
        step = -(-case.count // peer.threads) if case.count > SPREAD else case.count
        self._parts = [slice(begin, min(begin + step, case.count)) for begin in range(0, case.count, step)]

    def fill(self, base: Array, factor: float) -> None:
        for rank, arrays in enumerate(self._inputs):
            for array in arrays:
                fill(array, base, rank, factor)
        for array in self._outputs:
            array.fill(np.nan)

    def call(self) -> None:
        for index, output in enumerate(self._outputs):
            sources = [arrays[index] for arrays in self._inputs]
            if len(self._parts) == 1:
                fold(sources, output, self._parts[0])
            else:
                wait([self._peer.pool.submit(fold, sources, output, part) for part in self._parts])

    def results(self) -> list[Array]:
        return self._outputs


def fold(sources: list[Array], output: Array, part: slice) -> None:
    """Adds up one part of the sources; of two at a stretch, of more by blocks."""
    block = part.stop - part.start if len(sources) == 2 else BLOCK
    for begin in range(part.start, part.stop, block):
        piece = slice(begin, min(begin + block, part.stop))
        np.add(sources[0][piece], sources[1][piece], out=output[piece])
        for source in sources[2:]:
            np.add(output[piece], source[piece], out=output[piece])


def _shared(count: int) -> Array:
    return np.frombuffer(mmap.mmap(-1, count * ITEM), np.float32)


def start() -> Fold:
    return Fold()
