"""Floods: whatever one client or stranger does, others sum on, and a worker has back what it gave."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.floods import open_doorbell
from tests.docs.contents import ROOT
from tests.e2e.conftest import Cluster, Daemon
from tests.e2e.raw_client import Raw
from tests.e2e.rejection_counts import counting
from tests.waiting import settle

import collectived as cd
from collectived_proto.ipc import messages
from collectived_proto.v1 import status_pb2

GUESTS, CALLERS = 40, 30
CONNECTIONS = 150  # of each kind
MOST_GROWTH = 32 << 20  # bytes
OPTIONS = (
    *("--max-handshakes", str(GUESTS), "--max-connections", str(CALLERS)),
    *("--listen", "127.0.0.1:0", "--metrics", "0"),
)
LITTLE = ("sh", "-c", 'ulimit -n 160; exec "$@"', "sh")


class Pair:
    """Two ranks that sum without pause, and check every sum."""

    def __init__(self, run: Callable[[int, Callable[[cd.Group], Any]], Any]) -> None:
        self._run = run
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self.sums = 0
        self._thread = threading.Thread(target=self._all)

    def __enter__(self) -> Pair:
        self._thread.start()
        self.more()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def more(self, count: int = 20, seconds: float = 30.0) -> None:
        """Waits until so many more have been summed."""
        goal = self.sums + count
        settle(lambda: self.sums >= goal or self._failed is not None, seconds)
        if self._failed is not None:
            raise self._failed

    def _all(self) -> None:
        try:
            self._run(2, self._rank)
        except BaseException as error:
            self._failed = error

    def _rank(self, group: cd.Group) -> None:
        mine = np.arange(100, dtype=np.float32) + group.rank
        going_on = True
        while going_on:
            assert (group.all_reduce("sum", mine) == 2 * np.arange(100) + 1).all()
            going_on = group.broadcast(not self._stop.is_set())
            if group.rank == 0:
                self.sums += 1


@pytest.fixture(scope="module")
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(2, worker_options=OPTIONS)


@pytest.fixture
def watcher(cluster: Cluster) -> Iterator[Raw]:
    """A client of the second worker that was there before."""
    made = Raw(cluster.addresses[1])
    yield made
    made.close()


def at_links(cluster: Cluster, status: status_pb2.WorkerStatus) -> socket.socket:
    host, _, port = status.link_address.rpartition(":")
    return _connected(socket.AF_INET, socket.SOCK_STREAM, (host, int(port)))


def at_door(cluster: Cluster, status: status_pb2.WorkerStatus) -> socket.socket:
    return _connected(socket.AF_UNIX, socket.SOCK_SEQPACKET, str(cluster.folder / "door-1.sock"))


def at_grpc(cluster: Cluster, status: status_pb2.WorkerStatus) -> socket.socket:
    host, _, port = cluster.tcp_addresses[1].rpartition(":")
    return _connected(socket.AF_INET, socket.SOCK_STREAM, (host, int(port)))


def _connected(family: int, kind: int, address: Any) -> socket.socket:
    made = socket.socket(family, kind)
    if family != socket.AF_UNIX:  # there a socket with a limit is turned away where many knock, instead of waiting
        made.settimeout(20)
    made.connect(address)
    made.settimeout(20)
    return made


@pytest.mark.parametrize(
    ("connect", "most", "limit"),
    [(at_links, GUESTS, "handshakes"), (at_door, GUESTS, "handshakes"), (at_grpc, CALLERS, "")],
    ids=["links", "door", "grpc"],
)
def test_silent_connections_hold_no_more_than_their_share_and_go(
    cluster: Cluster, watcher: Raw, connect: Callable[..., socket.socket], most: int, limit: str
) -> None:
    before = watcher.status()
    counted = counting(cluster.metrics[2], limit) if limit else contextlib.nullcontext()
    with contextlib.ExitStack() as held:
        with Pair(cluster.run) as pair, counted:
            for _ in range(CONNECTIONS):
                held.enter_context(connect(cluster, before))
            pair.more()
        # those who work came in meanwhile, and over links too: a group of both workers, made while all are held
        assert cluster.run(2, lambda group: group.all_reduce("sum", 1)) == [2, 2]
        assert watcher.status().descriptors <= before.descriptors + most + 12
    settle(lambda: watcher.status().descriptors <= before.descriptors + 2, 20)


@pytest.mark.parametrize(
    "words", [b"", b"PRI * HTTP/2.0\r\n\r\nSM", b"GET / HTTP/1.1\r\n"], ids=["none", "half", "other"]
)
def test_who_says_half_a_greeting_to_grpc_is_shown_out(cluster: Cluster, watcher: Raw, words: bytes) -> None:
    with at_grpc(cluster, watcher.status()) as guest:
        guest.sendall(words)
        with contextlib.suppress(ConnectionResetError):
            while guest.recv(4096):
                pass


def test_where_descriptors_run_out_those_who_are_in_go_on_and_others_come_later() -> None:
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        coordinator = Daemon("coordinator", "--listen", f"unix:{folder}/c.sock")
        stack.callback(coordinator.close)
        coordinator.wait_ready()
        worker = Daemon(
            *("worker", "--task", "0", "--coordinator", f"unix:{folder}/c.sock", "--folder", name, "--metrics", "0"),
            within=LITTLE,
        )
        stack.callback(worker.close)
        announced = worker.wait_ready()
        address = str(announced["address"])

        def run(size: int, body: Callable[[cd.Group], Any]) -> list[Any]:
            found: list[Any] = []

            def one(rank: int) -> None:
                with cd.connect(address) as session, session.join("pair", size, rank=rank, timeout=20) as group:
                    found.append(body(group))

            threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(found) == size
            return found

        with Pair(run) as pair:
            with contextlib.ExitStack() as held, counting(str(announced["metrics"]), "descriptors"):
                for _ in range(200):
                    held.enter_context(_connected(socket.AF_UNIX, socket.SOCK_SEQPACKET, f"{name}/door-0.sock"))
                pair.more()
            pair.more()
        with cd.connect(address) as session, session.join("after", 1, timeout=20) as group:
            assert group.all_reduce("sum", 1) == 1


@pytest.mark.parametrize("kind", ["status", "prepare", "sessions", "pings", "errors", "never_reads"])
def test_beside_a_flood_others_sum_on_and_the_worker_stays_as_it_was(cluster: Cluster, watcher: Raw, kind: str) -> None:
    before = watcher.status()
    command = [sys.executable, "-m", "benchmarks.floods", "--attack", kind, cluster.addresses[1], before.link_address]
    with Pair(cluster.run) as pair, subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as flooder:
        try:
            assert flooder.stdout and flooder.stdout.readline() == "going\n"
            pair.more(100)
            during = watcher.status()
        finally:
            flooder.kill()
    assert during.resident_bytes < before.resident_bytes + MOST_GROWTH
    settle(lambda: watcher.status().sessions <= before.sessions, 30)
    settle(lambda: watcher.status().descriptors <= before.descriptors + 4, 30)
    assert watcher.status().threads <= before.threads + 4


def test_who_reads_nothing_is_not_kept_for_and_holds_up_nobody(cluster: Cluster, watcher: Raw) -> None:
    before = watcher.status()
    with Pair(cluster.run) as pair, open_doorbell(cluster.addresses[1], "reads-nothing") as (doorbell, _):
        doorbell.setblocking(False)
        sent, end = 0, time.monotonic() + 20
        with contextlib.suppress(BlockingIOError):
            while time.monotonic() < end:
                doorbell.send(messages.encode_release((1, 2, 3)))
                sent += 1
        assert sent < 100_000, "it is not held back"
        pair.more()
        assert watcher.status().resident_bytes < before.resident_bytes + MOST_GROWTH


def test_the_soft_limit_of_descriptors_is_raised(cluster: Cluster, watcher: Raw) -> None:
    limits = Path(f"/proc/{watcher.status().pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert int(line.split()[3]) == min(hard, 1 << 16)
