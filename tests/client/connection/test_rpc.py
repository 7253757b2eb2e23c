"""The gRPC side: off the caller's thread, closed between calls, and away in forked children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

import collectived as cd
from collectived_proto.ipc import messages
from collectived_proto.v1 import common_pb2


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLLECTIVED_LABEL", "COLLECTIVED_TIMEOUT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_no_rpc_runs_on_the_callers_thread(worker: Any) -> None:
    """Ctrl-C inside gRPC's locks would leave them held."""
    session = cd.connect(worker.address)
    found: set[str] = set()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if f"{os.sep}grpc{os.sep}" in frame.f_code.co_filename:
            found.add(f"{frame.f_code.co_filename}: {frame.f_code.co_name}")

    sys.setprofile(watch)
    try:
        with session:
            group = session.join("train", 2, rank=0)
            group.all_reduce("sum", 1)
            worker.refuses = True
            with pytest.raises(cd.errors.ResourceExhaustedError, match="no more"):
                group.all_reduce("sum", 1.0)
    finally:
        sys.setprofile(None)
    assert found == set()


def test_ctrl_c_while_a_collective_is_described_aborts_at_once_and_leaves_no_lock(worker: Any, delays: Any) -> None:
    with cd.connect(worker.address) as session, session.join("train", 2, rank=0) as group:
        worker.mute = True
        pressed: list[float] = []

        def press() -> None:
            assert worker.preparing.acquire(timeout=10)
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        pressing = threading.Thread(target=press)
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            group.barrier()
        assert time.monotonic() - pressed[0] < 0.1 + delays.room
        pressing.join()
        with pytest.raises(cd.errors.AbortedError, match="interrupted on rank 0"):
            group.barrier()
        assert worker.withdrawn.acquire(timeout=10), "the RPC was cancelled"
        session.close()


def test_once_the_session_socket_is_attached_no_rpc_stays_open(worker: Any) -> None:
    with cd.connect(worker.address):
        assert worker.streams_ended.acquire(timeout=10)


def test_a_worker_that_does_not_take_the_session_socket_is_given_up_in_time(worker: Any) -> None:
    worker.attaches = False
    with pytest.raises(cd.errors.UnavailableError, match="has not answered its session socket within 0.3 s"):
        cd.connect(worker.address, timeout=0.3)


def test_a_worker_of_no_version_that_the_client_speaks_is_named_with_who_is_to_be_upgraded(worker: Any) -> None:
    worker.speaks = common_pb2.Protocol(lowest=7, highest=9, release="9.9.9")
    with pytest.raises(cd.errors.FailedPreconditionError) as error:
        cd.connect(worker.address)
    assert "worker 3 (at " in str(error.value) and "(release 9.9.9, protocol 7 to 9)" in str(error.value)
    assert str(error.value).endswith("upgrade this client to a release that speaks protocol 7")
    assert worker.streams_ended.acquire(timeout=10)


def test_a_session_socket_that_is_refused_is_refused_in_the_words_of_the_worker(worker: Any) -> None:
    worker.greeting = messages.encode_refused(cd.errors.Code.FAILED_PRECONDITION, "upgrade the client")
    with pytest.raises(cd.errors.FailedPreconditionError, match="^upgrade the client$"):
        cd.connect(worker.address)


def test_what_is_no_address_at_all_is_refused() -> None:
    with pytest.raises(TypeError, match="worker must be unix:/path or host:port, or None to look for one, got 5"):
        cd.connect(5)  # type: ignore[arg-type]


def test_a_label_that_is_no_utf_8_is_sent_readable(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVED_LABEL", os.fsdecode(b"pod \xff"))
    cd.connect(worker.address).close()
    assert [request.label for request in worker.opened] == [r"pod \udcff"]


FORK = """
import asyncio, os, threading, time, collectived as cd, numpy as np
session = cd.connect()
group = session.join("train", 2, rank=0)
pending, ended = (group.all_reduce("sum", np.ones(2), async_op=True) for _ in range(2))
ended.wait()

async def wait_for(work):
    return await work

USES = [
    pending.result, pending.wait, pending.done, pending.exception, ended.result, ended.done,
    lambda: cd.wait([pending]), lambda: next(pending.as_completed()), lambda: pending.add_done_callback(print),
    lambda: asyncio.run(wait_for(pending)), lambda: group.all_reduce("sum", 1),
    lambda: group.abort("x"),
]

def fork():
    began = time.monotonic()
    child = os.fork()
    if child:
        print(f"took {time.monotonic() - began:.3f} s", flush=True)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 7
    for use in USES:
        try:
            use()
        except cd.errors.FailedPreconditionError as error:
            assert "in the child itself" in str(error), error
        except BaseException as error:
            print(use, repr(error), flush=True)
            code = 1
        else:
            print(use, "did not raise", flush=True)
            code = 1
    group.leave()
    session.close()
    os._exit(code)

locked, release = threading.Event(), threading.Event()

def hold():
    with group._channel.mutex, pending._lock, ended._lock, session._memory._lock, group._prepared_calls._lock:
        locked.set()
        release.wait()

holding = threading.Thread(target=hold)
holding.start()
locked.wait()
codes = [fork()]
release.set()
holding.join()
codes.append(fork())
print(codes, pending.wait())
"""


def test_works_of_the_parent_are_refused_in_a_forked_child_at_once(worker: Any) -> None:
    environment = {**os.environ, "COLLECTIVED_WORKER": worker.address}
    program = [sys.executable, "-W", "error", "-c", FORK]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=50)
    *times, codes = ended.stdout.splitlines()
    assert (ended.returncode, codes) == (0, "[7, 7] [2. 2.]"), (ended.stdout, ended.stderr)
    assert len(times) == 2 and all(float(line.split()[1]) < 0.5 for line in times), "an RPC was open: that costs 1 s"
