"""What is to run: a job's name, its folder, its ranks, and the environment in which each client finds its place.

Worker *w* has the clients with ranks `w * clients … (w + 1) * clients - 1`.
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

DEFAULT_GROUP = "world"
COORDINATOR = "coordinator"  # its name among the daemons of a job


@dataclass(frozen=True, slots=True)
class Job:
    """One job on this host. `clients` is per worker; `timeout` is the default of its collectives, in seconds."""

    name: str
    folder: Path
    workers: int
    clients: int
    program: tuple[str, ...]
    timeout: float | None = None

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.workers * self.clients

    def worker_of(self, rank: int) -> int:
        return rank // self.clients

    def ranks_of(self, worker: int) -> range:
        return range(worker * self.clients, (worker + 1) * self.clients)

    @property
    def worker_names(self) -> list[str]:
        """What people know the workers by, in order of their tasks."""
        return [f"worker {task}" for task in range(self.workers)]

    def opening(self) -> str:
        """The line that every launch begins with."""
        return (
            f"{_counted(self.workers, 'worker')} × {_counted(self.clients, 'client')} = {_counted(self.size, 'rank')} "
            "on localhost (worker = daemon of a host, client = your process)"
        )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def new_name() -> str:
    """A name that no other job of this host has: `<user>-<pid>-<random>`, fit for a file name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a uid without an entry in the password database
        user = str(os.getuid())
    return f"{re.sub('[^A-Za-z0-9_]', '_', user)[:16]}-{os.getpid()}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the daemons of a job serve; `rendezvous` is a free port for programs that bring their own (MASTER_PORT)."""

    coordinator: str
    workers: tuple[str, ...]
    rendezvous: int


def client_environment(job: Job, addresses: Addresses, rank: int, restart: int) -> dict[str, str]:
    """The variables that tell a client which rank it is and where its worker serves."""
    worker = job.worker_of(rank)
    variables = {
        "COLLECTIVED_WORKER": addresses.workers[worker],
        "COLLECTIVED_COORDINATOR": addresses.coordinator,
        "COLLECTIVED_JOB": job.name,
        "COLLECTIVED_GROUP": DEFAULT_GROUP,
        "COLLECTIVED_RESTART": str(restart),
        "RANK": str(rank),
        "WORLD_SIZE": str(job.size),
        "LOCAL_RANK": str(rank - worker * job.clients),
        "LOCAL_WORLD_SIZE": str(job.clients),
        "GROUP_RANK": str(worker),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(addresses.rendezvous),
    }
    if job.timeout is not None:
        variables["COLLECTIVED_TIMEOUT"] = repr(job.timeout)
    return variables
