"""Descriptors that nobody has asked for, of users who may connect: no thread of a worker waits for what was passed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.e2e.security.conftest import ROOT, asked, needs_root

ANN, BOB, CAROL = 54320, 54321, 54322
Worker = Callable[..., dict[str, Any]]
pytestmark = [needs_root, pytest.mark.timeout(150)]

# Connects to each path, passes what blocks whoever closes it last, and holds the far end until its input ends.
HOSTILE = """
import encodings.idna, os, socket, sys
from tests.runtime.limits.test_passed_descriptors import lingering
uid, *doors = sys.argv[1:]
os.setgroups([]); os.setgid(int(uid)); os.setuid(int(uid))
kept = []
for path in doors:
    for times in range(4):
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if "door" in path else socket.SOCK_STREAM)
        s.connect(path)
        one, peer = lingering()
        kept += [s, peer]
        try:
            socket.send_fds(s, [b"x"], [one.fileno()])
            one.close()
        except PermissionError:  # a kernel that refuses it for the worker
            kept.append(one)
print("done", flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.fixture
def hostile() -> Iterator[Callable[..., None]]:
    running: list[subprocess.Popen[str]] = []

    def one(uid: int, *paths: str) -> None:
        command = [sys.executable, "-c", HOSTILE, str(uid), *paths]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None and process.stdout.readline() == "done\n"

    yield one
    for process in running:
        process.kill()
        process.communicate()


def test_a_worker_serves_on_whatever_its_guests_pass_to_its_sockets(
    worker: Worker, hostile: Callable[..., None]
) -> None:
    said = worker("--allow-users", str(ANN), "--allow-users", str(BOB), mode=0o711)
    grpc_socket = said["address"].removeprefix("unix:")
    door = grpc_socket.replace("worker-0", "door-0")
    assert asked(said["address"], ANN, "collective")["collective"] == ("ok", "shared memory")
    hostile(BOB, grpc_socket, door)
    for uid in (ANN, BOB, 0):
        assert asked(said["address"], uid, "collective")["collective"] == ("ok", "shared memory")
    assert asked(said["address"], CAROL, "status")["status"][0] in ("UNAVAILABLE", "UNAUTHENTICATED")
