"""Users of a worker who keep what it has taken back: its memory stays within its limit, and others are served."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen
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
END = """
print(json.dumps([sum(os.fstat(one).st_blocks * 512 for one in kept), why]), flush=True)
sys.stdin.readline()
for one in kept:
    os.close(one)
kept.clear()
with join(session, "again") as group:
    print(group.all_reduce("sum", 21.0), flush=True)
os._exit(0)
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
"""
    + END
)
# The same by a session for each.
RECONNECTING = (
    HOARDER.replace('session, why = cd.connect(address), ""', 'why = ""')
    .replace(
        "        array = session.empty(1 << 20, np.float32)\n",
        "        session = cd.connect(address)\n        array = session.empty(1 << 20, np.float32)\n",
    )
    .replace("        session.empty(1, np.float32)\n", "        session.close()\n")
    .replace("print(json", "session = cd.connect(address)\nprint(json", 1)
)
# Keeps every segment in which it was ever a rank, and writes into each what nobody has asked for.
WRITER = (
    BEGIN
    + """
import mmap
from collectived_native import segment
attach, kept = segment.attach, []
def keep(descriptor, *arguments, **options):
    kept.append(os.dup(descriptor))
    return attach(descriptor, *arguments, **options)
segment.attach = keep
def write(descriptor, size):
    with mmap.mmap(descriptor, 0) as memory:
        memory[-size:] = bytes(size)
session, why = cd.connect(address), ""
try:
    for number in range(40):
        with join(session, number) as group:
            group.all_reduce("sum", 1.0)
            write(kept[-1], 6 << 20)
except (cd.errors.ResourceExhaustedError, cd.errors.UnavailableError) as error:
    why = str(error)
if why:
    session = cd.connect(address)
"""
    + END
)
# Has three of them, and writes when their groups are over.
LATE_WRITER = WRITER.replace("range(40)", "range(3)").replace(
    "sys.stdin.readline()",
    """
sys.stdin.readline()
for one in kept:
    write(one, 14 << 20)
print("written", flush=True)
sys.stdin.readline()
session = cd.connect(address)
""",
)


@pytest.fixture
def said(worker: Worker) -> dict[str, Any]:
    options = ("--allow-users", f"{ANN},{BOB}", "--memory-limit", f"{LIMIT}MiB", "--max-session-memory", "24MiB")
    return worker(*options, mode=0o711)


@contextmanager
def hoarding(program: str, said: dict[str, Any], native: str = "") -> Iterator[tuple[Popen[str], Raw, str]]:
    """Somebody who keeps what it can, and why it got no more; others are served."""
    command = [sys.executable, "-c", program, said["address"], str(BOB)]
    environment = {**os.environ, "COLLECTIVED_NATIVE": native} if native else dict(os.environ)
    raw = Raw(said["address"])
    hoarder = Popen(command, cwd=ROOT, env=environment, stdin=PIPE, stdout=PIPE, text=True)
    try:
        assert hoarder.stdout is not None
        taken, why = json.loads(hoarder.stdout.readline())
        assert 0 < taken <= LIMIT * MIB
        status = raw.status()
        assert status.retained_bytes <= status.arena_bytes <= LIMIT * MIB
        assert asked(said["address"], ANN, "collective")["collective"] == ("ok", "shared memory")
        assert asked(said["address"], CAROL, "collective")["collective"][0] in ("UNAVAILABLE", "UNAUTHENTICATED")
        yield hoarder, raw, why
    finally:
        raw.close()
        hoarder.kill()
        hoarder.communicate()


def tell(hoarder: Popen[str]) -> str:
    """Have it go on; what it says next."""
    assert hoarder.stdin is not None and hoarder.stdout is not None
    hoarder.stdin.write("\n")
    hoarder.stdin.flush()
    return hoarder.stdout.readline().strip()


def test_results_of_ended_groups_count_of_the_session_that_keeps_them(said: dict[str, Any]) -> None:
    # Without a native core the worker carries out what this client submits, into its own arenas of results.
    with hoarding(HOARDER, said, native="/nowhere") as (hoarder, raw, why):
        assert "of those that are over" in why and "max_session_memory" in why
        assert raw.status().retained_bytes >= 24 * MIB
        assert tell(hoarder) == "21.0", "who lets go of them is served again"
        hoarder.wait(30)
        settle(lambda: raw.status().retained_bytes == 0)


def test_segments_of_ended_groups_count_too(said: dict[str, Any]) -> None:
    with hoarding(WRITER, said) as (hoarder, raw, why):
        assert "max_session_memory" in why, "it was refused its next group, or ended while it wrote"
        assert tell(hoarder) == "21.0", "who lets go of them is served again"
        hoarder.wait(30)
        settle(lambda: raw.status().retained_bytes == 0)


def test_a_session_that_writes_too_much_into_what_is_over_is_ended(said: dict[str, Any]) -> None:
    with hoarding(LATE_WRITER, said) as (hoarder, raw, why):
        sessions = raw.status().sessions
        assert why == "" and raw.status().retained_bytes >= 18 * MIB
        assert tell(hoarder) == "written"
        settle(lambda: raw.status().sessions == sessions - 1)
        assert 36 * MIB <= raw.status().retained_bytes <= raw.status().arena_bytes <= LIMIT * MIB
        assert asked(said["address"], ANN, "collective")["collective"] == ("ok", "shared memory")
        assert tell(hoarder) == "21.0", "who lets go of them is served again"
        hoarder.wait(30)
        settle(lambda: raw.status().retained_bytes == 0)


def test_results_that_a_process_keeps_count_of_its_user_when_its_sessions_have_ended(said: dict[str, Any]) -> None:
    with hoarding(RECONNECTING, said, native="/nowhere") as (hoarder, raw, why):
        assert "those that are over" in why and "max_session_memory" in why
        assert raw.status().retained_bytes >= 24 * MIB
        assert tell(hoarder) == "21.0", "who lets go of them is served again"
        hoarder.wait(30)
        settle(lambda: raw.status().retained_bytes == 0)
