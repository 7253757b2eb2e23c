"""`launch` on stand-in daemons: what it shows, what it returns, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

DRIVE = str(Path(__file__).with_name("drive.py"))
PATIENCE = 20.0
PYTHON = (sys.executable, "-c")
ENDS = "{signal.SIGINT, signal.SIGTERM}"
WAIT = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {ENDS}); print('up'); signal.sigwait({ENDS})"


class Place:
    """A private runtime directory; every process of a job started here has it in its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
        for name in ("COLLECTIVED_WORKER", "COLLECTIVED_JOB", "COLLECTIVED_TIMEOUT", "PYTHONUNBUFFERED"):
            self.environment.pop(name, None)

    def start(self, *program: str, **wish: object) -> subprocess.Popen[str]:
        """A job that the test will end."""
        return self.run_in_background(drive_command(*program, **wish))

    def run_in_background(self, command: list[str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=self.environment, text=True, stdout=pipe, stderr=pipe, bufsize=1)
        self._started.append(process)
        return process

    def close(self) -> None:
        """Ends what a failed test has left, and closes our ends of the pipes."""
        for process in self._started:
            with process:
                process.kill()

    def drive(self, *program: str, **wish: object) -> subprocess.CompletedProcess[str]:
        """A job on stand-in daemons, from its start to its end."""
        command = drive_command(*program, **wish)
        return subprocess.run(command, env=self.environment, text=True, capture_output=True, timeout=PATIENCE)

    def processes(self) -> list[int]:
        """Those that were started here and live."""
        mark = f"XDG_RUNTIME_DIR={self.folder}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def having(self, *words: bytes) -> list[int]:
        """Processes whose command line has all these arguments."""
        return sorted(pid for pid in self.processes() if set(words) <= set(_command(pid)))

    def clients(self) -> list[int]:
        """Clients that run Python, in the order in which they were started."""
        return [pid for pid in self.having(b"-c") if DRIVE.encode() not in _command(pid)]

    def daemon(self, name: str) -> int:
        kind, _, task = name.encode().partition(b" ")
        (pid,) = self.having(kind, b"--task", task) if task else self.having(kind)
        return pid

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))

    def await_end_of(self, pids: list[int]) -> None:
        """Returns when all of them are gone; they must not be waited for one by one by anybody else."""
        deadline = time.monotonic() + PATIENCE
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                with contextlib.closing(os.fdopen(descriptor, "rb", buffering=0)):
                    gone, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
                assert gone, f"process {pid} still lives"


def drive_command(*program: str, **wish: object) -> list[str]:
    return [sys.executable, DRIVE, json.dumps(wish), *program]


def _command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def lines_with(launcher: subprocess.Popen[str], word: str, count: int) -> list[str]:
    """Reads the launcher's standard output until so many lines with this word have come; returns those."""
    found: list[str] = []
    assert launcher.stdout is not None
    while len(found) < count:
        line = launcher.stdout.readline()
        assert line, f"the launcher ended after {found}"
        if word in line:
            found.append(line.rstrip("\n"))
    return found


@pytest.fixture
def place() -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))  # short: sockets have short paths
    here = Place(folder)
    yield here
    left, files = here.processes(), here.files()
    here.close()
    shutil.rmtree(folder)
    assert not left, f"processes were left behind: {left}"
    assert not files, f"files were left behind: {files}"


def test_output_is_shown_line_by_line_with_the_rank(place: Place) -> None:
    done = place.drive("sh", "-c", "echo out $RANK; echo err $RANK >&2")
    first, *lines = done.stdout.splitlines()
    assert first == "2 workers × 2 clients = 4 ranks on localhost (worker = daemon of a host, client = your process)"
    assert sorted(lines) == [f"[rank {rank}] out {rank}" for rank in range(4)]
    assert sorted(done.stderr.splitlines()) == [f"[rank {rank}] err {rank}" for rank in range(4)]
    assert done.returncode == 0


def test_a_python_client_shows_progress_though_its_output_is_a_pipe(place: Place) -> None:
    launcher = place.start(*PYTHON, WAIT, clients=1, workers=1)
    assert lines_with(launcher, "up", 1) == ["[rank 0] up"]
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(PATIENCE) == 130


def test_log_dir_has_one_file_per_process(place: Place, tmp_path: Path) -> None:
    place.drive("sh", "-c", "echo out $RANK; echo err >&2", log_dir=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["coordinator.log", *(f"worker-{n}.log" for n in range(2)), *(f"rank-{n}.log" for n in range(4))]
    )
    assert sorted((tmp_path / "rank-3.log").read_text().splitlines()) == ["err", "out 3"]


def test_the_summary_names_the_first_failure_first(place: Place) -> None:
    script = "test $RANK != 2 || { echo no such data >&2; exit 3; }; sleep 100"
    done = place.drive("sh", "-c", script, grace=0.1)
    assert done.returncode == 1
    summary = done.stderr[done.stderr.index("first failure") :].splitlines()
    assert re.fullmatch(r"first failure: rank 2 \(pid \d+\): exit status 3", summary[0])
    assert summary[1] == "    no such data"
    assert len(summary) == 5
    assert all("killed by signal 15 (SIGTERM), after the launcher had sent SIGTERM" in line for line in summary[2:])


def test_a_killed_client_is_told_by_its_signal(place: Place) -> None:
    done = place.drive("sh", "-c", "test $RANK != 0 || kill -9 $$", workers=1)
    assert re.search(r"first failure: rank 0 \(pid \d+\): killed by signal 9 \(SIGKILL\)", done.stderr)


def test_a_client_that_ignores_sigterm_is_killed(place: Place) -> None:
    done = place.drive("sh", "-c", "test $RANK != 1 || exit 1; trap '' TERM; sleep 100", grace=0.1, kill_after=0.1)
    assert done.returncode == 1
    assert done.stderr.count("after the launcher had sent SIGKILL") == 3


def test_others_that_end_within_the_grace_are_left_alone(place: Place) -> None:
    script = f"import os, sys; os.environ['RANK'] == '1' and sys.exit(7); {WAIT}"
    launcher = place.start(*PYTHON, script, workers=1, clients=2, grace=60)
    lines_with(launcher, "up", 1)
    os.kill(place.clients()[0], signal.SIGTERM)
    assert launcher.wait(PATIENCE) == 1
    assert launcher.stderr is not None and "sending" not in launcher.stderr.read()


def test_a_failed_client_is_started_again_with_its_rank(place: Place) -> None:
    script = 'echo rank $RANK restart $COLLECTIVED_RESTART; test "$RANK$COLLECTIVED_RESTART" != 10'
    done = place.drive("sh", "-c", script, workers=1, max_restarts=1)
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line.startswith("[rank 1]")] == [
        "[rank 1] rank 1 restart 0",
        "[rank 1] rank 1 restart 1",
    ]
    assert "exit status 1; starting it again (1 of 1)" in done.stderr


def test_processes_that_a_client_leaves_behind_end_with_it(place: Place) -> None:
    assert place.drive("sh", "-c", "sleep 100 & sleep 100 &").returncode == 0


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 1), (signal.SIGHUP, 1)])
@pytest.mark.parametrize("real", [False, True], ids=["standin", "real"])
def test_a_signal_takes_everything_down_in_order(place: Place, signum: int, status: int, real: bool) -> None:
    launcher = place.start(*PYTHON, f"{WAIT}; print('told')", real=real)
    lines_with(launcher, "up", 4)
    launcher.send_signal(signum)
    assert len(lines_with(launcher, "told", 4)) == 4
    assert launcher.wait(PATIENCE) == status


def test_a_launcher_in_the_background_of_a_script_hears_sigint_too(place: Place) -> None:
    script = f"{shlex.join(drive_command(*PYTHON, WAIT))} & echo pid $!; wait $!; echo status $?"
    shell = place.run_in_background(["sh", "-c", script])
    (pid,) = lines_with(shell, "pid", 1)
    lines_with(shell, "up", 4)
    os.kill(int(pid.split()[1]), signal.SIGINT)
    assert lines_with(shell, "status", 1) == ["status 130"]
    assert shell.wait(PATIENCE) == 0


def test_the_second_ctrl_c_kills_clients_that_do_not_listen(place: Place) -> None:
    deaf = (
        "import signal; signal.signal(signal.SIGINT, lambda *_: print('told')); print('up')\nwhile True: signal.pause()"
    )
    launcher = place.start(*PYTHON, deaf)
    lines_with(launcher, "up", 4)
    launcher.send_signal(signal.SIGINT)
    lines_with(launcher, "told", 4)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(PATIENCE) == 130


def test_ctrl_c_before_the_daemons_are_ready(place: Place) -> None:
    launcher = place.start("true", fault="mute")
    lines_with(launcher, "ranks on localhost", 1)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(PATIENCE) == 130


def test_a_reader_that_goes_away_ends_the_job(place: Place) -> None:
    launcher = place.start("sh", "-c", "while :; do echo line; done", clients=1)
    lines_with(launcher, "line", 1)
    assert launcher.stdout is not None
    launcher.stdout.close()
    assert launcher.wait(PATIENCE) == 1


@pytest.mark.parametrize("moment", ["opening", "up", "grace"])
@pytest.mark.parametrize("real", [False, True], ids=["standin", "real"])
def test_nothing_outlives_a_launcher_that_was_killed(place: Place, moment: str, real: bool) -> None:
    script = f"import os, subprocess, sys; subprocess.Popen(['sleep', '100']); {WAIT}; signal.pause()"
    launcher = place.start(*PYTHON, script, grace=60, real=real)
    if moment != "opening":
        lines_with(launcher, "up", 4)
    if moment == "grace":
        os.kill(place.clients()[0], signal.SIGKILL)
        assert launcher.stderr is not None
        assert "failed: killed by signal 9" in launcher.stderr.readline()
    witnesses = place.processes()
    launcher.kill()
    launcher.wait()
    place.await_end_of(witnesses)
    place.await_end_of(place.processes())  # those that were started while we looked


def test_a_job_goes_on_without_its_keeper(place: Place) -> None:
    launcher = place.start(*PYTHON, WAIT, workers=1, clients=1, max_restarts=1)
    lines_with(launcher, "up", 1)
    (keeper,) = place.having(b"collectived_launcher.keeper")
    os.kill(keeper, signal.SIGKILL)
    place.await_end_of([keeper])
    os.kill(place.clients()[0], signal.SIGKILL)
    lines_with(launcher, "up", 1)
    os.kill(place.clients()[0], signal.SIGTERM)
    assert launcher.wait(PATIENCE) == 0


@pytest.mark.parametrize("kind", ["coordinator", "worker"])
def test_a_daemon_that_cannot_start_is_quoted(place: Place, kind: str) -> None:
    done = place.drive("true", fault=f"refuse:{kind}")
    assert done.returncode == 1
    assert re.search(
        rf"collectived: {kind}.* \(pid \d+\) ended before it was ready: exit status 1; "
        rf"its last line: {kind}: address already in use",
        done.stderr,
    )


def test_a_daemon_that_is_never_ready_is_given_up(place: Place) -> None:
    done = place.drive("true", fault="mute:worker", ready_within=0.2)
    assert done.returncode == 1
    assert "was not ready within 0.2 s; it said nothing on standard error" in done.stderr


def test_a_daemon_that_does_not_end_in_order_is_killed_and_named(place: Place) -> None:
    done = place.drive("true", fault="deaf:worker", ended_within=0.2)
    assert done.returncode == 0
    assert len(re.findall(r"worker \d \(pid \d+\) did not end in order within 0.2 s: killed", done.stderr)) == 2


@pytest.mark.parametrize(
    ("kind", "effect"),
    [
        ("coordinator", "running groups go on, new ones cannot be formed"),
        ("worker 0", "ranks 0, 1 lost their worker; their groups get errors"),
    ],
)
def test_a_daemon_that_dies_during_the_job_is_named_and_fails_it(place: Place, kind: str, effect: str) -> None:
    launcher = place.start(*PYTHON, WAIT)
    lines_with(launcher, "up", 4)
    os.kill(place.daemon(kind), signal.SIGKILL)
    assert launcher.stderr is not None
    line = launcher.stderr.readline()
    assert re.match(rf"collectived: {kind} \(pid \d+\) died: killed by signal 9 \(SIGKILL\); {effect}$", line)
    for pid in place.clients():
        os.kill(pid, signal.SIGTERM)
    assert launcher.wait(PATIENCE) == 1
    assert f"first failure: {kind}" in launcher.stderr.read()
