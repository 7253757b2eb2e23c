"""Connecting and joining: where a worker is looked for, what goes wrong, and what a forked child may do."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived.connection import rpc
from collectived.connection.address import WorkerAddress, read_secret
from collectived_proto.ipc import job_files, messages

VARIABLES = "COLLECTIVED_WORKER COLLECTIVED_GROUP COLLECTIVED_JOB COLLECTIVED_LABEL COLLECTIVED_TIMEOUT WORLD_SIZE RANK"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment that says nothing, and a runtime folder without jobs."""
    for name in VARIABLES.split():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(job_files, "SYSTEM_FOLDER", tmp_path / "system")


def publish(name: str, *workers: str) -> None:
    job_files.write_job_file(job_files.JobFile(name, os.getpid(), "unix:/nowhere", workers, f"python {name}.py"))


def test_the_argument_comes_before_the_environment_and_that_before_the_running_job(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish("job1", "unix:/nowhere/job")
    with pytest.raises(cd.errors.UnavailableError, match="at unix:/nowhere/job .of the running job job1"):
        cd.connect()
    monkeypatch.setenv("COLLECTIVED_WORKER", "unix:/nowhere/env")
    with pytest.raises(cd.errors.UnavailableError, match="at unix:/nowhere/env .from COLLECTIVED_WORKER"):
        cd.connect()
    with cd.connect(worker.address) as session:
        assert (session.worker, session.transport) == ("/job:worker/task:3", "shared memory")


def test_the_one_running_job_is_found(worker: Any) -> None:
    publish("job1", worker.address)
    cd.connect().close()


def test_the_systems_worker_is_found_where_no_job_of_the_user_runs(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(worker.address.removeprefix("unix:"))
    monkeypatch.setattr(job_files, "SYSTEM_FOLDER", path.parent)
    monkeypatch.setattr(job_files, "SYSTEM_SOCKET", path.name)
    cd.connect().close()
    publish("job1", "unix:/nowhere/job")
    with pytest.raises(cd.errors.UnavailableError, match="at unix:/nowhere/job .of the running job job1"):
        cd.connect()


def test_a_system_worker_that_is_gone_or_closed_to_this_user_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "system").mkdir()
    path = tmp_path / "system" / "worker.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with pytest.raises(cd.errors.UnavailableError, match=f"no worker answers at unix:{path} .the system's worker"):
        cd.connect(timeout=0.1)


def test_several_running_jobs_are_listed() -> None:
    publish("job1", "unix:/a")
    publish("job2", "unix:/b")
    with pytest.raises(cd.errors.InvalidArgumentError, match="2 jobs") as caught:
        cd.connect()
    assert "COLLECTIVED_WORKER=unix:/a  # job job1, python job1.py" in str(caught.value)
    assert "COLLECTIVED_WORKER=unix:/b" in str(caught.value)


def test_where_nothing_runs_the_line_to_type_is_shown() -> None:
    with pytest.raises(cd.errors.UnavailableError, match="collectived launch --clients 2 -- python train.py") as caught:
        cd.connect()
    assert str(job_files.SYSTEM_FOLDER / "worker.sock") in str(caught.value)
    assert "torchrun" not in str(caught.value)


def test_beside_torchrun_it_is_the_line_that_starts_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(cd.errors.UnavailableError, match="start one: collectived up cluster.toml, then torchrun again"):
        cd.connect()


def test_an_address_where_nobody_listens_is_named_at_once(tmp_path: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        for address in (f"unix:{tmp_path}/none", f"127.0.0.1:{bound.getsockname()[1]}"):
            began = time.monotonic()
            with pytest.raises(cd.errors.UnavailableError, match=f"no worker answers at {address}.*start a job"):
                cd.connect(address)
            assert time.monotonic() - began < 2


def test_something_that_listens_but_never_answers_is_given_up_in_time(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{tmp_path}/s")
        listening.listen()
        began = time.monotonic()
        with pytest.raises(cd.errors.UnavailableError, match="has not answered within 0.3 s"):
            cd.connect(f"unix:{tmp_path}/s", timeout=0.3)
        assert 0.3 <= time.monotonic() - began < 2


@pytest.mark.parametrize("address", ["", "here", "unix:", "host:", ":7", "host:port"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="expected unix:/path or host:port"):
        cd.connect(address)


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must not be negative or NaN"):
        cd.connect("unix:/nowhere", timeout=timeout)


def test_a_group_is_joined_from_the_environment(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLLECTIVED_GROUP": "train", "WORLD_SIZE": "4", "RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    with cd.connect(worker.address) as session, session.join() as group:
        assert (group.name, group.size, group.rank) == ("train", 4, 2)
        assert (group.local_size, group.local_rank) == (4, 2)
        assert group.device == "/job:worker/replica:0/task:3/device:CPU:2"
        assert group.all_reduce("sum", np.ones(2)).tolist() == [4, 4]
    request = worker.joins[0]
    assert (request.min_size, request.max_size, request.rank, request.session) == (4, 4, 2, b"secret")


def test_what_the_environment_lacks_is_named(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with cd.connect(worker.address) as session:
        with pytest.raises(ValueError, match="COLLECTIVED_GROUP"):
            session.join()
        with pytest.raises(ValueError, match="WORLD_SIZE"):
            session.join("train")
        monkeypatch.setenv("WORLD_SIZE", "two")
        with pytest.raises(ValueError, match="WORLD_SIZE must be a whole number, it is 'two'"):
            session.join("train")
        monkeypatch.setenv("COLLECTIVED_TIMEOUT", "-3")
        with pytest.raises(ValueError, match="COLLECTIVED_TIMEOUT: '-3' is not a time: expected a number of seconds"):
            session.join("train", 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": ""}, "name must be a text"),
        ({"size": 0}, "size must be a whole number from 1"),
        ({"size": (3, 2)}, "size must be"),
        ({"size": -3}, "size must be a whole number from 1 to 1048576, .* got -3"),
        ({"size": 2**40}, "size must be a whole number from 1 to 1048576, .* got 1099511627776"),
        ({"size": 2.0}, "size must be .* got 2.0, a float"),
        ({"size": True}, "size must be .* got True, a bool"),
        ({"size": (2, "3")}, "size must be .* got '3', a str"),
        ({"rank": 2}, "rank must be from 0 to 1 in a group of 2, got 2"),
        ({"rank": -1}, "rank must be"),
        ({"rank": "1"}, "rank must be from 0 to 1 in a group of 2, got '1', a str"),
        ({"name": "a\nOK"}, "name must have no control characters, got 'a.nOK'"),
        ({"name": "\u202etrain"}, "name must have no control characters"),
        ({"name": "\udcff"}, "name must be a text that .* fits in UTF-8"),
        ({"device": 1}, "device must be a name such as 'CPU:1', a torch.device or None, got 1"),
        ({"device": "TPU:0"}, "not a device name"),
        ({"settle": -1}, "settle must be"),
        ({"timeout": -1}, "timeout must not be negative"),
    ],
    ids=str,
)
def test_bad_arguments_of_join_are_refused(worker: Any, arguments: dict[str, Any], says: str) -> None:
    with cd.connect(worker.address) as session:
        with pytest.raises((TypeError, ValueError), match=says):
            session.join(**{"name": "train", "size": 2, **arguments})
        assert worker.joins == []


def test_an_elastic_size_and_a_short_device_name_are_sent_in_full(worker: Any) -> None:
    with cd.connect(worker.address) as session:
        session.join("train", (2, 5), rank=0, device="cpu:1", settle=1.5)
    request = worker.joins[0]
    assert (request.min_size, request.max_size, request.settle_seconds) == (2, 5, 1.5)
    assert request.device == "/job:worker/replica:0/task:3/device:CPU:1"


def test_a_join_that_stays_incomplete_says_who_is_here_and_ends_in_time(
    worker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rpc, "PROGRESS_INTERVAL", 0.05)
    worker.never = True
    worker.progress = ["1 of 2 ranks are here: rank 0; missing: rank 1"]
    with cd.connect(worker.address) as session, pytest.raises(cd.errors.DeadlineExceededError, match="missing: rank 1"):
        session.join("train", 2, timeout=0.2)
    assert "joining group 'train': 1 of 2 ranks are here: rank 0; missing: rank 1" in caplog.messages
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_ctrl_c_ends_a_join(worker: Any) -> None:
    worker.never = True
    worker.progress = ["1 of 2 ranks are here"]
    with cd.connect(worker.address) as session:
        pressing = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            session.join("train", 2)
        pressing.join()
        worker.never = False
        session.join("train", 2, rank=0).barrier()


def test_a_worker_that_is_stopped_before_a_collective_is_described_is_given_up_at_the_deadline(worker: Any) -> None:
    with cd.connect(worker.address) as session, session.join("train", 2, rank=0) as group:
        worker.mute = True
        began = time.monotonic()
        says = (
            r"^barrier\(\) of group 'train' \(test_session_connect.py:\d+\) did not complete within "
            r"0.1 s: worker 3 .* has not"
        )
        with pytest.raises(cd.errors.DeadlineExceededError, match=says) as caught:
            group.barrier(cd.CommunicationOptions(timeout_seconds=0.1))
        assert time.monotonic() - began < 2
        assert caught.value.rejoin and caught.value.decided_by == "rank 0"
        worker.mute = False
        with pytest.raises(cd.errors.DeadlineExceededError, match=says):
            group.barrier()
        worker.far.until(lambda: [kind for kind, _ in worker.far.texts] == [messages.MessageType.FAIL])


def test_all_that_connect_waits_for_has_one_limit(worker: Any, delays: Any) -> None:
    worker.late, worker.attaches = 0.6, False
    began = time.monotonic()
    with pytest.raises(cd.errors.UnavailableError, match="has not answered its session socket within 1 s"):
        cd.connect(worker.address, timeout=1)
    assert 1 <= time.monotonic() - began < 1.5 + delays.room


def test_closing_a_session_while_a_collective_is_described_cancels_it(worker: Any) -> None:
    session = cd.connect(worker.address)
    group = session.join("train", 2, rank=0)
    worker.mute = True
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(group.barrier)
        assert worker.preparing.acquire(timeout=10)
        session.close()
        with pytest.raises(cd.errors.CancelledError, match="worker 3 was closed during this call; connect again"):
            calling.result(10)
    assert worker.withdrawn.acquire(timeout=10), "the RPC was cancelled"


def test_closing_a_session_while_memory_is_asked_for_cancels_it(worker: Any) -> None:
    session = cd.connect(worker.address)
    session.join("train", 2, rank=0)
    assert worker.seated.wait(10)
    asked = threading.Event()
    worker.far.on_session = lambda message: asked.set()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(session.empty, 1 << 20)
        assert asked.wait(10)
        session.close()
        with pytest.raises(cd.errors.CancelledError, match="was closed during this call"):
            asking.result(10)


def test_closing_a_session_waits_for_what_nobody_waits_for(worker: Any) -> None:
    session = cd.connect(worker.address)
    group = session.join("train", 2, rank=0)
    assert worker.seated.wait(10)
    worker.far.answer = lambda ring: []
    work = group.all_reduce("sum", 1, async_op=True)
    worker.far.until(lambda: len(worker.far.rings) == 1)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(session.close)
        for answer in worker.far.complete(worker.far.rings[0]):
            worker.far.doorbell.send(answer)
        closing.result(10)
    assert work.result() == 2


def test_closing_a_session_leaves_its_groups_and_ends_it_on_the_worker(worker: Any) -> None:
    session = cd.connect(worker.address)
    group = session.join("train", 1, rank=0)
    group.barrier()
    session.close()
    session.close()
    worker.far.until(lambda: worker.far.ended == {"doorbell", "session"})
    assert worker.far.texts == [(messages.MessageType.LEAVE, "")]
    for use in (group.barrier, lambda: session.empty(3), lambda: session.join("train", 1)):
        with pytest.raises(cd.errors.FailedPreconditionError, match="has left|is closed"):
            use()


def test_empty_makes_arrays_of_any_dtype_that_collectives_carry(worker: Any) -> None:
    with cd.connect(worker.address) as session:
        session.join("train", 2, rank=0)
        assert session.empty(3).dtype == np.float32
        assert session.empty((2, 0), "int8").shape == (2, 0)
        assert session.empty((), np.float64, "CPU:1").shape == ()
        with pytest.raises(TypeError, match="dtype object"):
            session.empty(3, object)
        with pytest.raises(ValueError, match=r"shape must be a length that is not negative.* \(2, -1\)\), got -1"):
            session.empty((2, -1))
        for device, known in (("CPU:77", "CPU:0, CPU:1, GPU:0"), ("/task:1/device:CPU:0", "worker 3 has no device")):
            with pytest.raises(cd.errors.NotFoundError, match=known):
                session.empty(3, device=device)
        with pytest.raises(cd.errors.UnimplementedError, match="arrays on GPU:0"):
            session.empty(3, device="GPU:0")


def run(program: str, address: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLLECTIVED_WORKER": address}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True, timeout=50
    )


FORK = """
import os, collectived as cd, numpy as np
session = cd.connect()
group = session.join("train", 2, rank=0)
before = group.all_reduce("sum", np.ones(3))
sockets = lambda: sum("socket:" in os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                      if os.path.lexists(f"/proc/self/fd/{n}"))
assert sockets() == 3, sockets()
child = os.fork()
if child == 0:
    assert sockets() == 0, sockets()
    for use in (group.barrier, lambda: session.empty(3), lambda: session.join("other", 1), lambda: group.abort("x")):
        try:
            use()
        except cd.errors.FailedPreconditionError as error:
            assert "in the child itself" in str(error)
        else:
            raise AssertionError(use)
    assert before.tolist() == [2, 2, 2]
    cd.connect().close()
    raise SystemExit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert group.all_reduce("sum", np.ones(3)).tolist() == [2, 2, 2]
print("parent goes on")
"""


def test_a_forked_child_holds_no_sockets_and_connects_for_itself(worker: Any) -> None:
    ended = run(FORK, worker.address)
    assert (ended.returncode, ended.stdout) == (0, "parent goes on\n"), ended.stderr


def test_a_process_that_simply_ends_leaves_its_groups(worker: Any) -> None:
    program = "import collectived as cd; cd.connect().join('train', 2, rank=0).barrier()"
    ended = run(program, worker.address)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    worker.far.until(lambda: worker.far.texts == [(messages.MessageType.LEAVE, "")])


def test_importing_brings_neither_grpc_nor_any_array_library_but_numpy_nor_what_starts_daemons() -> None:
    heavy = ["grpc", "google.protobuf", "torch", "jax", "cupy", "asyncio", "collectived.testing", "subprocess"]
    program = f"import sys, collectived; print([name for name in {heavy} if name in sys.modules])"
    assert run(program, "").stdout == "[]\n"


def test_ctrl_c_while_a_session_leaves_its_groups_still_ends_it(worker: Any) -> None:
    session = cd.connect(worker.address)
    group = session.join("train", 2, rank=0)
    assert worker.seated.wait(10)

    def press(ring: messages.Submit) -> list[bytes]:
        os.kill(os.getpid(), signal.SIGINT)
        return []

    worker.far.answer = press
    with pytest.raises(KeyboardInterrupt):
        group.barrier(async_op=True)
        session.close()
    session.close()
    worker.far.until(lambda: worker.far.ended == {"doorbell", "session"})
    assert worker.streams_ended.acquire(timeout=10)


def test_a_torch_device_is_taken_as_its_name(worker: Any) -> None:
    def device(name: str) -> Any:
        """What PyTorch's looks like to us, for PyTorch is not needed here."""
        return type("device", (), {"__module__": "torch", "__str__": lambda self: name})()

    with cd.connect(worker.address) as session:
        session.join("train", 2, rank=0, device=device("cpu:1"))
        assert worker.joins[0].device == "/job:worker/replica:0/task:3/device:CPU:1"
        assert session.empty(3, device=device("cpu")).shape == (3,)
        with pytest.raises(cd.errors.UnimplementedError, match="arrays on GPU:0 are"):
            session.empty(3, device=device("cuda:0"))
        with pytest.raises(cd.errors.NotFoundError, match="has no device 'cuda:7'"):
            session.empty(3, device=device("cuda:7"))
        with pytest.raises(ValueError, match="'meta' is not a device name"):
            session.empty(3, device=device("meta"))


def test_a_secret_that_everybody_may_read_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text("the-secret-of-these-tests\n")
    monkeypatch.setenv("COLLECTIVED_SECRET_FILE", str(file))
    for mode in (0o604, 0o644):
        file.chmod(mode)
        for worker in ("h:7451", "unix:/run/w"):
            with pytest.raises(cd.errors.InvalidArgumentError) as refused:
                read_secret(WorkerAddress(worker, "given"))
            assert f"COLLECTIVED_SECRET_FILE='{file}' has mode 0{mode:o}, " in str(refused.value)
            assert f"chmod 600 {file}" in str(refused.value) and "the-secret" not in str(refused.value)
    file.chmod(0o640)
    assert read_secret(WorkerAddress("h:7451", "given")) == "the-secret-of-these-tests"
    file.unlink()
    assert read_secret(WorkerAddress("unix:/run/w", "given")) == "", "most need none there"
