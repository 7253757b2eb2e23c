"""A coordinator and workers, whose GPUs are fake or those of this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tests.e2e.conftest import WARM
from tests.forked_daemon import ForkedDaemon
from tests.forked_process import ForkedProcess, fork_server

import collectived as cd
from collectived.gpu.array import DeviceArray
from collectived.testing.daemon import Daemon
from collectived_proto.v1 import status_pb2, worker_pb2_grpc

SECRET = "the-secret-of-these-tests"
_names = itertools.count()


class Cluster:
    """Attributes:
    hold, broken: files that hold up the fake GPUs of all workers, or break them, while they are there.
    nccl_hold, abort_hold: files that hold up what NCCL is at, or its aborts.
    nccl_broken: one file per worker, on which NCCL fails while it is there.

    With `real` the workers share the GPUs of this machine, which NCCL allows where it takes them for two hosts.
    """

    def __init__(
        self,
        workers: int,
        gpus: int,
        place: Path,
        real: bool = False,
        options: Sequence[str] = (),
        coordinating: Sequence[str] = (),
    ) -> None:
        """
        Args:
            gpus: those of each worker where they are not real. place: a folder for their files.
            options: of the workers. coordinating: of the coordinator.
        """
        self.hold, self.broken = place / "hold", place / "broken"
        self.nccl_hold, self.abort_hold = place / "nccl_hold", place / "abort_hold"
        self.nccl_broken = [place / f"nccl_broken_{task}" for task in range(workers)]
        self._nccl_calls = [place / f"nccl_calls_{task}" for task in range(workers)]
        self.folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
        told = {"GPUS": str(gpus), "HOLD": str(self.hold), "BROKEN": str(self.broken)}
        told |= {"INIT_HOLD": str(self.nccl_hold), "ABORT_HOLD": str(self.abort_hold)}
        listen = ("--job", "test", "--listen", f"unix:{self.folder}/c.sock")
        self.coordinator = ForkedDaemon(("coordinator", *listen, *coordinating), SECRET)
        address = str(self.coordinator.wait_ready(30)["address"])
        options = ("--job", "test", "--coordinator", address, "--folder", str(self.folder), *options)
        words = [("worker", "--task", str(task), "--host-name", f"host{task}", *options) for task in range(workers)]
        self.workers: list[Daemon] = []
        for task in range(workers):
            if real:
                host = ("env", f"NCCL_HOSTID=host{task}", "NCCL_SOCKET_IFNAME=lo")
                self.workers.append(Daemon(words[task], SECRET, host))
                continue
            own = {"NCCL_BROKEN": str(self.nccl_broken[task]), "NCCL_CALLS": str(self._nccl_calls[task])}
            fake = {f"COLLECTIVED_FAKE_{name}": value for name, value in (told | own).items()}
            self.workers.append(FakeWorker(words[task], SECRET, environment=fake))
        self.addresses = [str(worker.wait_ready(30)["address"]) for worker in self.workers]

    def address_of(self, rank: int, size: int) -> str:
        return self.addresses[rank // -(-size // len(self.addresses))]

    def run(self, size: int, body: Callable[[cd.Session, cd.Group], Any], **options: Any) -> list[Any]:
        """Runs `body(session, group)` as every rank of a new group, each in a thread of its own; results by rank."""
        name = f"group-{next(_names)}"

        def one(rank: int) -> Any:
            with (
                cd.connect(self.address_of(rank, size)) as session,
                session.join(name, size, rank=rank, timeout=20, **options) as group,
            ):
                return body(session, group)

        try:
            with ThreadPoolExecutor(size) as pool:
                return list(pool.map(one, range(size)))
        except BaseException as error:
            error.add_note(f"the daemons said:\n{''.join(worker.log for worker in self.workers)}")
            raise

    def nccl_calls(self) -> list[Counter[str]]:
        """How many collectives of each kind the fake NCCL of each worker has been given; one counts for each GPU."""
        return [Counter(file.read_text().split() if file.exists() else ()) for file in self._nccl_calls]

    def client(self, program: str) -> ForkedProcess:
        return fork_server(*WARM).start(program, {**os.environ, "COLLECTIVED_WORKER": self.addresses[0]})

    def status(self) -> status_pb2.StatusReply:
        with grpc.insecure_channel(self.addresses[0]) as channel:
            reply: status_pb2.StatusReply = worker_pb2_grpc.WorkerStub(channel).Status(status_pb2.StatusRequest())
        return reply

    def files(self, name: str = "fake-gpu") -> int:
        """How many allocations of fake GPUs the first worker has; clients' own: fake-lent; events: worker-event."""
        folder = f"/proc/{self.workers[0].process.pid}/fd"
        found = set()
        for descriptor in os.listdir(folder):
            with contextlib.suppress(OSError):
                if name in os.readlink(path := f"{folder}/{descriptor}"):
                    found.add(os.stat(path).st_ino)
        return len(found)

    def until(self, fact: Callable[[], bool]) -> None:
        """Looks until the fact holds; the test's own time limit ends it otherwise."""
        while not fact():
            threading.Event().wait(0.01)

    def close(self) -> None:
        for file in (self.hold, self.broken, self.nccl_hold, self.abort_hold, *self.nccl_broken):
            file.unlink(missing_ok=True)
        try:
            for daemon in (*self.workers, self.coordinator):
                daemon.close()
        finally:
            shutil.rmtree(self.folder)  # where workers that were killed have left their sockets


class FakeWorker(ForkedDaemon):
    """A worker as tests/fakes/worker.py composes it."""

    MODULE = "tests.fakes.worker"


def filled(session: cd.Session, value: Any, device: str = "GPU:0") -> DeviceArray:
    """An array on a GPU in memory of the worker, with these elements."""
    host = np.asarray(value)
    array: DeviceArray = session.empty(host.shape, host.dtype, device=device)
    array.assign(host)
    return array
