"""Real daemons on this machine, and clients as threads or as processes of their own."""

from __future__ import annotations

import copy
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.forked_daemon import ForkedDaemon
from tests.forked_process import ForkedProcess, fork_server
from tests.waiting import settle

import collectived as cd
from collectived_proto.v1 import status_pb2, worker_pb2_grpc

_names = itertools.count()
OVER_BOTH = (  # whose tests run over every transport
    "test_collective_results.py",
    "test_cross_device_ops.py",
    "test_replicas.py",
    "test_sessions_of_several_workers.py",
    "test_typed_errors.py",
    "test_session_close.py",
    "test_own_worker_stopped_or_killed.py",
    "test_interrupt_and_abort.py",
)
ALONE = (
    "test_typed_errors.py",
    "test_own_worker_stopped_or_killed.py",
    "test_trace_of_daemons.py",
)  # stop daemons, or count all that they hold
TRANSPORTS = ("shared memory", "grpc")
SECRET = "the-secret-of-these-tests"
WARM = ("collectived", "collectived.connection.rpc", "collectived.shared.segment_channel")  # imported by every client


@pytest.hookimpl(tryfirst=True)  # a test has the same name whether it runs with others or is asked again alone
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.path.name in OVER_BOTH:
        metafunc.parametrize("transport", TRANSPORTS, indirect=True)


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How clients of this test reach their workers: "" for whatever they would choose."""
    name: str = getattr(request, "param", "")
    if name == "grpc":
        monkeypatch.setenv("COLLECTIVED_TRANSPORT", name)
    return name


class Daemon(ForkedDaemon):
    """A coordinator or a worker of these tests, ended by the end of its standard input."""

    def __init__(self, *arguments: str, within: tuple[str, ...] = ()) -> None:
        self.arguments = arguments
        super().__init__([*arguments, "--job", "test"], SECRET, within)

    def wait_ready(self, timeout: float = 30.0) -> dict[str, Any]:
        return super().wait_ready(timeout)


class Cluster:
    """A coordinator and some workers on this machine, as if each were a host of its own."""

    def __init__(
        self,
        workers: int,
        hosts: tuple[tuple[str, str], ...] = (),
        options: tuple[str, ...] = (),
        through: Callable[[str], str] = str,
        worker_options: tuple[str, ...] = (),
    ) -> None:
        """
        hosts: for each worker the network namespace in which it runs and its address there.
        options: of the coordinator. worker_options: of every worker.
        through: from the coordinator's address to the one at which the workers find it.
        """
        self._closed = False
        self.folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
        self.coordinator = Daemon("coordinator", "--listen", f"unix:{self.folder}/c.sock", *options)
        announced = self.coordinator.wait_ready()
        self.coordinator_address = str(announced["address"])
        self._seen_at = through(self.coordinator_address)
        self._hosts, self._worker_options = hosts, worker_options
        self.workers: list[Daemon] = []
        self.metrics = [str(announced["metrics"])]  # and of each worker; "" where they are not asked for
        self.addresses: list[str] = []
        self.tcp_addresses: list[str] = []  # the same where they listen at no other
        self.grow(workers)

    def grow(self, workers: int) -> None:
        """Starts those that it lacks of so many."""
        for task in range(len(self.workers), workers):
            namespace, address = self._hosts[task] if self._hosts else ("", "127.0.0.1")
            self.workers.append(
                Daemon(
                    *("worker", "--task", str(task), "--folder", str(self.folder), "--host-name", f"host{task}"),
                    *("--coordinator", self._seen_at, "--link-listen", f"{address}:0", *self._worker_options),
                    within=("ip", "netns", "exec", namespace) if namespace else (),
                )
            )
        for worker in self.workers[len(self.addresses) :]:
            served = worker.wait_ready()
            self.metrics.append(str(served["metrics"]))
            self.addresses.append(str(served["address"]))
            self.tcp_addresses.append(str(served["addresses"][-1]))

    def first(self, workers: int) -> Cluster:
        """The same with its first workers alone: ranks are spread over these, and who uses it closes nothing."""
        few = copy.copy(self)
        few.workers, few.metrics = self.workers[:workers], self.metrics[: workers + 1]
        few.addresses, few.tcp_addresses = self.addresses[:workers], self.tcp_addresses[:workers]
        return few

    def quiet(self) -> bool:
        """Whether its daemons live, and nobody has left anything in them: no session, no group that goes on."""
        if any(daemon.process.poll() is not None for daemon in (self.coordinator, *self.workers)):
            return False

        def empty() -> bool:
            told = self.status()
            return all(group.state == "ended" for group in told.groups) and not any(
                row.sessions for row in told.workers
            )

        try:
            return settle(empty, 5)
        except (AssertionError, grpc.RpcError):
            return False

    @property
    def log(self) -> str:
        return "".join(daemon.log for daemon in (self.coordinator, *self.workers))

    def address_of(self, rank: int, size: int) -> str:
        """Ranks are spread over the workers in blocks."""
        per_worker = -(-size // len(self.addresses))
        return self.addresses[rank // per_worker]

    def status(self) -> status_pb2.StatusReply:
        """What the first worker tells, asked as anybody may."""
        with grpc.insecure_channel(self.addresses[0]) as channel:
            reply: status_pb2.StatusReply = worker_pb2_grpc.WorkerStub(channel).Status(status_pb2.StatusRequest())
        return reply

    def await_arrivals(self, group: cd.Group, count: int) -> None:
        """Waits until so many ranks are known to wait in a collective of a group.

        Of the first two ranks that come and differ nobody knows which one differs from most: that one is to come last.
        """
        settle(
            lambda: any(
                len(one.arrived) >= count
                for known in self.status().groups
                if known.generation == group.generation
                for one in known.in_flight
            )
        )

    def run(self, size: int, body: Callable[[cd.Group], Any], **options: Any) -> list[Any]:
        """Runs `body(group)` as every rank of a new group, each in a thread and session of its own; results by rank."""
        return self.run_sessions(size, lambda _, group: body(group), **options)

    def run_sessions(
        self, size: int, body: Callable[[cd.Session, cd.Group], Any], name: str = "", **options: Any
    ) -> list[Any]:
        """The same with `body(session, group)`, and a name of the group if it matters."""
        name = name or f"group-{next(_names)}"

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
            error.add_note(f"the daemons said:\n{self.log}")
            raise

    def client(self, rank: int, size: int, group: str, program: str) -> ForkedProcess:
        """Starts a client process as that rank of a group; it prints, and its standard input is ours."""
        return fork_server(*WARM).start(program, self._environment(rank, size, group))

    def fresh_client(self, rank: int, size: int, group: str, program: str) -> subprocess.Popen[str]:
        """The same where nothing may be imported before the program, or lie below it on its stack."""
        return subprocess.Popen(
            [sys.executable, "-u", "-c", program],
            env=self._environment(rank, size, group),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _environment(self, rank: int, size: int, group: str) -> dict[str, str]:
        return {
            **os.environ,
            "COLLECTIVED_WORKER": self.address_of(rank, size),
            "COLLECTIVED_GROUP": group,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def close(self) -> None:
        """Ends the daemons in order, once; afterwards `log` is all that they ever said."""
        if self._closed:
            return
        self._closed = True
        try:
            for daemon in (*self.workers, self.coordinator):
                daemon.close()
            left = sorted(path.name for path in self.folder.iterdir())
            assert left == [], f"daemons left files behind: {left}"
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def make_cluster() -> Iterator[Callable[..., Cluster]]:
    """Makes clusters of a special kind, and closes them."""
    made: list[Cluster] = []

    def make(*arguments: Any, **options: Any) -> Cluster:
        made.append(Cluster(*arguments, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture(scope="session")
def kept() -> Iterator[list[Cluster]]:
    """The cluster that one file leaves to the next; none where there is none yet."""
    clusters: list[Cluster] = []
    yield clusters
    for cluster in clusters:
        cluster.close()


@pytest.fixture(scope="module")
def grown(request: pytest.FixtureRequest, kept: list[Cluster]) -> Iterator[Callable[[int], Cluster]]:
    """So many workers, for tests that need groups of their own and not daemons of their own.

    Files share them, one after the other; those that do their worst to daemons have their own. After a file in which a
    test failed, or which left anything behind, the next one starts with fresh ones.
    """
    clusters = [] if request.path.name in ALONE else kept
    failed = request.session.testsfailed

    def first(workers: int) -> Cluster:
        if not clusters:
            clusters.append(Cluster(0))
        clusters[0].grow(workers)
        return clusters[0].first(workers)

    yield first
    if clusters and (clusters is not kept or request.session.testsfailed > failed or not clusters[0].quiet()):
        clusters.pop().close()


@pytest.fixture(scope="module")
def one_worker(grown: Callable[[int], Cluster]) -> Cluster:
    return grown(1)


@pytest.fixture(scope="module")
def two_workers(grown: Callable[[int], Cluster]) -> Cluster:
    return grown(2)


@pytest.fixture(scope="module")
def three_workers(grown: Callable[[int], Cluster]) -> Cluster:
    return grown(3)


@pytest.fixture(scope="module")
def four_workers(grown: Callable[[int], Cluster]) -> Cluster:
    return grown(4)


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda count: f"{count} workers")
def any_workers(request: pytest.FixtureRequest) -> Cluster:
    names = {1: "one_worker", 2: "two_workers", 3: "three_workers", 4: "four_workers"}
    cluster: Cluster = request.getfixturevalue(names[request.param])
    return cluster
