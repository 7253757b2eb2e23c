"""`collectived launch` whose daemons are killed: running groups go on, joins complete, clients can come back."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.forked_launch import start_launcher
from tests.waiting import settle

from collectived_launcher.status.discovery import Unreachable, find_target, request_status
from collectived_proto.types import unscoped_name
from collectived_proto.v1 import status_pb2

pytestmark = pytest.mark.timeout(90)
PATIENCE = 40.0

# `add_up` ends on all ranks at the same instance, once rank 0 has seen the file `over`.
LOOP = """
import os, sys, time
import numpy as np
import collectived as cd

over = os.path.join(os.environ["XDG_RUNTIME_DIR"], "over")

def add_up(group):
    mine = np.arange(1000, dtype=np.float32) + group.rank
    right = group.size * np.arange(1000) + sum(range(group.size))
    rounds = last = 0
    while not last:
        assert (group.all_reduce("sum", mine) == right).all()
        last = group.all_reduce("max", int(group.rank == 0 and os.path.exists(over)))
        rounds += 1
        time.sleep(0.01)  # computing
        if group.rank == 0 and rounds % 10 == 1:
            print("round", rounds, flush=True)
    print(group.name, "is right", flush=True)
"""


class Launch:
    """A running `collectived launch` of two workers with so many clients each."""

    def __init__(self, folder: Path, program: str, *options: str, clients: int) -> None:
        self.folder = folder
        self._said = ""
        shape = ("--workers", "2", "--clients", str(clients))
        command = [sys.executable, "-m", "collectived_launcher", "launch", *shape, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = start_launcher([*command, "--", sys.executable, "-c", program], environment)

    def hear(self, word: str, count: int = 1) -> str:
        """Waits until clients have said this so often; all that they have said until then."""
        assert self.process.stdout
        heard = ""
        while count:
            line = self.process.stdout.readline()
            assert line, f"nobody said {word!r}: {self.ended()}"
            heard += line
            count -= word in line
        return heard

    def kill(self, *names: str) -> None:
        """Returns when the launcher has said so."""
        for name in names:
            self.signal(name, signal.SIGKILL)
        patterns = {rf"^collectived: {name} .* died: killed by signal 9" for name in names}
        assert self.process.stderr
        while patterns:
            line = self.process.stderr.readline()
            assert line, f"nobody said {patterns}: {self.ended()}"
            self._said += line
            patterns = {pattern for pattern in patterns if not re.search(pattern, line)}

    def signal(self, name: str, signum: int) -> None:
        """To the daemon of that name, if there is one."""
        for pid, words in processes(self.folder):
            if _is(name, words):
                os.kill(pid, signum)

    def status(self, *facts: Callable[[status_pb2.StatusReply], bool]) -> status_pb2.StatusReply:
        """What `collectived status` is told, as soon as all of that is true."""
        reply = None

        def told() -> status_pb2.StatusReply | None:
            nonlocal reply
            with contextlib.suppress(Unreachable):
                reply = request_status(find_target(None, None, {}))
                return reply if all(fact(reply) for fact in facts) else None
            return None

        try:
            return settle(told, PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"it did not come about: {reply}") from error

    def end(self) -> tuple[int, str]:
        """Tells the clients that it is over; the launcher's exit status and all that was on its standard error."""
        (self.folder / "over").touch()
        return self.ended()

    def ended(self) -> tuple[int, str]:
        assert self.process.stdout and self.process.stderr
        # Not `communicate`, which reads the pipe itself: what `readline` has taken in beyond its line would be lost.
        with self.process.stdout as stdout, self.process.stderr as stderr, ThreadPoolExecutor(1) as pool:
            pool.submit(stdout.read)
            self._said += stderr.read()
        return self.process.wait(PATIENCE), self._said


def _is(name: str, command: list[str]) -> bool:
    kind, _, task = name.partition(" ")
    return kind in command and (not task or ["--task", task] == command[command.index("--task") :][:2])


def processes(folder: Path) -> list[tuple[int, list[str]]]:
    """Those that live with this runtime directory, and their command lines."""
    mark = f"XDG_RUNTIME_DIR={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append((int(entry.name), (entry / "cmdline").read_text().split("\0")))
    return found


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Launch]]:
    """Starts jobs in a runtime directory of their own, in which nothing may be left in the end."""
    folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    for name in ("COLLECTIVED_WORKER", "COLLECTIVED_JOB", "COLLECTIVED_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    made: list[Launch] = []

    def start(program: str, *options: str, clients: int = 1) -> Launch:
        made.append(Launch(folder, program, *options, clients=clients))
        return made[-1]

    yield start
    left = processes(folder)
    files = {path.name for path in folder.iterdir()} - {"over"}
    for job in made:
        with job.process:
            job.process.kill()
    shutil.rmtree(folder)
    assert not left, f"processes were left behind: {left}"
    assert not files, f"files were left behind: {files}"


def connected(*tasks: int) -> Callable[[status_pb2.StatusReply], bool]:
    """Whether exactly these workers are."""
    return lambda reply: [row.task for row in reply.workers if row.connected] == list(tasks)


# All ranks but 0 join a second group from the beginning; rank 0 does so when the first one is done.
JOIN_AFTER = f"""
{LOOP}
from concurrent.futures import ThreadPoolExecutor

with cd.connect() as session, session.join() as group, ThreadPoolExecutor(1) as pool:
    joining = pool.submit(session.join, "after") if group.rank else None
    add_up(group)
    with joining.result() if joining else session.join("after") as after:
        add_up(after)
"""
ONCE = f"""
{LOOP}
with cd.connect() as session, session.join() as group:
    print("joined", flush=True)
    add_up(group)
"""
RECOVERS = f"""
{LOOP}
def connected():
    while True:
        try:
            return cd.connect()
        except cd.errors.UnavailableError:  # the worker is on its way back
            time.sleep(0.02)

done = False
while not done:
    with connected() as session:
        try:
            group = session.join()
            print("joined", flush=True)
            add_up(group)
            done = True
        except cd.errors.UnavailableError as error:
            print("rank", os.environ["RANK"], "heard:", error, flush=True)
"""


def forming(name: str, present: int) -> Callable[[status_pb2.StatusReply], bool]:
    """Whether that many ranks wait in a group for the others."""
    return lambda reply: (
        [len(group.members) for group in reply.groups if (unscoped_name(group.name), group.state) == (name, "forming")]
        == [present]
    )


def ready(name: str) -> Callable[[status_pb2.StatusReply], bool]:
    return lambda reply: (name, "ready") in [(unscoped_name(group.name), group.state) for group in reply.groups]


def generation(reply: status_pb2.StatusReply, name: str = "world") -> int:
    (number,) = [group.generation for group in reply.groups if unscoped_name(group.name) == name]
    return number


def test_a_loop_goes_on_without_its_coordinator_and_a_join_completes_with_the_next_one(launch: Any) -> None:
    job = launch(JOIN_AFTER, clients=2)
    job.hear("round 11")
    job.status(connected(0, 1), ready("world"), forming("after", 3))
    job.kill("coordinator")
    job.hear("round", 3)
    status, said = job.end()
    assert (status, said.count("Traceback")) == (0, 0), said
    assert said.endswith("collectived: coordinator was started again once: killed by signal 9 (SIGKILL)\n")


def test_a_coordinator_that_came_back_knows_groups_and_joins_and_its_epoch_is_larger(launch: Any) -> None:
    job = launch(JOIN_AFTER)
    facts = (connected(0, 1), ready("world"), forming("after", 1))
    before = job.status(*facts)
    job.kill("coordinator")
    after = job.status(*facts, lambda reply: reply.coordinator.pid != before.coordinator.pid)
    assert after.coordinator.epoch > before.coordinator.epoch
    assert (before.coordinator.restarted, after.coordinator.restarted) == (False, True)
    assert after.coordinator.address == before.coordinator.address
    assert generation(after) == generation(before)
    status, said = job.end()
    assert (status, said.count("Traceback")) == (0, 0), said


def test_clients_of_a_killed_worker_are_told_so_and_can_connect_to_the_next_one(launch: Any) -> None:
    job = launch(RECOVERS, clients=2)
    job.hear("round 11")
    before = job.status(connected(0, 1), ready("world"))
    job.kill("worker 0")
    heard = job.hear("heard:", 4)
    job.hear("round", 1)
    after = job.status(connected(0, 1), ready("world"), lambda reply: generation(reply) > generation(before))
    status, said = job.end()
    assert (status, said.count("Traceback")) == (0, 0), said
    for rank in (0, 1):
        assert f"rank {rank} heard: worker 0 (at {before.workers[0].address}) is lost" in heard
    assert heard.count("connect and join again") == 2
    old, new = before.workers[0], after.workers[0]
    assert (old.task, old.address, old.incarnation == new.incarnation) == (new.task, new.address, False)
    assert before.workers[1].incarnation == after.workers[1].incarnation


def test_with_restarts_clients_of_a_killed_worker_come_back_and_finish_with_the_right_sums(launch: Any) -> None:
    job = launch(ONCE, "--max-restarts", "1", clients=2)
    job.hear("round 11")
    job.kill("worker 1")
    job.hear("joined", 4)
    status, said = job.end()
    assert status == 0, said
    for rank in range(4):
        assert re.search(rf"^collectived: rank {rank} .*: exit status 1; starting it again \(1 of 1\)", said, re.M)
    for rank in (2, 3):
        assert re.search(rf"^\[rank {rank}\] .*UnavailableError: worker 1 .*; connect and join again$", said, re.M), (
            said
        )


def test_both_daemons_killed_at_once_come_back(launch: Any) -> None:
    job = launch(ONCE, "--max-restarts", "2")
    job.hear("joined", 2)
    job.kill("coordinator", "worker 0")
    job.hear("joined", 2)
    status, said = job.end()
    assert status == 0, said
    assert "coordinator was started again once" in said and "worker 0 was started again once" in said


def test_a_worker_that_has_used_up_its_restarts_fails_the_job(launch: Any) -> None:
    job = launch(RECOVERS, "--daemon-restarts", "1", "--grace", "0.2", clients=2)
    job.hear("joined", 4)
    before = job.status(connected(0, 1))
    job.kill("worker 1")
    job.status(connected(0, 1), lambda reply: reply.workers[1].pid != before.workers[1].pid)
    job.kill("worker 1")
    status, said = job.ended()
    assert status == 1
    assert "ranks 2, 3 lost their worker; their groups get errors; it was started again once within 5 min" in said
    assert re.search(r"^collectived: first failure: worker 1 \(pid \d+\): killed by signal 9 \(SIGKILL\)$", said, re.M)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL], ids=lambda signum: signum.name)
def test_a_launcher_that_is_ended_while_its_daemons_are_away_leaves_nothing(launch: Any, signum: int) -> None:
    job = launch(ONCE)
    job.hear("joined", 2)
    job.kill("coordinator", "worker 0")
    left = [os.pidfd_open(pid) for pid, _ in processes(job.folder)]
    job.process.send_signal(signum)
    status, said = job.ended()
    assert status == (130 if signum == signal.SIGINT else -signum), said
    for descriptor in left:
        with contextlib.closing(os.fdopen(descriptor, "rb", buffering=0)):
            assert select.select([descriptor], [], [], PATIENCE)[0]


@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL], ids=lambda signum: signum.name)
def test_without_a_coordinator_status_tells_what_workers_know(launch: Any, signum: int) -> None:
    job = launch(ONCE, "--daemon-restarts", "0", "--grace", "60")
    job.hear("round 1")
    job.signal("coordinator", signum)
    command = [sys.executable, "-m", "collectived_launcher", "status"]
    done = subprocess.run(
        command, text=True, capture_output=True, timeout=PATIENCE, env={**os.environ, "COLUMNS": "300"}
    )
    job.signal("coordinator", signal.SIGCONT)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.replace("\n", " ")
    why = r"(the coordinator at unix:.* does not answer .*|no answer for the whole job .*)"
    assert re.match(rf"WARNING  {why}: this is what workers know", shown)
    assert "coordinator  not reachable" in shown
    assert re.search(r" world +seen from here +2 ", shown)
    status, said = job.end()
    assert status == (0 if signum == signal.SIGSTOP else 1), said
