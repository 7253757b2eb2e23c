"""Daemons that stay: up, run, down, with real processes; each test leaves no process, socket or file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.launcher.conftest import Place
from tests.forked_launch import run_launcher, start_launcher
from tests.waiting import settle

PATIENCE = 30.0
MEAN = """
import collectived as cd
with cd.connect() as session, session.join() as group:
    print(group.rank, group.size, group.all_reduce("sum", 1.0), flush=True)
"""
HALF = """
import collectived as cd
with cd.connect() as session, session.join() as group:
    group.all_reduce("sum", 1.0)
    work = group.all_reduce("sum", 1.0, async_op=True) if group.rank == 0 else group.recv(0, async_op=True)
    print("busy", flush=True)
    work.wait()
"""
BUSY = """
import collectived as cd
with cd.connect() as session, session.join() as group:
    group.all_reduce("sum", 1.0)
    print("busy", flush=True)
    while True:
        group.all_reduce("sum", 1.0)
"""
WORKER = "[worker]\nmemory_limit = '64MiB'\ndrain_seconds = 5\n"
SSH = """#!/bin/sh
# Stands for OpenSSH's client: every "host" is this one, with a runtime folder of its own.
[ "$1" = "-G" ] && {{ echo "hostname 127.0.0.1"; exit 0; }}
for word; do host="$last"; last="$word"; done
mkdir -p -m 700 "{folder}/$host"
XDG_RUNTIME_DIR="{folder}/$host" exec sh -c "$last"
"""


class Lab:
    """A cluster of this test."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place, self.folder = place, folder
        self.file = folder / "lab.toml"
        self.file.write_text(f'hosts = ["localhost:2"]\n{WORKER}')
        self.ssh = folder / "ssh"
        self.ssh.write_text(SSH.format(folder=place.folder))
        self.ssh.chmod(0o700)

    def do(self, verb: str, *words: str, status: int = 0) -> str:
        """Runs `collectived VERB WORDS`; what it prints."""
        command = [sys.executable, "-m", "collectived_launcher", verb, *words]
        done = run_launcher(command, self.place.environment, self.folder, 2 * PATIENCE)
        assert done.returncode == status, (done.stdout, done.stderr)
        return done.stdout + done.stderr

    @contextlib.contextmanager
    def running(self, program: str) -> Iterator[None]:
        """`collectived run` of a program that says "busy" on each rank, and is to fail."""
        command = [sys.executable, "-m", "collectived_launcher", "run", "--", sys.executable, "-c", program]
        with start_launcher(command, self.place.environment) as job:
            busy = 0
            while busy < 2:
                line = job.stdout.readline()
                assert line, "the job ended early"
                busy += "busy" in line
            yield
            assert job.wait(PATIENCE) == 1

    def known(self, host: str = "") -> dict[str, Any]:
        text = (self.place.folder / host / "collectived/lab/supervisor.json").read_text()
        found: dict[str, Any] = json.loads(text)
        return found

    def published(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.place.folder / "collectived/lab.json").read_text())
        return found

    def pid_of(self, daemon: str) -> int:
        return int(self.known()["daemons"][daemon]["pid"])

    def nothing_is_left(self) -> bool:
        return not self.place.processes() and not any((self.place.folder / "collectived").glob("*"))


@pytest.fixture
def lab(place: Place, tmp_path: Path) -> Iterator[Lab]:
    made = Lab(place, tmp_path)
    yield made
    for pid in place.processes():  # of a test that failed
        os.kill(pid, signal.SIGKILL)
    settle(lambda: not place.processes())
    for path in place.folder.iterdir():  # "hosts" that are empty
        path.rmdir()


@pytest.mark.timeout(150)
def test_daemons_stay_come_back_and_are_used_by_one_job_after_another(lab: Lab) -> None:
    first = lab.do("up", "lab.toml")
    assert first.startswith("localhost: started coordinator (pid ") and "worker 0 (pid " in first
    folder = lab.place.folder / "collectived/lab"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    # Again: nothing is started, and what runs is said.
    assert lab.do("up", "lab.toml") == first.replace("started", "runs already:")
    # Any shell of this user finds them.
    assert json.loads(lab.do("status", "--json"))["coordinator"]["job"] == "lab"
    out = lab.do("run", "--", sys.executable, "-c", MEAN)  # as many clients as the host has slots
    assert out.splitlines()[0].startswith("1 worker × 2 clients = 2 ranks on localhost")
    assert sorted(out.splitlines()[1:]) == ["[rank 0] 0 2 2.0", "[rank 1] 1 2 2.0"]
    # A worker that is killed comes back, and serves the next job.
    killed = lab.pid_of("worker 0")
    os.kill(killed, signal.SIGKILL)

    def serves_again() -> bool:
        worker = lab.known()["daemons"]["worker 0"]  # read once: it has no pid while it restarts
        return bool(worker["state"] == "serving" and worker["pid"] != killed)

    settle(serves_again)
    assert lab.known()["daemons"]["worker 0"]["restarts"] == 1
    out = lab.do("run", "--cluster", "lab.toml", "--", sys.executable, "-c", MEAN)
    assert sorted(out.splitlines()[1:]) == ["[rank 0] 0 2 2.0", "[rank 1] 1 2 2.0"]
    # A drained worker stays away until `up` is said again.
    assert "all that ran has finished" in lab.do("drain")
    settle(lambda: lab.known()["daemons"]["worker 0"]["state"] == "drained")
    for words in ((), ("--cluster", "lab.toml")):  # no job is smaller than it seems
        out = lab.do("run", *words, "--", "true", status=3)
        assert re.search(r"worker 0 on localhost is drained\n +collectived up \S*lab.toml starts again", out), out
    assert "worker 0 (pid " in lab.do("up", "lab.toml") and lab.known()["daemons"]["worker 0"]["state"] == "serving"
    # A file that says something else is not taken for what runs.
    lab.file.write_text(lab.file.read_text().replace("64MiB", "32MiB"))
    assert "runs already, but not as this file says it" in lab.do("up", "lab.toml", status=1)
    assert lab.do("down", "lab.toml") == "localhost: ended\n"
    assert lab.nothing_is_left()
    assert lab.do("down", "lab.toml") == "localhost: nothing runs\n"


def test_a_failing_program_fails_the_run_and_nothing_else(lab: Lab) -> None:
    lab.do("up", "lab.toml")
    program = "import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)"
    out = lab.do("run", "--clients", "2", "--", sys.executable, "-c", program, status=1)
    assert "first failure: rank 1" in out and "exit status 3" in out
    assert lab.known()["daemons"]["worker 0"]["state"] == "serving"
    assert lab.do("down", "--now", "lab.toml") == "localhost: ended\n"
    assert lab.nothing_is_left()


@pytest.mark.timeout(150)
def test_what_draining_cuts_is_told_by_down(lab: Lab) -> None:
    lab.file.write_text('hosts = [{ name = "localhost", workers = 2 }]\n' + WORKER.replace("5", "1"))
    lab.do("up", "lab.toml")
    with lab.running(HALF):
        text = lab.do("down", "lab.toml", status=1)
    assert re.search(r"localhost: cut: all_reduce\(sum\) #1 of group '\S+' at .*; rank 1 did not come to it\n", text)
    assert text.count("cut: all_reduce") == 1 and "localhost: ended\n" in text
    assert lab.nothing_is_left()
    lab.do("up", "lab.toml")
    with lab.running(HALF):
        assert lab.do("down", "--now", "lab.toml") == "localhost: ended\n"
    assert lab.nothing_is_left()


@pytest.mark.timeout(150)
def test_two_workers_in_the_midst_of_work_are_drained(lab: Lab) -> None:
    lab.file.write_text(f'hosts = [{{ name = "localhost", workers = 2 }}]\n{WORKER}')
    lab.do("up", "lab.toml")
    with lab.running(BUSY):
        assert "all that ran has finished" in lab.do("drain", "--timeout", "10s")
    settle(lambda: [one["state"] for one in lab.known()["daemons"].values()] == ["serving", "drained", "drained"])
    # Nobody is left to run anything, and that is said, until `up` is said again.
    settle(lambda: not lab.published()["workers"])
    assert lab.published()["away"] == ["worker 0 (drained)", "worker 1 (drained)"]
    nothing = lab.do("run", "--", sys.executable, "-c", "pass", status=3)
    assert "worker 0 on localhost is drained\n    worker 1 on localhost is drained\n" in nothing
    assert "worker 1 (drained)" in lab.do("drain", status=3)
    lab.do("up", "lab.toml")
    [first, _] = lab.published()["workers"]
    assert "all that ran has finished" in lab.do("drain", "--worker", first)
    settle(lambda: len(lab.published()["workers"]) == 1)
    assert "worker 0 on localhost is drained" in lab.do("run", "--", sys.executable, "-c", "pass", status=3)
    assert "worker 0 (drained) is away, and was skipped\n" in lab.do("drain")
    assert lab.do("down", "lab.toml") == "localhost: ended\n"
    assert lab.nothing_is_left()


def test_a_supervisor_that_is_killed_takes_all_with_it(lab: Lab) -> None:
    lab.do("up", "lab.toml")
    os.kill(int(lab.known()["pid"]), signal.SIGKILL)
    settle(lab.nothing_is_left)
    assert lab.do("down", "lab.toml") == "localhost: nothing runs\n"


@pytest.mark.timeout(150)
def test_hosts_are_taken_down_and_up_one_by_one(lab: Lab) -> None:
    """What reaches them is a stand-in for ssh; each has a runtime folder of its own."""
    pid = os.getpid()  # nobody else has an address of the loopback that is made of it, and so all its ports are ours
    address = f"127.{1 + (pid >> 16 & 63)}.{pid >> 8 & 255}.{pid & 255}"
    tables = "".join(f"[[hosts]]\nname = '{name}'\naddress = '{address}'\n" for name in "ab")
    lab.file.write_text(f"{tables}{WORKER}")
    ssh = ("--ssh", str(lab.ssh))
    assert "no coordinator runs there" in lab.do("up", *ssh, "--only", "b", "lab.toml", status=1)
    lines = lab.do("up", *ssh, "lab.toml").splitlines()
    assert [line.split(" (pid")[0] for line in lines] == ["a: started coordinator", "b: started worker 1"]
    assert lab.do("down", *ssh, "--only", "b", "lab.toml") == "b: ended\n"
    assert lab.do("up", *ssh, "--only", "b", "lab.toml").startswith("b: started worker 1")
    out = lab.do("run", *ssh, "--cluster", "lab.toml", "--", sys.executable, "-c", MEAN)
    assert out.splitlines()[0].startswith("2 workers × 1 client = 2 ranks on a, b")
    assert sorted(out.splitlines()[1:]) == ["[rank 0] 0 2 2.0", "[rank 1] 1 2 2.0"]
    assert lab.do("down", *ssh, "lab.toml") == "b: ended\na: ended\n"
    assert not lab.place.processes()


def test_logs_of_all_hosts_are_shown(lab: Lab) -> None:
    assert "you have no cluster or job running on this host" in lab.do("logs", status=3)
    file = lab.folder / "two.toml"
    file.write_text(f'name = "two"\nhosts = ["localhost", "b"]\n{WORKER}')
    lab.do("up", "two.toml", "--ssh", str(lab.ssh))
    assert "b: nothing is logged by worker 1" in lab.do("logs", "b", "--ssh", str(lab.ssh))
    for host, log in (("", "coordinator"), ("", "worker-0"), ("b", "worker-1")):
        with (lab.place.folder / host / f"collectived/two/logs/{log}.log").open("a") as file_of_daemon:
            file_of_daemon.write(f"first of {log}\nsecond of {log}\n")
    every = lab.do("logs", "--ssh", str(lab.ssh)).splitlines()
    assert {"[localhost coordinator] first of coordinator", "[localhost worker 0] second of worker-0"} < set(every)
    assert "[b worker 1] second of worker-1" in every
    one = lab.do("logs", "b", "--ssh", str(lab.ssh), "--lines", "1").splitlines()
    assert "[worker 1] second of worker-1" in one and "[worker 1] first of worker-1" not in one
    found = json.loads(lab.do("logs", "localhost", "--json"))
    assert found["localhost"]["worker 0"][-1] == "second of worker-0"
    assert "'c' is no host of cluster 'two'" in lab.do("logs", "c", status=2)
    lab.do("down", "two.toml", "--ssh", str(lab.ssh))
    said = lab.do("logs", "b", "--cluster", "two.toml", "--ssh", str(lab.ssh), status=1)
    assert "b: nothing of cluster 'two' runs there" in said
    assert lab.nothing_is_left()


def test_what_is_wrong_is_said_before_anything_starts(lab: Lab) -> None:
    assert "no host of cluster 'lab'; hosts: localhost" in lab.do("up", "--only", "b", "lab.toml", status=2)
    assert "cannot be read" in lab.do("up", "nowhere.toml", status=2)
    assert "you have no daemons running on this host" in lab.do("run", "--", sys.executable, "-c", "pass", status=3)
    assert "cluster 'lab' does not run; collectived up" in lab.do(
        "run", "--cluster", "lab.toml", "--", sys.executable, "-c", "pass", status=3
    )


@pytest.mark.parametrize(
    ("verb", "ssh", "status", "said"),
    [
        ("up", "/no/such/ssh", 2, "--ssh '/no/such/ssh': no such program"),
        ("down", "ssh 'x", 2, "is no command: No closing quotation"),
        ("run", "", 2, "--ssh '': no such program"),
        ("up", "no-interpreter", 3, "a cannot be used: "),
        ("run", "no-interpreter", 3, "a cannot be used: "),
        ("down", "false", 3, "a cannot be used (ssh): "),
    ],
)
def test_an_ssh_that_is_not_to_be_used_is_named(lab: Lab, verb: str, ssh: str, status: int, said: str) -> None:
    lab.file.write_text(f"hosts = ['a', 'b']\n{WORKER}")
    broken = lab.folder / "no-interpreter"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o700)
    words = ("--cluster", "lab.toml", "--", "true") if verb == "run" else ("lab.toml",)
    out = lab.do(verb, "--ssh", str(broken) if ssh == broken.name else ssh, *words, status=status)
    assert said in out and "Traceback" not in out, out


def test_a_host_that_does_not_answer_is_waited_for_aloud_and_ctrl_c_says_what_stays(lab: Lab) -> None:
    lab.file.write_text(f"hosts = ['a', 'b']\n{WORKER}")
    lab.ssh.write_text('#!/bin/sh\n[ "$1" = -G ] || exec sleep 1000\n')
    command = [sys.executable, "-m", "collectived_launcher", "up", "--ssh", str(lab.ssh), str(lab.file)]
    waiting = lab.place.run_in_background(command)
    said = r"^collectived: connecting to the hosts, \d+ s so far: 0 of 2 ready, still to come: a \(ssh\), b \(ssh\)$"
    lab.place.error_with(waiting, said)
    waiting.send_signal(signal.SIGINT)
    _, err = waiting.communicate(timeout=PATIENCE)
    assert waiting.returncode == 130
    assert "collectived: interrupted: daemons that were started stay; `collectived down` ends them" in err


def test_daemons_that_cannot_start_are_told_with_the_ends_of_their_logs(lab: Lab) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        lab.file.write_text(f"hosts = ['localhost']\n[coordinator]\nhttp = '{at}'\n")
        out = lab.do("up", "lab.toml", status=1)
    assert re.search(r"^localhost: coordinator failed 3 times; the end of its log:\n    .*in use", out), out
    assert "within" not in out and "worker" not in out
    assert lab.nothing_is_left()
