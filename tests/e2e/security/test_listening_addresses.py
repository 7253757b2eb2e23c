"""As etcd, torch and NCCL RAS have it: only what was asked for listens, on the loopback, and plain text from elsewhere
is refused. Each daemon says where it listens; the kernel says whether that is all."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.e2e.security.conftest import ROOT, SECRET, Place, Start

import collectived as cd
from collectived_proto.v1 import common_pb2, coordinator_pb2_grpc, status_pb2, worker_pb2, worker_pb2_grpc

Worker = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.timeout(150)
_LISTEN = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """(address, port) of all TCP sockets with which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(re.sub(r"socket:\[(\d+)\]", r"\1", os.readlink(descriptor)))
        except OSError:
            continue
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        table = Path(f"/proc/{pid}/net/{name}")
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            words = line.split()
            if words[3] == _LISTEN and words[9] in inodes:
                where, port = words[1].split(":")
                raw = bytes.fromhex(where)
                packed = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                # gRPC listens at addresses of version 4 by sockets of version 6.
                found.add((socket.inet_ntop(family, packed).removeprefix("::ffff:"), int(port, 16)))
    return found


def told(*addresses: str) -> set[tuple[str, int]]:
    """The same as daemons announce it, of those that are no Unix sockets."""
    pairs = [address.removeprefix("http://").strip("/").rpartition(":") for address in addresses if address]
    return {(host.strip("[]"), int(port)) for host, _, port in pairs if host != "unix" and not host.startswith("unix:")}


@pytest.mark.parametrize(
    "options", [(), ("--listen", ":0"), ("--metrics", "0"), ("--listen", "127.0.0.2:0", "--metrics", "127.0.0.3:0")]
)
def test_a_worker_listens_where_it_says_and_nowhere_else(worker: Worker, options: tuple[str, ...]) -> None:
    said = worker(*options)
    there = listening(said["pid"])
    assert there == told(said["link_address"], said["metrics"], *said["addresses"])
    assert len(there) == 1 + len(options) // 2 and all(host.startswith("127.") for host, _ in there)


def test_workers_whose_links_use_ipv6_serve_a_group_together(place: Place) -> None:
    both = [place.worker("--link-listen", "[::1]:0", task=task) for task in range(2)]
    for said in both:
        assert said["link_address"].startswith("[::1]:") and listening(said["pid"]) == told(said["link_address"])

    def collective(rank: int) -> float:
        with cd.connect(both[rank]["address"]) as session, session.join("both", 2, rank=rank) as group:
            return float(group.all_reduce("sum", 21.0))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(collective, range(2))) == [42.0, 42.0]


@pytest.mark.parametrize(
    "options", [(), ("--http", "0"), ("--metrics", "0"), ("--listen", "127.0.0.2:0", "--metrics", "0", "--http", "0")]
)
def test_a_coordinator_listens_where_it_says_and_nowhere_else(
    folder: Path, start: Start, options: tuple[str, ...]
) -> None:
    said = start("coordinator", "--listen", f"unix:{folder}/c.sock", *options).wait_ready(30)
    there = listening(said["pid"])
    assert there == told(said["metrics"], (said["page"] or {}).get("url", ""), *said["addresses"])
    assert len(there) == len(options) // 2 and all(host.startswith("127.") for host, _ in there)


def test_a_job_of_launch_listens_on_the_loopback_alone(folder: Path) -> None:
    """Its daemons and clients; as a rank of it sees them."""
    program = folder / "look.py"
    program.write_text(
        textwrap.dedent("""
        import json, os
        from pathlib import Path
        from tests.e2e.security.test_listening_addresses import listening
        import collectived as cd
        def family():
            parents = {}
            for one in Path("/proc").glob("[0-9]*"):
                try:
                    parents[int(one.name)] = int((one / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:
                    continue  # it has ended
            known = {os.getppid()}
            while more := {pid for pid, parent in parents.items() if parent in known} - known:
                known |= more
            return known
        with cd.connect() as session, session.join() as group:
            group.barrier()
            if not group.rank:
                print(json.dumps({pid: sorted(listening(pid)) for pid in family()}))
            group.barrier()
        """)
    )
    command = [sys.executable, "-m", "collectived_launcher", "launch", "--workers", "2", "--metrics", "--http", "0"]
    done = subprocess.run(
        [*command, "--", sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert not done.returncode, done.stderr
    line = next(line for line in done.stdout.splitlines() if "{" in line)
    found = {int(pid): where for pid, where in json.loads(line[line.index("{") :]).items()}
    there = [host for where in found.values() for host, _ in where]
    assert len([where for where in found.values() if where]) >= 3  # two workers with links, and a coordinator
    assert set(there) == {"127.0.0.1"}


def test_daemons_of_up_listen_on_the_loopback_alone_where_their_cluster_is_one_host(folder: Path) -> None:
    (folder / "lab.toml").write_text('hosts = ["localhost:2"]\n')
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}

    def do(*words: str) -> None:
        command = [sys.executable, "-m", "collectived_launcher", *words]
        subprocess.run(command, env=environment, cwd=folder, capture_output=True, timeout=100, check=True)

    do("up", "lab.toml")
    try:
        known = json.loads((folder / "collectived/lab/supervisor.json").read_text())
        there = {name: listening(int(daemon["pid"])) for name, daemon in known["daemons"].items()}
    finally:
        do("down", "lab.toml")
    assert sum(bool(where) for where in there.values()) == 1 and len(there) == 2  # the worker, for links
    assert {host for where in there.values() for host, _ in where} == {"127.0.0.1"}


def own_address() -> str:
    """An address of this host that is not of the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it asks for the way
        except OSError:
            pytest.skip("this host has no address but the loopback's")
        found = str(probe.getsockname()[0])
    if found.startswith("127."):
        pytest.skip("this host has no address but the loopback's")
    return found


def test_without_flags_nobody_gets_a_connection_from_elsewhere(worker: Worker) -> None:
    address, said = own_address(), worker("--listen", ":0", "--metrics", "0")
    for _, port in listening(said["pid"]):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), 5)


@pytest.mark.parametrize("kind", ["coordinator", "worker"])
def test_what_can_be_reached_from_elsewhere_does_not_start_without_a_secret(
    folder: Path, start: Start, kind: str, place: Place
) -> None:
    words = {
        "coordinator": ("coordinator", "--listen", "0.0.0.0:0"),
        "worker": ("worker", "--task", "0", "--folder", str(folder / "w"), "--coordinator", place.coordinator)
        + ("--listen", "0.0.0.0:0"),
    }[kind]
    daemon = start(*words, secret="")
    assert daemon.process.wait(30) == 1
    daemon.close()
    assert "can be reached from other hosts, and this job has no secret" in daemon.log and "--insecure" in daemon.log


@pytest.mark.parametrize("shown", [(), (("authorization", "Bearer wrong"),), (("authorization", SECRET),)])
def test_a_token_is_required_by_default_of_every_call_in_plain_text_from_elsewhere(
    start: Start, worker: Worker, shown: tuple[tuple[str, str], ...]
) -> None:
    """As Ray does since 2.52, but without being asked to."""
    there = own_address()
    said = worker("--listen", f"{there}:0")
    other = start("coordinator", "--listen", f"{there}:0").wait_ready(30)["address"]
    opening = worker_pb2.OpenSessionRequest(protocol=common_pb2.Protocol(lowest=1, highest=1))
    how: dict[str, Any] = {"timeout": 10, "metadata": shown}
    with grpc.insecure_channel(said["addresses"][-1]) as one, grpc.insecure_channel(other) as two:
        stub, mind = worker_pb2_grpc.WorkerStub(one), coordinator_pb2_grpc.CoordinatorStub(two)
        refused(
            [
                lambda: next(stub.OpenSession(opening, **how)),
                lambda: stub.Status(status_pb2.StatusRequest(), **how),
                lambda: stub.Prepare(worker_pb2.PrepareRequest(), **how),
                lambda: stub.Drain(status_pb2.DrainRequest(), **how),
                lambda: list(stub.Submit(iter(()), **how)),
                lambda: mind.Status(status_pb2.StatusRequest(), **how),
                lambda: list(mind.Attach(iter(()), **how)),
                lambda: mind.Drain(status_pb2.DrainRequest(), **how),
            ]
        )
        right = (("authorization", f"Bearer {SECRET}"),)
        assert mind.Status(status_pb2.StatusRequest(), timeout=10, metadata=right).answered_by == "coordinator"


def test_to_let_everybody_in_is_said_in_log_and_status(folder: Path, start: Start) -> None:
    mind = start("coordinator", "--listen", "0.0.0.0:0", "--insecure", secret="")
    there = mind.wait_ready(30)["address"].replace("0.0.0.0", "127.0.0.1")
    words = ("worker", "--task", "0", "--folder", str(folder / "w"), "--coordinator", there, "--listen", "0.0.0.0:0")
    worker = start(*words, "--insecure", secret="")
    address = worker.wait_ready(30)["addresses"][-1].replace("0.0.0.0", "127.0.0.1")
    command = [sys.executable, "-m", "collectived_launcher", "status", "--worker", address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    told = " ".join(shown.split())
    assert "INSECURE" in told and "the coordinator, worker 0 (host" in told
    assert "any process that can connect to them may do all (--insecure)" in told
    for daemon in (worker, mind):
        daemon.close()
        assert "--insecure: any process that can connect to this daemon may do all" in daemon.log


def refused(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        with pytest.raises(grpc.RpcError) as error:
            call()
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert SECRET not in str(error.value.details())


def test_no_daemon_offers_reflection_unless_it_is_told_to(worker: Worker) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    for options, code in (((), grpc.StatusCode.UNIMPLEMENTED), (("--reflection",), None)):
        with grpc.insecure_channel(worker(*options, task=len(options))["address"]) as channel:
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]), timeout=10)
            if code is None:
                assert next(call).list_services_response.service
                continue
            with pytest.raises(grpc.RpcError) as error:
                next(call)
            assert error.value.code() is code


def test_a_machine_that_has_ss_shows_the_same(worker: Worker) -> None:
    if not shutil.which("ss"):
        pytest.skip("ss (iproute2) is not installed")
    said = worker("--listen", ":0")
    shown = subprocess.run(["ss", "-lntH"], capture_output=True, text=True, check=True).stdout
    shown = shown.replace("[::ffff:127.0.0.1]", "127.0.0.1")
    lines = {tuple(line.split()[3].rsplit(":", 1)) for line in shown.splitlines()}
    assert {(host, str(port)) for host, port in listening(said["pid"])} <= lines
