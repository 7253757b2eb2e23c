"""MPI through mpi4py: Open MPI or MPICH, whichever the environment has."""

from __future__ import annotations

import importlib
import re
from typing import Any

import numpy as np

from benchmarks.cases import Array, Case, fill


class Mpi:
    def __init__(self) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._comm = self._mpi.COMM_WORLD
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        library = self._mpi.Get_library_version()
        version = re.search(r"\d+\.\d[\w.]*", library)
        self.versions = {"Open MPI" if "Open MPI" in library else "MPICH": version[0] if version else "?"}
        self.versions["mpi4py"] = importlib.import_module("mpi4py").__version__

    def trial(self, case: Case, variant: str) -> Buffers:
        return Buffers(self._mpi, self._comm, self.rank, case)

    def close(self) -> None:
        self._mpi.Finalize()


class Buffers:
    """`Allreduce` from one buffer to another; of many, `Iallreduce` each and one `Waitall`."""

    in_place = False

    def __init__(self, mpi: Any, comm: Any, rank: int, case: Case) -> None:
        self._mpi, self._comm, self._rank = mpi, comm, rank
        self._inputs: list[Array] = [np.empty(case.count, np.float32) for _ in range(case.tensors)]
        self._outputs: list[Array] = [np.empty(case.count, np.float32) for _ in range(case.tensors)]
        self._pairs = list(zip(self._inputs, self._outputs, strict=True))

    def fill(self, base: Array, factor: float) -> None:
        for array in self._inputs:
            fill(array, base, self._rank, factor)
        for array in self._outputs:
            array.fill(np.nan)

    def call(self) -> None:
        if len(self._pairs) == 1:
            self._comm.Allreduce(*self._pairs[0])
        else:
            self._mpi.Request.Waitall([self._comm.Iallreduce(*pair) for pair in self._pairs])

    def results(self) -> list[Array]:
        return self._outputs


def start() -> Mpi:
    return Mpi()
