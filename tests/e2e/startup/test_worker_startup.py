"""The worker process: how it starts, and how it says that it cannot."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from collectived_proto.v1 import common_pb2, coordinator_pb2, coordinator_pb2_grpc
from collectived_runtime.auth.peers import set_socket_mode
from collectived_runtime.worker.devices import default_memory_limit

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose name is short enough for sockets, empty at the end."""
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as name:
        yield Path(name)
        assert os.listdir(name) == []


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts daemons with the secret of these tests; ends those that still run."""
    started: list[subprocess.Popen[str]] = []

    def one(*arguments: str, secret: str = "ours, of these tests") -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "collectived_runtime", *arguments, "--attached"]
        daemon = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        started.append(daemon)
        assert daemon.stdin
        daemon.stdin.write(secret + "\n")
        daemon.stdin.flush()
        return daemon

    yield one
    for daemon in started:
        daemon.communicate(timeout=20)


def worker(folder: Path, coordinator: str, *more: str) -> tuple[str, ...]:
    return ("worker", "--task", "0", "--folder", str(folder), "--coordinator", coordinator, "--patience", "2", *more)


def ready(daemon: subprocess.Popen[str]) -> str:
    assert daemon.stdout
    return daemon.stdout.readline()


def refusal(daemon: subprocess.Popen[str], status: int = 1) -> str:
    """The one line with which it ended."""
    out, err = daemon.communicate(timeout=20)
    assert (daemon.returncode, out) == (status, "")
    assert err.count("\n") == 1, err
    return err


def test_a_coordinator_that_is_not_there_is_named(folder: Path, start: Start) -> None:
    said = refusal(start(*worker(folder, f"unix:{folder}/nobody.sock")), status=3)
    assert f"the coordinator at unix:{folder}/nobody.sock did not answer within 2 s" in said


def test_a_coordinator_that_refuses_is_quoted(folder: Path, start: Start) -> None:
    coordinator = start("coordinator", "--listen", "127.0.0.1:0")
    address = ready(coordinator).split('"address": "')[1].split('"')[0]
    said = refusal(start(*worker(folder, address), secret="another one than ours"), status=3)
    assert f"the coordinator at {address} refuses this worker" in said and "secret" in said


class Stranger(coordinator_pb2_grpc.CoordinatorServicer):
    """A coordinator that speaks other versions: it turns workers away, or welcomes them and says so."""

    def __init__(self, welcoming: bool) -> None:
        self.welcoming = welcoming

    def Attach(self, requests: Any, context: grpc.ServicerContext) -> Iterator[coordinator_pb2.CoordinatorMessage]:
        next(requests)
        if not self.welcoming:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "upgrade worker 0")
        protocol = common_pb2.Protocol(lowest=7, highest=9, release="9.9.9")
        yield coordinator_pb2.CoordinatorMessage(welcome=coordinator_pb2.Welcome(epoch=1, protocol=protocol))
        for _ in requests:
            pass


@pytest.mark.parametrize(
    ("welcoming", "told"),
    [
        (False, "the coordinator at {} refuses this worker: upgrade worker 0\n"),
        (True, "the coordinator at {} (release 9.9.9, protocol 7 to 9) and this worker ("),
    ],
)
def test_a_coordinator_of_no_version_that_the_worker_speaks_ends_its_start_and_says_why(
    tmp_path: Path, folder: Path, start: Start, welcoming: bool, told: str
) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(Stranger(welcoming), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        said = refusal(start(*worker(folder, address)))
        assert said.startswith(f"collectived worker 0: {told.format(address)}")
    finally:
        server.stop(None).wait()


def test_a_proxy_for_the_world_outside_is_not_asked_for_the_coordinator(
    folder: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    coordinator = start("coordinator", "--listen", "127.0.0.1:0")
    address = ready(coordinator).split('"address": "')[1].split('"')[0]
    daemon = start(*worker(folder, address))
    assert ready(daemon).startswith("ready ")
    for one in (daemon, coordinator):
        one.terminate()
        assert one.wait(20) == 0


def test_nobody_serves_other_hosts_without_a_secret(folder: Path, start: Start) -> None:
    exposed = "0.0.0.0:0 can be reached from other hosts, and this job has no secret"
    assert exposed in refusal(start(*worker(folder, "unix:/nowhere", "--link-listen", "0.0.0.0:0"), secret=""))
    assert exposed in refusal(start("coordinator", "--listen", "0.0.0.0:0", secret=""))


def test_a_port_in_use_is_named(folder: Path, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        said = refusal(start(*worker(folder, "unix:/nowhere", "--link-listen", address)))
    assert f"cannot listen for links at {address}" in said and "in use" in said


def test_where_metrics_cannot_be_served_it_does_not_start_and_leaves_nothing(folder: Path, start: Start) -> None:
    coordinator = start("coordinator", "--listen", "127.0.0.1:0", "--metrics", "0")
    told = json.loads(ready(coordinator).removeprefix("ready "))
    taken = told["metrics"]
    said = refusal(start(*worker(folder, told["address"], "--metrics", taken)))
    assert f"--metrics: cannot serve at {taken}" in said and "in use" in said
    wrong = start(*worker(folder, told["address"], "--metrics", "here"))
    out, err = wrong.communicate(timeout=20)
    assert (wrong.returncode, out) == (2, "") and "worker.metrics, from --metrics: 'here' is not a port" in err
    said = refusal(start("coordinator", "--listen", f"unix:{folder}/c.sock", "--metrics", taken))
    assert f"collectived coordinator: --metrics: cannot serve at {taken}" in said


def test_a_folder_that_is_too_deep_for_sockets_is_an_error(folder: Path, start: Start) -> None:
    deep = folder / ("x" * 100)
    said = refusal(start(*worker(deep, "unix:/nowhere")))
    assert "the kernel allows 107" in said
    deep.rmdir()


def test_a_worker_starts_again_where_a_killed_one_left_its_sockets_and_not_beside_a_living_one(
    folder: Path, start: Start
) -> None:
    coordinator = start("coordinator", "--listen", f"unix:{folder}/c.sock")
    assert ready(coordinator).startswith("ready ")
    first = start(*worker(folder, f"unix:{folder}/c.sock"))
    assert ready(first).startswith("ready ")
    assert "another worker does" in refusal(start(*worker(folder, f"unix:{folder}/c.sock")))
    first.kill()
    first.communicate()
    assert sorted(path.name for path in folder.iterdir()) == ["c.sock", "door-0.sock", "worker-0.sock"]
    second = start(*worker(folder, f"unix:{folder}/c.sock"))
    assert ready(second).startswith("ready ")
    for daemon in (second, coordinator):
        daemon.terminate()
        assert daemon.wait(20) == 0


def addresses(daemon: subprocess.Popen[str]) -> list[str]:
    """Where it serves, by its own word."""
    found: list[str] = json.loads(ready(daemon).removeprefix("ready "))["addresses"]
    return found


@pytest.mark.parametrize(
    ("options", "served"),
    [
        ([], ["unix:{folder}/worker-0.sock"]),
        (["--listen", "unix:{folder}/mine"], ["unix:{folder}/mine"]),
        (["--listen", "localhost:0"], ["unix:{folder}/worker-0.sock", "localhost:"]),
        (["--listen", ":0"], ["unix:{folder}/worker-0.sock", "127.0.0.1:"]),
        (["--listen", "localhost:0", "--listen", "unix:{folder}/mine"], ["unix:{folder}/mine", "localhost:"]),
    ],
)
def test_a_worker_serves_at_its_socket_and_where_else_it_is_told(
    folder: Path, start: Start, options: list[str], served: list[str]
) -> None:
    coordinator = start("coordinator", "--listen", f"unix:{folder}/c.sock")
    assert ready(coordinator).startswith("ready ")
    told = [option.format(folder=folder) for option in options]
    daemon = start(*worker(folder, f"unix:{folder}/c.sock", *told))
    found = addresses(daemon)
    assert len(found) == len(served)
    for address, expected in zip(found, served, strict=True):
        if expected.endswith(":"):
            host, _, port = address.rpartition(":")
            assert f"{host}:" == expected and int(port) > 0
        else:
            assert address == expected.format(folder=folder)
    for one in (daemon, coordinator):
        one.terminate()
        assert one.wait(20) == 0


def test_where_a_tcp_address_cannot_be_had_no_socket_is_left(folder: Path, start: Start) -> None:
    coordinator = start("coordinator", "--listen", f"unix:{folder}/c.sock")
    assert ready(coordinator).startswith("ready ")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        said = refusal(start(*worker(folder, f"unix:{folder}/c.sock", "--listen", address)))
    assert f"cannot listen at {address}: address already in use" in said
    assert [path.name for path in folder.iterdir()] == ["c.sock"]
    coordinator.terminate()
    assert coordinator.wait(20) == 0


def test_two_unix_sockets_are_one_too_many(folder: Path, start: Start) -> None:
    said = refusal(start(*worker(folder, "unix:/nowhere", "--listen", "unix:/a", "--listen", "unix:/b")))
    assert "a worker serves at one Unix socket, got unix:/a and unix:/b" in said


def test_a_worker_that_brings_no_number_is_given_its_hosts(folder: Path, start: Start) -> None:
    serving = ("coordinator", "--listen", f"unix:{folder}/c.sock", "--journal", f"{folder}/epoch")
    coordinator = start(*serving)
    assert ready(coordinator).startswith("ready ")
    there = ("worker", "--folder", str(folder), "--coordinator", f"unix:{folder}/c.sock", "--host-name")
    for host, task in (("a", 0), ("b", 1), ("a", 0)):
        daemon = start(*there, host)
        assert json.loads(ready(daemon).removeprefix("ready "))["task"] == task
        daemon.terminate()
        assert daemon.wait(20) == 0
    coordinator.terminate()
    assert coordinator.wait(20) == 0
    assert json.loads((folder / "epoch.workers").read_text()) == {"a": 0, "b": 1}
    for left in ("epoch", "epoch.workers"):
        (folder / left).unlink()


def test_a_worker_without_number_names_a_coordinator_that_is_not_there_or_refuses(folder: Path, start: Start) -> None:
    there = ("worker", "--folder", str(folder), "--patience", "0.5", "--coordinator")
    said = refusal(start(*there, f"unix:{folder}/nobody.sock"), status=3)
    assert f"collectived worker: the coordinator at unix:{folder}/nobody.sock did not answer within 0.5 s" in said
    coordinator = start("coordinator", "--listen", "127.0.0.1:0")
    address = ready(coordinator).split('"address": "')[1].split('"')[0]
    said = refusal(start(*there, address, "--patience", "20", secret="another one than ours"), status=3)
    assert f"the coordinator at {address} refuses this worker" in said and "secret" in said


@pytest.mark.parametrize(
    ("mode", "sockets"), [(0o700, 0o600), (0o750, 0o660), (0o2770, 0o660), (0o755, 0o600), (0o777, 0o600)]
)
def test_a_socket_lets_those_in_whom_its_folder_lets_in_and_never_everybody(
    folder: Path, mode: int, sockets: int
) -> None:
    folder.chmod(mode)
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        set_socket_mode(str(path))
        assert stat.S_IMODE(path.stat().st_mode) == sockets
    path.unlink()


CLIENT = """
import os, sys
import collectived as cd
def work():
    with cd.connect(sys.argv[1]) as session, session.join("alone", 1) as group:
        return session.transport, group.all_reduce("sum", 21.0) * 2
work()  # Python and what it imports may lie where others may not look
os.setgroups([int(sys.argv[2])])
os.setgid(54320)
os.setuid(54320)
print(*work())
"""


@pytest.mark.timeout(120)
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_comes_in_by_the_group_of_a_shared_folder_and_only_so(folder: Path, start: Start) -> None:
    coordinator = start("coordinator", "--listen", f"unix:{folder}/c.sock")
    assert ready(coordinator).startswith("ready ")
    shared = folder / "run"
    shared.mkdir()
    os.chown(shared, -1, 54321)
    shared.chmod(0o2750)
    folder.chmod(0o711)
    daemon = start(*worker(shared, f"unix:{folder}/c.sock"))
    address = addresses(daemon)[0]
    assert {stat.S_IMODE(path.stat().st_mode) for path in shared.iterdir()} == {0o660}
    assert stat.S_IMODE((folder / "c.sock").stat().st_mode) == 0o600
    for group, says in ((54321, "shared memory 42.0"), (54322, "Permission denied")):
        command = [sys.executable, "-c", CLIENT, address, str(group)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50)
        assert says in done.stdout + done.stderr
    for one in (daemon, coordinator):
        one.terminate()
        assert one.wait(20) == 0
    shared.rmdir()


def test_the_memory_limit_is_half_of_the_least_that_a_cgroup_above_has(tmp_path: Path) -> None:
    own = tmp_path / "own"
    machine = default_memory_limit(tmp_path / "none", own)
    unit = tmp_path / "cgroup" / "system.slice" / "worker.service"
    unit.mkdir(parents=True)
    own.write_text("0::/system.slice/worker.service\n")
    assert default_memory_limit(tmp_path / "cgroup", own) == machine
    (unit / "memory.max").write_text("4096\n")
    (unit.parent / "memory.max").write_text("max\n")
    assert default_memory_limit(tmp_path / "cgroup", own) == 2048
    (unit.parent / "memory.max").write_text("1024\n")
    assert default_memory_limit(tmp_path / "cgroup", own) == 512
    own.write_text("0::/\n")
    (tmp_path / "cgroup" / "memory.max").write_text("512\n")
    assert default_memory_limit(tmp_path / "cgroup", own) == 256
