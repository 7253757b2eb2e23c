"""Daemons of a drill as if each worker were a host of its own, and what can be known about them and done to them.

Every worker finds the coordinator through a door of the proxy. Where workers are `linked`, they find each other through
doors too: a relay tells them. Where they are `apart`, each has a network namespace, with the ranks beside it, and there
is no proxy: the coordinator, in one of its own, listens on TCP.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import grpc
from tests.drills.hosts import CONTROL, DATA, Hosts
from tests.drills.limits import Limit
from tests.drills.processes import Daemon, RankProcess
from tests.drills.proxy import Connection, Door
from tests.drills.relay import Relay

from collectived_proto.types import unscoped_name
from collectived_proto.v1 import status_pb2, worker_pb2_grpc

HEARTBEAT_SECONDS = 1.0
STALL_SECONDS = 1.0
_START_SECONDS = 60.0
_PORT = 7450  # of the coordinator, on a host of its own
_SPARE_RANKS = 2  # processes that wait on each worker, so that a drill need not wait for their start
_numbers = itertools.count(1)


class Cluster:
    """A coordinator with a journal, some workers, and rank processes that wait to be used."""

    def __init__(self, workers: int, linked: bool = False, apart: bool = False) -> None:
        self.hosts = Hosts(workers + 1) if apart else None  # the last one is the coordinator's
        self._count = workers
        self.folder = Path(tempfile.mkdtemp(prefix="cd-drills-", dir="/tmp"))
        self.linked = linked
        self.workers: list[Daemon] = []
        self._closed = False
        self._idle: dict[int, list[RankProcess]] = {task: [] for task in range(workers)}
        self._channels: dict[int, grpc.Channel] = {}
        self._links: dict[int, tuple[str, Door]] = {}  # task -> its real link address, the door before it
        self._relay: Relay | None = None
        limit = Limit(_START_SECONDS)
        self._real = f"{self.folder}/c.sock"
        self.coordinator = self._start_coordinator()
        self.coordinator.ready(limit)
        self._seen = self._real
        if linked:
            self._seen = f"{self.folder}/relay.sock"
            self._relay = Relay(self._seen, f"unix:{self._real}", self._door_to)
        self._led_to = ""
        self.lines = [
            Door(f"{self.folder}/line{task}.sock", lambda: self._led_to or self._seen)
            for task in range(0 if apart else workers)
        ]
        self.workers = [self._start_worker(task) for task in range(workers)]
        self.addresses: list[str] = []
        self.far_addresses: list[str] = []  # for clients of other hosts
        for worker in self.workers:
            self.addresses.append("")
            self.far_addresses.append("")
            self._learn(len(self.addresses) - 1, worker, limit)
        self.keep_spares()

    @property
    def daemons(self) -> list[Daemon]:
        return [self.coordinator, *self.workers]

    # Daemons

    def _start_coordinator(self) -> Daemon:
        listen = ["--listen", f"{self.hosts.address(self._count, CONTROL)}:{_PORT}"] if self.hosts else []
        return Daemon(
            *("coordinator", "--listen", f"unix:{self._real}", *listen, "--journal", f"{self.folder}/epoch"),
            *("--heartbeat", str(HEARTBEAT_SECONDS), "--stall-after", str(STALL_SECONDS)),
            within=self._within(self._count),
        )

    def _start_worker(self, task: int) -> Daemon:
        if self.hosts:
            coordinator = f"{self.hosts.address(self._count, CONTROL)}:{_PORT}"
            links = ["--link-listen", f"{self.hosts.address(task, DATA)}:0"]
        else:
            coordinator, links = self.lines[task].address, []
        return Daemon(
            *("worker", "--task", str(task), "--folder", str(self.folder), "--host-name", f"host{task}"),
            *("--coordinator", coordinator, "--listen", ":0", *links),
            within=self._within(task),
        )

    def _within(self, host: int) -> tuple[str, ...]:
        return self.hosts.inside(host) if self.hosts else ()

    def _learn(self, task: int, worker: Daemon, limit: Limit) -> None:
        told = worker.ready(limit)
        self.addresses[task], self.far_addresses[task] = str(told["address"]), str(told["addresses"][-1])

    def restart_coordinator(self, limit: Limit) -> None:
        """After it was killed: the same journal, the same address."""
        self.coordinator.close()
        self.coordinator = self._start_coordinator()
        self.coordinator.ready(limit)

    def lead_to(self, path: str) -> None:
        """Leads all workers to another coordinator; "" : to the right one again."""
        self._led_to = path
        for line in self.lines:
            for connection in line.connections:
                connection.cut()

    def restart_worker(self, task: int, limit: Limit) -> None:
        self.workers[task].close()
        self.workers[task] = self._start_worker(task)
        self._learn(task, self.workers[task], limit)
        self._forget_channel(task)

    # Links

    def _door_to(self, task: int, real: str) -> str:
        known = self._links.get(task)
        if known is None or known[0] != real:
            if known is not None:
                known[1].close()
            host, _, port = real.rpartition(":")
            self._links[task] = real, Door("", lambda: (host, int(port)), framed=True)
        return self._links[task][1].address

    def links(self, one: int, other: int, generation: int) -> list[Connection]:
        """Links between two workers that serve a generation."""
        found = []
        for _, door in list(self._links.values()):
            for connection in door.connections:
                known = connection.hello
                if known and known.generation == generation and {known.dialler, known.acceptor} == {one, other}:
                    found.append(connection)
        return found

    # Facts

    def status(self, task: int, timeout: float, local_only: bool = True) -> status_pb2.StatusReply:
        """What a worker tells; raises grpc.RpcError where it tells nothing."""
        channel = self._channels.get(task)
        if channel is None:
            channel = self._channels[task] = grpc.insecure_channel(self.addresses[task])
        request = status_pb2.StatusRequest(local_only=local_only)
        reply: status_pb2.StatusReply = worker_pb2_grpc.WorkerStub(channel).Status(request, timeout=timeout)
        return reply

    def group_loops(self, group: str, tasks: list[int], timeout: float = 2.0) -> list[status_pb2.LaneStatus]:
        """The group loops of a group on these workers."""
        found = []
        for task in tasks:
            with contextlib.suppress(grpc.RpcError):  # it has ended, or is about to
                (worker,) = self.status(task, timeout).workers
                found += [group_loop for group_loop in worker.lanes if unscoped_name(group_loop.group) == group]
        return found

    def connected(self, task: int) -> bool:
        """Whether a worker has its coordinator, over a connection that has not been cut."""
        if self.lines and not self.lines[task].connections:
            return False
        try:
            return self.status(task, 2.0).workers[0].connected
        except grpc.RpcError:
            return False

    def all_connected(self) -> bool:
        return all(map(self.connected, range(len(self.workers))))

    def _forget_channel(self, task: int) -> None:
        channel = self._channels.pop(task, None)
        if channel is not None:
            channel.close()

    # Ranks

    def hire(self, task: int) -> RankProcess:
        """A rank process on the host of that worker, without a session."""
        return self._idle[task].pop(0) if self._idle[task] else self._new_rank(task)

    def dismiss(self, process: RankProcess) -> None:
        """Gives back one that is as good as new."""
        if process.spoilt or not process.alive:
            process.kill()
            process.close()
        else:
            process.events.clear()
            self._idle[process.worker].append(process)

    def keep_spares(self) -> None:
        for task, idle in self._idle.items():
            while len(idle) < _SPARE_RANKS:
                idle.append(self._new_rank(task))

    def _new_rank(self, task: int) -> RankProcess:
        return RankProcess(task, next(_numbers), self._within(task))

    # The end

    def close(self) -> None:
        """Ends everything; raises AssertionError where something did not end in order, or left files behind."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as ending:
            if self.hosts is not None:
                ending.callback(self.hosts.close)
            ending.callback(shutil.rmtree, self.folder, ignore_errors=True)
            ending.callback(self._check_folder)
            if self._relay is not None:
                ending.callback(self._relay.close)
            for door in (*self.lines, *(door for _, door in self._links.values())):
                ending.callback(door.close)
            for daemon in self.daemons:  # callbacks run in reverse order: workers end first
                ending.callback(daemon.close)
            for task in list(self._channels):
                ending.callback(self._forget_channel, task)
            for process in itertools.chain.from_iterable(self._idle.values()):
                ending.callback(process.close)

    def _check_folder(self) -> None:
        left = sorted(path.name for path in self.folder.iterdir() if path.name not in ("epoch", "relay.sock"))
        assert left == [], f"daemons left files behind: {left}"


def held(pid: int) -> Counter[str]:
    """What a process holds: threads, TCP connections, other descriptors, memfds among them, shared memory it has
    mapped, KiB of its own."""
    targets = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    inodes = [
        line.split()[9]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()
    ]
    connections = len({f"socket:[{inode}]" for inode in inodes}.intersection(targets))
    shared = ("memfd:", "/dev/shm")
    with open(f"/proc/{pid}/maps") as maps:
        mapped = sum(any(kind in line for kind in shared) for line in maps)
    _, resident, common = map(int, Path(f"/proc/{pid}/statm").read_text().split()[:3])
    return Counter(
        threads=len(os.listdir(f"/proc/{pid}/task")),
        connections=connections,
        descriptors=len(targets) - connections,
        memfds=sum(any(kind in target for kind in shared) for target in targets),
        mapped=mapped,
        kib=(resident - common) * os.sysconf("SC_PAGE_SIZE") // 1024,
    )
