"""MPI through mpi4py: Open MPI or MPICH, whichever the environment has."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from benchmarks.cases import ALL_REDUCE, Array, Case
from benchmarks.trial import Arrays, make_exchange


class Mpi:
    def __init__(self) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._comm = self._mpi.COMM_WORLD
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        library = self._mpi.Get_library_version()
        version = re.search(r"\d+\.\d[\w.]*", library)
        self.versions = {"Open MPI" if "Open MPI" in library else "MPICH": version[0] if version else "?"}
        self.versions["mpi4py"] = importlib.import_module("mpi4py").__version__

    def trial(self, case: Case, variant: str) -> Arrays:
        """Sum from one buffer to another; of many, `Iallreduce` each and one `Waitall`."""
        trial = Arrays(case, self.rank, self.size)
        if case.tensors > 1:
            pairs = list(zip(trial.inputs, trial.outputs, strict=True))
            trial.call = lambda: self._mpi.Request.Waitall([self._comm.Iallreduce(*pair) for pair in pairs])
        else:
            trial.call = self._one(case.operation, trial.inputs[0], trial.outputs[0])
        return trial

    def _one(self, operation: str, value: Array, out: Array) -> Callable[[], object]:
        comm, neighbour = self._comm, self.rank ^ 1
        at_root = self.rank == 0

        calls: dict[str, Callable[[], object]] = {
            ALL_REDUCE: lambda: comm.Allreduce(value, out),
            "broadcast": lambda: comm.Bcast(value),
            "all_gather": lambda: comm.Allgather(value, out),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(value, out),
            "all_to_all": lambda: comm.Alltoall(value, out),
            "gather": lambda: comm.Gather(value, out if at_root else None),
            "scatter": lambda: comm.Scatter(value if at_root else None, out),
            "send_recv": make_exchange(
                self.rank, lambda: comm.Send(value, neighbour), lambda: comm.Recv(out, neighbour)
            ),
            "barrier": comm.Barrier,
        }
        return calls[operation]

    def close(self) -> None:
        self._mpi.Finalize()


def start() -> Mpi:
    return Mpi()
