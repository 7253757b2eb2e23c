"""Ranks that reach their worker by gRPC alone, through the client library."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.docs.blocks import claimed, of_language
from tests.waiting import settle

import collectived as cd

ROOT = Path(__file__).parents[3]

_names = itertools.count()
_environment = threading.Lock()


def each(one: Callable[[int], Any], size: int) -> list[Any]:
    """What `one(rank)` returns for each rank, all at the same time."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def connected(address: str, over: str) -> cd.Session:
    """A session by that transport; the environment is read when it is made, by one thread at a time."""
    with _environment, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLECTIVED_TRANSPORT", "grpc" if over == "grpc" else "")
        session = cd.connect(address)
    assert session.transport == over
    return session


def test_doorbells_and_grpc_meet_in_one_group(two_workers: Any) -> None:
    name = f"mixed-{next(_names)}"

    def one(rank: int) -> Any:
        over = "grpc" if rank % 2 else "shared memory"
        with connected(two_workers.addresses[rank // 2], over) as session, session.join(name, 4, rank=rank) as group:
            array = session.empty(1000, np.float32)
            array[:] = rank
            return (
                group.all_reduce("sum", {"a": array, "b": [1.5, None]}),
                group.broadcast(None if rank else {"w": np.arange(3)}),
                group.all_gather(np.full(rank, rank)),
                group.scatter(np.arange(8) if rank == 3 else None, root=3),
            )

    for rank, (summed, sent, gathered, piece) in enumerate(each(one, 4)):
        assert (summed["a"] == 6).all() and summed["b"] == [6.0, None]
        assert sent["w"].tolist() == [0, 1, 2] and gathered.tolist() == [1, 2, 2, 3, 3, 3]
        assert piece.tolist() == [2 * rank, 2 * rank + 1]


def test_arrays_of_a_session_over_grpc_are_ordinary(one_worker: Any) -> None:
    with connected(one_worker.addresses[0], "grpc") as session:
        array = session.empty((3, 4), np.float16)
        assert array.shape == (3, 4) and array.dtype == np.float16 and array.flags.owndata and array.flags.writeable


def test_another_value_of_the_variable_is_refused(one_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVED_TRANSPORT", "carrier pigeon")
    with pytest.raises(ValueError, match="COLLECTIVED_TRANSPORT must be 'grpc'.*'carrier pigeon'"):
        cd.connect(one_worker.addresses[0])


@pytest.fixture(scope="module")
def listening(make_cluster: Any) -> Any:
    """Two workers that listen at TCP ports too, and have little memory."""
    return make_cluster(2, worker_options=("--listen", ":0", "--memory-limit", str(96 << 20)))


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of the job's secret, as the environment names it."""
    file = tmp_path / "secret"
    file.write_text("the-secret-of-these-tests\n")
    file.chmod(0o600)
    monkeypatch.setenv("COLLECTIVED_SECRET_FILE", str(file))
    return file


def test_a_client_elsewhere_shows_the_secret_and_gets_the_same_results(listening: Any, secret: Path) -> None:
    def one(rank: int) -> Any:
        address = (listening.tcp_addresses if rank % 2 else listening.addresses)[rank // 2]
        with cd.connect(address) as session, session.join("tcp", 4, rank=rank, timeout=20) as group:
            summed = group.all_reduce("sum", np.arange(100_000) * rank)
            return session.transport, session.devices, summed.tobytes()

    found = each(one, 4)
    assert [transport for transport, _, _ in found] == ["shared memory", "grpc"] * 2
    assert len({result for _, _, result in found}) == 1 and all(len(devices) == 8 for _, devices, _ in found)


def test_without_the_secret_nobody_gets_in_over_tcp(
    listening: Any, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listening.tcp_addresses[0].startswith("127.0.0.1:")
    secret.write_text("another\n")
    with pytest.raises(cd.errors.UnauthenticatedError, match="set COLLECTIVED_SECRET_FILE"):
        cd.connect(listening.tcp_addresses[0])
    for wrong, says in (("", "holds no secret"), ("Ж", "holds no secret")):
        secret.write_text(wrong)
        with pytest.raises(ValueError, match=says):
            cd.connect(listening.tcp_addresses[0])
    monkeypatch.setenv("COLLECTIVED_SECRET_FILE", str(secret.with_name("nowhere")))
    with pytest.raises(ValueError, match="COLLECTIVED_SECRET_FILE=.*cannot be read"):
        cd.connect(listening.tcp_addresses[0])
    monkeypatch.delenv("COLLECTIVED_SECRET_FILE")
    monkeypatch.delenv("COLLECTIVED_SECRET", raising=False)
    with pytest.raises(cd.errors.UnauthenticatedError):
        cd.connect(listening.tcp_addresses[0])
    monkeypatch.setenv("COLLECTIVED_SECRET", "the-secret-of-these-tests")
    with cd.connect(listening.tcp_addresses[0]) as session:
        assert session.transport == "grpc"


def test_a_rank_that_asks_for_too_much_memory_can_rejoin(listening: Any) -> None:
    with connected(listening.addresses[0], "grpc") as session, session.join("large", 1, rank=0) as group:
        assert group.all_reduce("sum", 1) == 1
        with pytest.raises(cd.errors.ResourceExhaustedError, match="no memory for the value of all_reduce") as caught:
            group.all_reduce("sum", np.zeros(128 << 20, np.uint8))
        assert caught.value.rejoin
        group.rejoin(timeout=20)
        assert group.all_reduce("sum", 2) == 2
        works = []
        for _ in range(2):
            with contextlib.suppress(cd.errors.ResourceExhaustedError):  # the first may have been refused by then
                works.append(group.all_reduce("sum", np.zeros(128 << 20, np.uint8), async_op=True))
        assert works
        for work in works:
            with pytest.raises(cd.errors.ResourceExhaustedError):
                work.result()
        with contextlib.suppress(cd.errors.ResourceExhaustedError, cd.errors.AbortedError):
            group.leave()


def test_packs_complete_one_by_one(two_workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVED_TRANSPORT", "grpc")

    def body(group: cd.Group) -> Any:
        value = [np.full(1000, float(index)) for index in range(6)]
        options = cd.CommunicationOptions(bytes_per_pack=8000)
        work = group.all_reduce("sum", value, options, async_op=True)
        return [(path, leaf[0]) for path, leaf in work.as_completed()]

    for seen in two_workers.run(4, body):
        assert sorted(seen) == [((index,), 4.0 * index) for index in range(6)]


@pytest.mark.parametrize("count", (1, 2))
def test_a_value_that_takes_longer_than_its_own_deadline_is_one_verdict_on_all_ranks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setenv("COLLECTIVED_TRANSPORT", "grpc")
    cluster = request.getfixturevalue({1: "one_worker", 2: "two_workers"}[count])
    value = np.ones(16 << 20, np.float32)

    def body(group: cd.Group) -> Any:
        options = cd.CommunicationOptions(timeout_seconds=0.01) if group.rank == 0 else None
        with pytest.raises(cd.errors.DeadlineExceededError) as caught:
            group.all_reduce("sum", value, options)
        error = caught.value
        assert error.rejoin and 0 in [member.rank for member in error.missing]
        with pytest.raises(cd.errors.DeadlineExceededError):
            group.barrier()
        return str(error)

    first, second = cluster.run(2, body)
    assert first == second and "all_reduce(sum) #0 of group" in first
    assert first.count("did not complete within 0.01 s") == first.count("all_reduce(sum)") == 1


FORKING = """
import os, time, collectived as cd, numpy as np
session = cd.connect()
group = session.join()
work = group.all_reduce("sum", np.ones(1 << 20), async_op=True)
slowest, codes = 0.0, []
for number in range(3):
    began = time.monotonic()
    child = os.fork()
    if not child:
        code = 0
        for use in (lambda: group.barrier(), work.result, lambda: session.empty(3)):
            try:
                use()
                code = 1
            except cd.errors.FailedPreconditionError:
                pass
        with cd.connect() as own, own.join(f"/child-{os.getpid()}", 1, rank=0) as alone:
            code = code or (0 if alone.all_reduce("sum", 5) == 5 else 2)
        os._exit(code)
    slowest = max(slowest, time.monotonic() - began)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    group.barrier()
print(codes, work.result()[0], slowest < 5)
"""


def test_forked_children_connect_for_themselves(one_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVED_TRANSPORT", "grpc")
    client = one_worker.client(0, 1, "forking", FORKING)
    out, err = client.communicate(timeout=50)
    assert (client.returncode, out) == (0, "[0, 0, 0] 1.0 True\n"), err


STOPPED = """
import os, signal, sys, time, collectived as cd
session = cd.connect()
group = session.join()
print("joined", flush=True)
try:
    group.barrier()
except cd.errors.UnavailableError as error:
    print("is lost" in str(error), flush=True)
"""


def test_a_worker_that_dies_ends_its_clients(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVED_TRANSPORT", "grpc")
    cluster = make_cluster(1)
    client = cluster.client(0, 2, "stopped", STOPPED)
    assert client.stdout is not None
    other = connected(cluster.addresses[0], "grpc")
    joining = threading.Thread(target=lambda: other.join("stopped", 2, rank=1, timeout=20))
    joining.start()
    assert client.stdout.readline() == "joined\n"
    joining.join()
    settle(lambda: any(group_loop.in_flight for group_loop in cluster.status().workers[0].lanes))
    cluster.workers[0].process.kill()
    out, err = client.communicate(timeout=20)
    assert (client.returncode, out) == (0, "True\n"), err
    other.close()
    for path in cluster.folder.glob("*-0.sock"):
        path.unlink()


# The example and the page


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """A user's environment: our commands on the path, a runtime directory of their own, which is empty afterwards."""
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as folder:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        yield {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": folder, "COLUMNS": "160"}
        assert os.listdir(folder) == []


def launched(line: str, environment: dict[str, str]) -> str:
    """What it prints, if all is well."""
    done = subprocess.run(
        shlex.split(line), cwd=ROOT, env=environment, text=True, capture_output=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_the_example(environment: dict[str, str]) -> None:
    text = (ROOT / "examples/grpc_only.py").read_text()
    imported = set(re.findall(r"^(?:import|from) ([\w.]+)", text, re.MULTILINE))
    assert {name for name in imported if "collectived" in name} == {"collectived_proto.v1"}
    (line,) = re.findall(r"^    (collectived launch .*)$", text, re.MULTILINE)
    said = launched(line, environment)
    for rank in range(4):
        assert f"[rank {rank}] rank {rank}: done" in said
        assert f"[rank {rank}] rank {rank}: rank 3 differs: " in said


def test_the_pages(environment: dict[str, str], tmp_path: Path) -> None:
    blocks = [*claimed(__file__, "docs/guide/grpc.md"), *claimed(__file__, "docs/guide/grpc-errors.md")]
    program = tmp_path / "page.py"
    program.write_text("\n".join(of_language(blocks, "python")))
    said = launched(f"collectived launch --clients 2 -- python {shlex.quote(str(program))}", environment)
    (printed,) = of_language(blocks, "text")
    for rank in range(2):
        mine = [line.removeprefix(f"[rank {rank}] ") for line in said.splitlines() if line.startswith(f"[rank {rank}]")]
        assert mine[-3:] == printed.splitlines()
