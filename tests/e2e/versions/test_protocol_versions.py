"""Clients, workers and coordinators of other versions of the protocol, beside those of this one."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.e2e.conftest import Cluster, Daemon

import collectived as cd
import collectived_proto
from collectived_proto.ipc import messages
from collectived_proto.report.findings import FindingKind, collect_findings
from collectived_proto.v1 import common_pb2, status_pb2, worker_pb2, worker_pb2_grpc
from collectived_proto.version import OUR_VERSIONS, VersionRange

PATIENCE = 10.0
# OpenSessionRequests as clients of the first protocol have sent them: that it is the first, and nothing at all.
RECORDED = bytes.fromhex("0a0b080110011a05302e312e30120168180722016c2a0876657273696f6e733001")
RECORDED_BARE = bytes.fromhex("12016818072a0876657273696f6e733001")


@pytest.fixture
def channel(one_worker: Any) -> Any:
    with grpc.insecure_channel(one_worker.addresses[0], [("grpc.use_local_subchannel_pool", 1)]) as found:
        yield found


def opened(channel: grpc.Channel, request: bytes) -> tuple[Any, worker_pb2.SessionOpened]:
    """The stream of a session that these bytes open, and what the worker says of it."""
    call: Any = channel.unary_stream("/collectived.v1.Worker/OpenSession")
    life = call(request, timeout=PATIENCE)
    return life, worker_pb2.SessionEvent.FromString(next(life)).opened


@pytest.mark.parametrize("request_bytes", [RECORDED, RECORDED_BARE], ids=["first", "silent"])
def test_a_client_of_the_first_protocol_is_served(channel: grpc.Channel, request_bytes: bytes) -> None:
    life, told = opened(channel, request_bytes)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as session:
        session.settimeout(PATIENCE)
        session.connect(told.door)
        session.send(b"CDL1" + told.token)  # a hello without versions
        assert messages.parse_type(session.recv(100)) is messages.MessageType.PONG
    life.cancel()


def test_a_client_of_no_version_that_the_worker_speaks_hears_which_of_the_two_is_to_be_upgraded(
    channel: grpc.Channel,
) -> None:
    future = common_pb2.Protocol(lowest=7, highest=9, release="9.9.9")
    with pytest.raises(grpc.RpcError) as error:
        opened(channel, worker_pb2.OpenSessionRequest(protocol=future).SerializeToString())
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.value.details() == (
        f"the client (release 9.9.9, protocol 7 to 9) and this worker ({OUR_VERSIONS}) have no "
        "version of the protocol in common: upgrade this worker to a release that speaks protocol 7"
    )


def test_status_tells_what_the_worker_and_its_clients_speak(channel: grpc.Channel) -> None:
    said = common_pb2.Protocol(lowest=1, highest=3, release="0.3.0")
    life, _ = opened(channel, worker_pb2.OpenSessionRequest(protocol=said, job="versions").SerializeToString())
    (worker,) = (
        worker_pb2_grpc.WorkerStub(channel).Status(status_pb2.StatusRequest(local_only=True), timeout=PATIENCE).workers
    )
    assert said in worker.clients and "0.3.0" in worker.client_releases
    assert VersionRange(worker.protocol.lowest, worker.protocol.highest, worker.protocol.release) == OUR_VERSIONS
    life.cancel()


# Daemons of another release: this one, but for what it says of itself.

Another = Callable[[int, int, str], tuple[str, ...]]


@pytest.fixture
def another(tmp_path: Path) -> Another:
    """A release that speaks these versions: what runs a daemon of it."""

    def made(lowest: int, highest: int, release: str) -> tuple[str, ...]:
        here, there = Path(collectived_proto.__file__).parent, tmp_path / release
        shutil.copytree(here, there / here.name, ignore=shutil.ignore_patterns("__pycache__"))
        file = there / here.name / "version.py"
        ours = "OUR_VERSIONS = VersionRange(1, 1, RELEASE)"
        assert ours in file.read_text()
        theirs = f'OUR_VERSIONS = VersionRange({lowest}, {highest}, "{release}")'
        file.write_text(file.read_text().replace(ours, theirs))
        return "env", f"PYTHONPATH={there}"

    return made


@contextlib.contextmanager
def started(*arguments: str, within: tuple[str, ...]) -> Iterator[Daemon]:
    daemon = Daemon(*arguments, within=within)
    try:
        yield daemon
    finally:
        daemon.close()


def test_ranks_meet_on_workers_of_neighbouring_releases_and_status_tells_of_them(another: Another) -> None:
    cluster = Cluster(1)
    worker = ("worker", "--task", "1", "--folder", str(cluster.folder), "--coordinator", cluster.coordinator_address)
    try:
        with started(*worker, within=another(1, 2, "0.2.0")) as newer:
            cluster.addresses.append(str(newer.wait_ready()["address"]))
            assert cluster.run(2, lambda group: group.all_reduce("sum", group.rank + 1)) == [3, 3]
            (told,) = [one for one in collect_findings(cluster.status()) if one.kind is FindingKind.VERSIONS]
    finally:
        cluster.close()
    assert told.sentence.startswith(f"releases differ: {OUR_VERSIONS.release} (protocol 1): the coordinator, worker 0")
    assert "; 0.2.0 (protocol 1 to 2): worker 1" in told.sentence


def test_a_worker_whose_coordinator_speaks_no_version_of_its_own_does_not_start_and_says_which_is_older(
    another: Another,
) -> None:
    cluster = Cluster(0)
    worker = ("worker", "--task", "0", "--folder", str(cluster.folder), "--coordinator", cluster.coordinator_address)
    try:
        with (
            started(*worker, within=another(2, 3, "0.3.0")) as newer,
            pytest.raises(cd.errors.UnavailableError) as error,
        ):
            newer.wait_ready()
    finally:
        cluster.close()
    assert "worker 0 (release 0.3.0, protocol 2 to 3) and this coordinator" in str(error.value)
    assert "upgrade this coordinator to a release that speaks protocol 2" in str(error.value)


def test_a_client_whose_worker_speaks_no_version_of_its_own_gets_a_typed_error(another: Another) -> None:
    release = another(2, 3, "0.3.0")
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as folder:
        coordinator = f"unix:{folder}/c.sock"
        worker = ("worker", "--task", "0", "--folder", folder, "--coordinator", coordinator)
        with started("coordinator", "--listen", coordinator, within=release) as first:
            first.wait_ready()
            with (
                started(*worker, within=release) as second,
                pytest.raises(cd.errors.FailedPreconditionError, match="upgrade the client to a release that speaks"),
            ):
                cd.connect(str(second.wait_ready()["address"]))


def test_a_rank_whose_worker_could_not_talk_to_that_of_one_who_waits_gets_a_typed_error(another: Another) -> None:
    newer, between = another(2, 3, "0.3.0"), another(1, 3, "0.2.9")
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as folder:
        coordinator = f"unix:{folder}/c.sock"
        worker = ("worker", "--folder", folder, "--coordinator", coordinator, "--task")
        with contextlib.ExitStack() as daemons:
            daemons.enter_context(started("coordinator", "--listen", coordinator, within=between)).wait_ready()
            one = daemons.enter_context(started(*worker, "0", within=())).wait_ready()
            other = daemons.enter_context(started(*worker, "1", within=newer)).wait_ready()
            with grpc.insecure_channel(str(other["address"])) as channel, cd.connect(str(one["address"])) as session:
                said = common_pb2.Protocol(lowest=2, highest=2)
                life, told = opened(channel, worker_pb2.OpenSessionRequest(protocol=said).SerializeToString())
                request = worker_pb2.JoinRequest(session=told.session, name="/both", min_size=2, max_size=2)
                joining = worker_pb2_grpc.WorkerStub(channel).Join(request, timeout=PATIENCE)
                next(joining)  # it waits
                with pytest.raises(cd.errors.FailedPreconditionError) as error:
                    session.join("/both", 2, timeout=PATIENCE)
                joining.cancel()
                life.cancel()
    assert str(error.value) == (
        f"worker 0 ({OUR_VERSIONS}) and worker 1 (release 0.3.0, protocol 2 to 3) have no "
        "version of the protocol in common: upgrade worker 0 to a release that speaks protocol 2"
    )
