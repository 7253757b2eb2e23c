"""Descriptors that nobody has asked for, of users who may connect: no thread of a worker waits for what was passed."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.security.conftest import ROOT, asked, needs_root
from tests.runtime.limits.test_passed_descriptors import UNKNOWN_OPTION
from tests.waiting import settle

import collectived as cd

ANN, BOB, CAROL = 54320, 54321, 54322
Pass = Callable[..., None]
Worker = Callable[..., dict[str, Any]]
SOCKETS = 3  # beside gRPC's, that a session of one group has: its own, for its stacks, and the doorbell
DOORBELL = SOCKETS - 1
AGAIN = ("ok", "shared memory")
# What runs a daemon as on a kernel without SO_PASSRIGHTS; its arguments are Python, -P, -m and its name, and its own.
OLDER_KERNEL = f"""
import runpy, sys
from collectived_runtime.limits import passed_descriptors
passed_descriptors.SO_PASSRIGHTS = {UNKNOWN_OPTION}
sys.argv[:] = sys.argv[4:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
KERNELS = {"a kernel with SO_PASSRIGHTS": (), "an older kernel": (sys.executable, "-P", "-c", OLDER_KERNEL)}
pytestmark = [needs_root, pytest.mark.timeout(150)]

# Passes what blocks whoever closes it last, which is the worker: it is stopped until this process has closed it.
PASS = """
import encodings.idna, itertools, os, socket, sys
from tests.runtime.limits.test_passed_descriptors import lingering
pairs = [lingering() for _ in range(24)]  # more than threads that may be held up
def pass_lingering(sockets):
    print("ready", flush=True)
    sys.stdin.readline()
    for s, (one, peer) in zip(itertools.cycle(sockets), pairs):
        try:
            socket.send_fds(s, [b"x"], [one.fileno()])
            one.close()
        except PermissionError:  # of a kernel that refuses it for the worker
            pass
    print("done", flush=True)
    sys.stdin.read()
    os._exit(0)
"""

# Connects to each path, passes that, and holds the far end until its input ends.
HOSTILE = f"""{PASS}
uid, *doors = sys.argv[1:]
os.setgroups([]); os.setgid(int(uid)); os.setuid(int(uid))
found = []
for path in 8 * doors:
    found.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if "door" in path else socket.SOCK_STREAM))
    found[-1].connect(path)
pass_lingering(found)
"""

# Opens a session and joins a group, and passes the same at one of the sockets beside gRPC's that it then has.
HOSTILE_SESSION = f"""{PASS}
import contextlib
import stat
from tests.waiting import settle
import collectived as cd
def is_socket(number):
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:  # the list's own number, which is closed by now
        return False
def list_sockets():
    numbers = [number for number in map(int, os.listdir("/proc/self/fd")) if is_socket(number)]
    found = []  # after the list is whole: a duplicate may take the list's own number
    for number in numbers:
        with contextlib.suppress(OSError):  # another thread has closed it
            found.append(socket.socket(fileno=os.dup(number)))
    return [s for s in found if s.family == socket.AF_UNIX and s.type == socket.SOCK_SEQPACKET]
uid, address, name, size, rank, which = sys.argv[1:]
with cd.connect(address) as session, session.join("first", 1) as group:
    group.all_reduce("sum", 1.0)  # all that is imported late is, before this process becomes that user
settle(lambda: not list_sockets())
os.setgroups([]); os.setgid(int(uid)); os.setuid(int(uid))
session = cd.connect(address)
group = session.join(name, int(size), rank=int(rank), timeout=20)
group.barrier(timeout=10)
doorbell = group._channel._socket.fileno()
settle(lambda: len(list_sockets()) == {SOCKETS})
found = sorted(list_sockets(), key=lambda s: os.path.sameopenfile(s.fileno(), doorbell))
pass_lingering([found[int(which)]])
"""


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return KERNELS[request.param]


def stands_still(pid: int) -> bool:
    """Whether every thread of a process that was stopped has stopped."""
    stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def find_pid(address: str) -> int:
    """Of the worker there."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(address.removeprefix("unix:"))
        credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def count_descriptors(address: str) -> int:
    return len(os.listdir(f"/proc/{find_pid(address)}/fd"))


@pytest.fixture
def hostile() -> Iterator[Pass]:
    running: list[subprocess.Popen[str]] = []

    def one(program: str, address: str, *words: Any) -> None:
        worker = find_pid(address)
        command = [sys.executable, "-c", program, *map(str, words)]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(worker, signal.SIGSTOP)
        settle(lambda: stands_still(worker))  # else it reads the first, and hangs up before the others come
        try:
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
        finally:
            os.kill(worker, signal.SIGCONT)

    yield one
    for process in running:
        process.kill()
        process.communicate()


def test_a_worker_serves_on_whatever_its_guests_pass_to_its_sockets(
    worker: Worker, hostile: Pass, kernel: tuple[str, ...]
) -> None:
    said = worker("--allow-users", str(ANN), "--allow-users", str(BOB), mode=0o711, within=kernel)
    grpc_socket = said["address"].removeprefix("unix:")
    door = grpc_socket.replace("worker-0", "door-0")
    assert asked(said["address"], ANN, "collective")["collective"] == AGAIN
    before = count_descriptors(said["address"])
    hostile(HOSTILE, said["address"], BOB, grpc_socket, door)
    settle(lambda: count_descriptors(said["address"]) <= before + 3)  # while those who passed them hold their ends
    for uid in (ANN, BOB, 0):
        assert asked(said["address"], uid, "collective")["collective"] == AGAIN
    assert asked(said["address"], CAROL, "status")["status"][0] in ("UNAVAILABLE", "UNAUTHENTICATED")


def test_a_worker_serves_on_whatever_a_guest_passes_in_its_session_and_to_its_doorbell(
    worker: Worker, hostile: Pass, kernel: tuple[str, ...]
) -> None:
    said = worker("--allow-users", str(ANN), "--allow-users", str(BOB), mode=0o711, within=kernel)
    with (
        cd.connect(said["address"]) as session,
        session.join("honest", 1) as group,
    ):
        assert group.all_reduce("sum", 1.0, timeout=10) == 1.0
        for which in range(SOCKETS):
            hostile(HOSTILE_SESSION, said["address"], BOB, said["address"], f"hostile-{which}", 1, 0, which)
            assert group.all_reduce("sum", 1.0, timeout=10) == 1.0
        for uid in (ANN, BOB, 0):
            assert asked(said["address"], uid, "collective")["collective"] == AGAIN
        assert group.all_reduce("sum", 1.0, timeout=10) == 1.0


def test_whoever_shares_a_group_with_such_a_guest_is_told_in_time(
    worker: Worker, hostile: Pass, kernel: tuple[str, ...]
) -> None:
    said = worker("--allow-users", str(BOB), mode=0o711, within=kernel)
    with ThreadPoolExecutor(1) as pool, cd.connect(said["address"]) as session:

        def call() -> None:
            with session.join("/shared", 2, rank=0, timeout=20) as group:
                group.barrier(timeout=10)
                group.barrier(timeout=5)  # to which the other one does not come

        told = pool.submit(call)
        hostile(HOSTILE_SESSION, said["address"], BOB, said["address"], "/shared", 2, 1, DOORBELL)
        with pytest.raises((cd.errors.DeadlineExceededError, cd.errors.UnavailableError)) as caught:
            told.result(20)
        assert [member.rank for member in caught.value.missing] == [1]
        assert asked(said["address"], BOB, "collective")["collective"] == AGAIN
