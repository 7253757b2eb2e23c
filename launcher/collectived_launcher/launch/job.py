"""The description of a job: its name, its hosts, its ranks, and the environment in which each client finds its place.

Ranks are dealt out worker by worker: worker 0 has the first `clients[0]`, worker 1 the next, and so on.
"""

from __future__ import annotations

import getpass
import itertools
import os
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from collectived_launcher.hosts.host import LOCALHOST

DEFAULT_GROUP = "world"
COORDINATOR = "coordinator"  # its name among the daemons of a job


@dataclass(frozen=True, slots=True)
class Job:
    """One job.

    clients: how many each worker has. hosts: where each worker runs. program: the command of all ranks. timeout: the
    default of its collectives, in seconds. variables: what clients get besides. folder: where clients run, '' for the
    host's choice.
    """

    name: str
    clients: tuple[int, ...]
    program: tuple[str, ...]
    timeout: float | None = None
    hosts: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    folder: str = ""

    @property
    def worker_count(self) -> int:
        return len(self.clients)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return sum(self.clients)

    @property
    def has_remote_hosts(self) -> bool:
        """Whether anything of it runs on another host than this."""
        return any(host != LOCALHOST for host in self.hosts)

    def find_worker(self, rank: int) -> int:
        return bisect_right(list(itertools.accumulate(self.clients)), rank)

    def get_ranks(self, worker: int) -> range:
        first = sum(self.clients[:worker])
        return range(first, first + self.clients[worker])

    @property
    def worker_names(self) -> list[str]:
        """The names of the workers for people, in order of their tasks."""
        return [f"worker {task}" for task in range(self.worker_count)]

    def get_host_label(self, worker: int) -> str:
        """The host of a worker, where that needs to be said."""
        return self.hosts[worker] if self.has_remote_hosts else ""

    def format_banner(self) -> str:
        """The line that every launch begins with."""
        if len(set(self.clients)) == 1:
            what = f"{_counted(self.worker_count, 'worker')} × {_counted(self.clients[0], 'client')}"
        else:
            what = f"{_counted(self.worker_count, 'worker')} with {' + '.join(map(str, self.clients))} clients"
        ranks = _counted(self.size, "rank")
        return f"{what} = {ranks} on {self._format_hosts()} (worker = daemon of a host, client = your process)"

    def _format_hosts(self) -> str:
        return _shortened(self.hosts) if self.has_remote_hosts else LOCALHOST


def make_local_job(
    name: str, workers: int, clients: int, program: tuple[str, ...], timeout: float | None = None
) -> Job:
    """A job of so many workers here, with so many clients each."""
    return Job(name, (clients,) * workers, program, timeout, (LOCALHOST,) * workers)


_MAX_LISTED_HOSTS = 8  # hosts in one line


def _shortened(names: Iterable[str]) -> str:
    first, more = (found := list(names))[:_MAX_LISTED_HOSTS], found[_MAX_LISTED_HOSTS:]
    return ", ".join(first) + (f" and {len(more)} more" if more else "")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def make_job_name() -> str:
    """A name that no other job of this host has: `<user>-<pid>-<random>`, fit for a file name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a uid without an entry in the password database
        user = str(os.getuid())
    return f"{re.sub('[^A-Za-z0-9_]', '_', user)[:16]}-{os.getpid()}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the daemons of a job serve; `master_port` is a free port of the first host, whose address is
    `master_address`, for programs that bring their own (MASTER_ADDR, MASTER_PORT)."""

    coordinator: str
    workers: tuple[str, ...]
    master_port: int
    master_address: str = "127.0.0.1"


def client_environment(job: Job, addresses: Addresses, rank: int, restart: int) -> dict[str, str]:
    """The variables with a client's rank and the address of its worker."""
    worker = job.find_worker(rank)
    variables = {
        **job.variables,
        "COLLECTIVED_WORKER": addresses.workers[worker],
        "COLLECTIVED_COORDINATOR": addresses.coordinator,
        "COLLECTIVED_JOB": job.name,
        "COLLECTIVED_GROUP": DEFAULT_GROUP,
        "COLLECTIVED_RESTART": str(restart),
        "RANK": str(rank),
        "WORLD_SIZE": str(job.size),
        "LOCAL_RANK": str(rank - job.get_ranks(worker).start),
        "LOCAL_WORLD_SIZE": str(job.clients[worker]),
        "GROUP_RANK": str(worker),
        "MASTER_ADDR": addresses.master_address,
        "MASTER_PORT": str(addresses.master_port),
    }
    if job.timeout is not None:
        variables["COLLECTIVED_TIMEOUT"] = repr(job.timeout)
    return variables
