"""collectived itself, under `collectived launch`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import collectived as cd
from benchmarks.cases import Array, Case, fill
from benchmarks.peers import ORDINARY


class Owned:
    """Inputs in the worker's memory; the result is a view that the ranks of the host share."""

    in_place = False

    def __init__(self, peer: Ours, case: Case) -> None:
        self._group, self._rank = peer.group, peer.rank
        self._inputs = [peer.session.empty(case.count, np.float32) for _ in range(case.tensors)]
        self._value = self._inputs[0] if case.tensors == 1 else self._inputs
        self._result: Any = None

    def fill(self, base: Array, factor: float) -> None:
        self._result = None
        for array in self._inputs:
            fill(array, base, self._rank, factor)

    def call(self) -> None:
        self._result = self._group.all_reduce("sum", self._value)

    def results(self) -> list[Array]:
        return self._result if isinstance(self._result, list) else [self._result]


class Ordinary:
    """Arrays of NumPy, in and out."""

    in_place = False

    def __init__(self, peer: Ours, case: Case) -> None:
        self._group, self._rank = peer.group, peer.rank
        self._inputs = [np.empty(case.count, np.float32) for _ in range(case.tensors)]
        self._outputs = [np.empty(case.count, np.float32) for _ in range(case.tensors)]
        single = case.tensors == 1
        self._value: Any = self._inputs[0] if single else self._inputs
        self._out: Any = self._outputs[0] if single else self._outputs

    def fill(self, base: Array, factor: float) -> None:
        for array in self._inputs:
            fill(array, base, self._rank, factor)
        for array in self._outputs:
            array.fill(np.nan)

    def call(self) -> None:
        self._group.all_reduce("sum", self._value, out=self._out)

    def results(self) -> list[Array]:
        return self._outputs


class Ours:
    def __init__(self) -> None:
        self.session = cd.connect()
        self.group = self.session.join()
        self.rank, self.size = self.group.rank, self.group.size
        self.versions = {"collectived": cd.__version__, "numpy": np.__version__}

    def trial(self, case: Case, variant: str) -> Owned | Ordinary:
        return Ordinary(self, case) if variant == ORDINARY else Owned(self, case)

    def rejoin(self, calls: int) -> list[float]:
        """Seconds to join a group name again whose last generation all ranks have just left."""
        times = []
        name = "again"
        self.session.join(name, self.size).leave()
        for _ in range(calls):
            self.group.barrier()
            begin = time.perf_counter()
            group = self.session.join(name, self.size)
            times.append(time.perf_counter() - begin)
            group.leave()
        return times

    def close(self) -> None:
        self.group.leave()
        self.session.close()


def start() -> Ours:
    return Ours()
