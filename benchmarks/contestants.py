"""The libraries that are measured, and the commands that start the ranks of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cases import ALL_REDUCE, Case
from benchmarks.environments import ENVIRONMENTS, OWN
from benchmarks.peers import ORDINARY, OWNED

Ports = Callable[[int], int]
"""Gives the first of so many ports that follow each other and are free."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to be started: its command, and what is added to the environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Contestant:
    """
    name: as the tables show it.
    key: as in `--only`.
    library: which of `benchmarks.peers` its ranks run.
    variants: where buffers may lie, as far as an all_reduce of them is measured; of other operations in the last.
    all_operations: whether it is measured with others than all_reduce.
    launches: from the environment's folder, the number of ranks and ports, what is to be started.
    """

    name: str
    key: str
    library: str
    launches: Callable[[Path, int, Ports], Sequence[Launch]]
    variants: tuple[str, ...] = ("",)
    all_operations: bool = False

    def variants_of(self, case: Case) -> tuple[str, ...]:
        """Where buffers lie when `case` is measured; nowhere if it is not."""
        if case.operation == ALL_REDUCE:
            return self.variants
        return self.variants[-1:] if self.all_operations else ()

    def processes(self, ranks: int) -> int:
        """How many of its processes take orders."""
        return 1 if self.library == "fold" else ranks

    def folder(self) -> Path | None:
        """Its environment, or None if that is not installed."""
        environment = ENVIRONMENTS.get(self.key)
        return environment.found() if environment else OWN


def _rank(folder: Path, library: str) -> tuple[str, ...]:
    return (str(folder / "bin" / "python"), "-m", "benchmarks.rank", library)


def _one_worker(folder: Path, ranks: int, ports: Ports) -> list[Launch]:
    return [_launch(folder, "--workers", "1", "--clients", str(ranks))]


def _worker_each(folder: Path, ranks: int, ports: Ports) -> list[Launch]:
    return [_launch(folder, "--workers", str(ranks), "--clients", "1")]


def _launch(folder: Path, *options: str) -> Launch:
    return Launch((str(folder / "bin" / "collectived"), "launch", *options, "--", *_rank(folder, "ours")), {})


def _openmpi(folder: Path, ranks: int, ports: Ports) -> list[Launch]:
    options = ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [Launch((str(folder / "bin" / "mpiexec"), "-n", str(ranks), *options, *_rank(folder, "mpi")), root)]


def _mpich(folder: Path, ranks: int, ports: Ports) -> list[Launch]:
    return [Launch((str(folder / "bin" / "mpiexec"), "-n", str(ranks), *_rank(folder, "mpi")), {})]


def _gloo(folder: Path, ranks: int, ports: Ports) -> list[Launch]:
    port = str(ports(1))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(ranks)}
    return [Launch(_rank(folder, "gloo"), {**shared, "RANK": str(rank)}) for rank in range(ranks)]


def _sockets(folder: Path, ranks: int, ports: Ports) -> list[Launch]:
    shared = {"MASTER_PORT": str(ports(ranks)), "WORLD_SIZE": str(ranks)}
    return [Launch(_rank(folder, "sockets"), {**shared, "RANK": str(rank)}) for rank in range(ranks)]


def _fold(folder: Path, ranks: int, ports: Ports) -> list[Launch]:
    return [Launch(_rank(folder, "fold"), {"WORLD_SIZE": str(ranks)})]


def _tensorflow(folder: Path, ranks: int, ports: Ports) -> list[Launch]:
    first = ports(ranks)
    workers = [f"127.0.0.1:{first + rank}" for rank in range(ranks)]
    found = []
    for rank in range(ranks):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        variables = {"TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        found.append(Launch(_rank(folder, "tensorflow"), variables))
    return found


HOST = Contestant("one worker", "ours", "ours", _one_worker, (OWNED, ORDINARY), all_operations=True)
TCP = Contestant("a worker per rank", "ours", "ours", _worker_each, (OWNED, ORDINARY), all_operations=True)
GLOO = Contestant("Gloo", "gloo", "gloo", _gloo, all_operations=True)
OPENMPI = Contestant("Open MPI", "openmpi", "mpi", _openmpi, all_operations=True)
MPICH = Contestant("MPICH", "mpich", "mpi", _mpich, all_operations=True)
TENSORFLOW = Contestant("TensorFlow RING", "tensorflow", "tensorflow", _tensorflow)
FOLD = Contestant("fold alone", "fold", "fold", _fold)
SOCKETS = Contestant("plain sockets", "sockets", "sockets", _sockets)
ALL = (HOST, TCP, GLOO, OPENMPI, MPICH, TENSORFLOW, FOLD, SOCKETS)
KEYS = tuple(dict.fromkeys(contestant.key for contestant in ALL))
