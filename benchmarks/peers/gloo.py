"""Gloo, as `torch.distributed` has it, over the loopback."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from benchmarks.cases import Array, Case, fill


class Gloo:
    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._dist: Any = importlib.import_module("torch.distributed")
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._dist.init_process_group("gloo")
        self.versions = {"torch": str(self._torch.__version__)}

    def trial(self, case: Case, variant: str) -> InPlace:
        return InPlace(self._torch, self._dist, self.rank, case)

    def close(self) -> None:
        self._dist.destroy_process_group()


class InPlace:
    """Tensors that are summed in place. Many are put together by Gloo itself."""

    in_place = True

    def __init__(self, torch: Any, dist: Any, rank: int, case: Case) -> None:
        self._dist, self._rank = dist, rank
        self._arrays: list[Array] = [np.empty(case.count, np.float32) for _ in range(case.tensors)]
        self._tensors = [torch.from_numpy(array) for array in self._arrays]

    def fill(self, base: Array, factor: float) -> None:
        for array in self._arrays:
            fill(array, base, self._rank, factor)

    def call(self) -> None:
        if len(self._tensors) == 1:
            self._dist.all_reduce(self._tensors[0])
            return
        self._dist.all_reduce_coalesced(self._tensors)

    def results(self) -> list[Array]:
        return self._arrays


def start() -> Gloo:
    return Gloo()
