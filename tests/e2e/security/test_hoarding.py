"""Users of a worker who keep what it has taken back: its memory stays within its limit, and others are served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tests.e2e.raw_client import Raw
from tests.e2e.security.conftest import ROOT, asked, needs_root
from tests.waiting import settle

ANN, BOB, CAROL = 54320, 54321, 54322
MIB = 1 << 20
LIMIT = 64
Worker = Callable[..., dict[str, Any]]
pytestmark = [needs_root, pytest.mark.timeout(150)]

BEGIN = """
import json, os, sys
import numpy as np
import collectived as cd
address, uid = sys.argv[1:]
def join(session, number):
    return session.join(f"{os.getuid()}-{number}", 1)
with cd.connect(address) as session, join(session, 0) as group:
    group.all_reduce("sum", 1.0)  # Python and what it imports may lie where others may not look
os.setgroups([int(uid)]); os.setgid(int(uid)); os.setuid(int(uid))
"""
# Keeps every arena that it was ever handed; says how much memory they take, and why it got no more.
HOARDER = (
    BEGIN
    + """
from collectived_proto.ipc import arena
attach, kept = arena.attach, []
def keep(number, size, descriptor, *, writable):
    kept.append(os.dup(descriptor))
    return attach(number, size, descriptor, writable=writable)
arena.attach = keep
session, why = cd.connect(address), ""
try:
    for number in range(40):
        array = session.empty(1 << 20, np.float32)
        array[...] = 1.0
        with join(session, number) as group:
            group.all_reduce("sum", array)
        del array
        session.empty(1, np.float32)
except cd.errors.ResourceExhaustedError as error:
    why = str(error)
print(json.dumps([sum(os.fstat(one).st_blocks * 512 for one in kept), why]), flush=True)
sys.stdin.readline()
for one in kept:
    os.close(one)
kept.clear()
with join(session, "again") as group:
    print(group.all_reduce("sum", 21.0), flush=True)
os._exit(0)
"""
)


def run(program: str, said: dict[str, Any], uid: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, said["address"], str(uid)]
    # Without a native core the worker carries out what this client submits, into its own arenas of results.
    environment = {**os.environ, "COLLECTIVED_NATIVE": "/nowhere"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_results_of_ended_groups_count_of_the_session_that_keeps_them(worker: Worker) -> None:
    options = ("--allow-users", f"{ANN},{BOB}", "--memory-limit", f"{LIMIT}MiB", "--max-session-memory", "24MiB")
    said = worker(*options, mode=0o711)
    hoarder = run(HOARDER, said, BOB)
    try:
        assert hoarder.stdin is not None and hoarder.stdout is not None
        taken, why = json.loads(hoarder.stdout.readline())
        assert "results of groups that are over" in why and "max_session_memory" in why
        assert 0 < taken <= LIMIT * MIB
        raw = Raw(said["address"])
        status = raw.status()
        assert 24 * MIB <= status.retained_bytes <= status.arena_bytes <= LIMIT * MIB
        assert asked(said["address"], ANN, "collective")["collective"] == ("ok", "shared memory")
        assert asked(said["address"], CAROL, "collective")["collective"][0] in ("UNAVAILABLE", "UNAUTHENTICATED")
        hoarder.stdin.write("\n")
        hoarder.stdin.flush()
        assert hoarder.stdout.readline() == "21.0\n", "who lets go of them is served again"
        hoarder.wait(30)
        settle(lambda: raw.status().retained_bytes == 0)
        raw.close()
    finally:
        hoarder.kill()
        hoarder.communicate()
