"""A client that asks, keeps and drops until the memory of the host would be full: nobody is killed for it."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
from tests.e2e.security.conftest import ROOT, needs_root
from tests.e2e.security.test_hoarding import BEGIN, BOB, MIB, RECONNECTING
from tests.waiting import settle

import collectived as cd

LIMIT, CGROUP = 128, 512
Worker = Callable[..., dict[str, Any]]
pytestmark = [needs_root, pytest.mark.timeout(150)]

# Has 24 arenas of 64 MiB one after the other, and keeps the descriptor of each.
ARENAS = (
    "from collectived.calls.timeout import Timeout"
    + BEGIN
    + """
from collectived_proto.ipc import arena
attach, kept = arena.attach, []
def keep(number, size, descriptor, *, writable):
    kept.append(os.dup(descriptor))
    return attach(number, size, descriptor, writable=writable)
arena.attach = keep
session, why = cd.connect(address), ""
for number in range(24):
    asked = session._transport.socket.request_arena(64 << 20, Timeout.of(20.0))
    session._transport.socket.release_arena(asked.number)
print(json.dumps([len(kept), sum(os.fstat(one).st_blocks * 512 for one in kept), why]), flush=True)
sys.stdin.readline()
"""
)
# Keeps the result of each of its groups, with a session for each, as long as it gets any.
RESULTS = (
    RECONNECTING.replace("1 << 20", "4 << 20")
    .replace("json.dumps([sum(", "json.dumps([len(kept), sum(")
    .split("for one in kept:\n    os.close")[0]
)


class MemoryCgroup:
    """A control group for the memory of a worker, below that of this process."""

    def __init__(self, folder: Path, *, unified: bool) -> None:
        self.folder = folder
        self._limit = "memory.max" if unified else "memory.limit_in_bytes"
        self._peak = "memory.peak" if unified else "memory.max_usage_in_bytes"
        self._events = "memory.events" if unified else "memory.oom_control"

    def limit(self, size: int) -> None:
        """Let its processes have no more than that; where memory can be swapped out the kernel may do so."""
        (self.folder / self._limit).write_text(f"{size}\n")

    @property
    def peak(self) -> int:
        return int((self.folder / self._peak).read_text())

    @property
    def killed(self) -> int:
        """Processes of it that the kernel has killed for want of memory."""
        pairs = (line.split() for line in (self.folder / self._events).read_text().splitlines())
        return int(dict(pairs)["oom_kill"])

    @property
    def within(self) -> tuple[str, ...]:
        """Begins the command of a process that is to be in it."""
        return ("sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh")


def _make_cgroup() -> MemoryCgroup:
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    root = Path("/sys/fs/cgroup")
    unified = (root / "cgroup.controllers").exists()
    above = root / own[""].strip("/") if unified else root / "memory" / own.get("memory", "").strip("/")
    if not above.is_dir():
        pytest.skip(f"no control group for memory is to be had: {above} does not exist")
    folder = above / f"collectived-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group for memory can be made here: {error}")
    made = MemoryCgroup(folder, unified=unified)
    try:
        made.limit(CGROUP * MIB)
        assert made.peak >= 0 and made.killed == 0
    except (OSError, KeyError) as error:
        folder.rmdir()
        pytest.skip(f"the control groups here do not limit memory, or do not tell of it: {error!r}")
    return made


def _remove(folder: Path) -> bool:
    with suppress(OSError):  # its last process has not gone yet
        folder.rmdir()
    return not folder.exists()


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    made = _make_cgroup()
    yield made
    settle(lambda: _remove(made.folder))


@pytest.fixture
def limited(cgroup: MemoryCgroup, worker: Worker) -> Iterator[dict[str, Any]]:
    """A worker in it, with its place."""
    yield worker("--allow-users", str(BOB), "--memory-limit", f"{LIMIT}MiB", mode=0o711, within=cgroup.within)


@contextmanager
def honest_sums(address: str) -> Iterator[list[float]]:
    """What a group of that worker has summed up meanwhile."""
    sums: list[float] = []
    over = threading.Event()

    def work() -> None:
        with cd.connect(address) as session, session.join("honest", 1) as group:
            while not over.wait(0.01):
                sums.append(group.all_reduce("sum", 21.0, timeout=10))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield sums
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(("program", "native"), [(ARENAS, ""), (RESULTS, "/nowhere")], ids=["arenas", "results"])
def test_the_kernel_kills_nobody_for_what_a_client_keeps(
    limited: dict[str, Any], cgroup: MemoryCgroup, program: str, native: str
) -> None:
    environment = {**os.environ, "COLLECTIVED_NATIVE": native} if native else dict(os.environ)
    command = [sys.executable, "-c", program, limited["address"], str(BOB)]
    with honest_sums(limited["address"]) as sums:
        hoarder = Popen(command, cwd=ROOT, env=environment, stdin=PIPE, stdout=PIPE, text=True)
        try:
            assert hoarder.stdout is not None
            kept, taken, why = json.loads(hoarder.stdout.readline())
            assert kept == 24 or (kept > 4 and "max_session_memory" in why), "it was served, or told why not"
            assert taken <= LIMIT * MIB
            before = len(sums)
            settle(lambda: len(sums) > before + 20)
        finally:
            hoarder.kill()
            hoarder.communicate()
    assert set(sums) == {21.0}
    assert cgroup.killed == 0 and cgroup.peak < CGROUP * MIB
