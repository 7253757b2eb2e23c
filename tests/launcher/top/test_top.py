"""`collectived top` in a real pseudo-terminal: it shows, obeys, and leaves all as it found it, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from collectived_proto.ipc import job_files
from collectived_proto.v1 import status_pb2 as pb
from collectived_proto.v1 import worker_pb2_grpc

PATIENCE = 30.0
COMMAND = (sys.executable, "-m", "collectived_launcher", "top")
# A program of its own, for a `preexec_fn` would make of this process a fork that other libraries' threads do not bear.
TAKES_TERMINAL = (
    *(sys.executable, "-c"),
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])",
)
ALTERNATE, BACK = b"\x1b[?1049h", b"\x1b[?1049l"
HIDDEN, SHOWN = b"\x1b[?25l", b"\x1b[?25h"


class Terminal:
    """A pseudo-terminal with one program in it, as the session of a shell would run it."""

    def __init__(self, command: tuple[str, ...], environment: dict[str, str]) -> None:
        self._ours, self._theirs = pty.openpty()
        self.resize(100, 30)
        self.before = termios.tcgetattr(self._theirs)
        self.output = b""
        self.process = subprocess.Popen(
            [*TAKES_TERMINAL, *command],
            env={**environment, "TERM": "xterm-256color"},
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
        )

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, what: str | Callable[[], bool]) -> None:
        """Reads what is shown from now on until a text is there, or until a fact holds."""
        begun = len(self.output)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if what() if callable(what) else what.encode() in self.output[begun:]:
                return
            self._hear(0.05)
        raise AssertionError(f"{what!r} did not come; the last that did: {self.output[-3000:]!r}")

    def end(self) -> int:
        """Waits until the program has ended and everything was read; its exit status."""
        self.until(lambda: self.process.poll() is not None)
        while self._hear(0):
            pass
        return self.process.returncode

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    def is_clean(self) -> bool:
        """Whether everything is as before: the settings, the screen, the cursor."""
        screen = self.output.rfind(BACK) > self.output.rfind(ALTERNATE) >= 0
        cursor = self.output.rfind(SHOWN) > self.output.rfind(HIDDEN) >= 0
        return self.settings() == self.before and screen and cursor

    def is_stopped(self) -> bool:
        """Whether the program stands still, as by Ctrl-Z."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def _hear(self, seconds: float) -> bool:
        readable, _, _ = select.select([self._ours], [], [], seconds)
        if readable:
            self.output += os.read(self._ours, 1 << 16)
        return bool(readable)


class Worker(worker_pb2_grpc.WorkerServicer):
    """Answers with whatever the test says."""

    def __init__(self) -> None:
        self.reply = pb.StatusReply(coordinator=pb.CoordinatorStatus(address="unix:/c.sock", job="j"))

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        return self.reply


class Job:
    """A job that is found in a runtime directory of its own; `answer` is what its only worker tells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
        self.environment.pop("COLLECTIVED_WORKER", None)
        self.worker = Worker()
        self.address = f"unix:{folder}/w.sock"
        self._server = grpc.server(ThreadPoolExecutor(1))
        worker_pb2_grpc.add_WorkerServicer_to_server(self.worker, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()
        self.file = job_files.write_job_file(
            job_files.JobFile("j", os.getpid(), "unix:/c.sock", (self.address,), "python train.py")
        )

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        made = Job(Path(folder))
        yield made
        made.stop()


@pytest.fixture
def top(job: Job) -> Iterator[Terminal]:
    """`collectived top` that has shown its first picture."""
    terminal = Terminal((*COMMAND, "--interval", "0.2"), job.environment)
    try:
        terminal.until("Nothing is wrong.")
        yield terminal
    finally:
        terminal.close()


def test_it_shows_what_comes_obeys_keys_follows_the_window_and_goes_with_q(top: Terminal, job: Job) -> None:
    local = top.settings()[3]
    assert not local & (termios.ICANON | termios.ECHO) and local & termios.ISIG
    job.worker.reply = pb.StatusReply(coordinator=job.worker.reply.coordinator, warnings=["worker 1 is slow"])
    top.until("worker 1 is slow")
    top.type("w")
    top.until("No workers.")
    top.type("?")
    top.until("Shift-Tab")
    top.type("\t")
    top.until("Nothing has failed.")
    top.resize(40, 12)
    top.until("…")
    top.type("p")
    top.until("paused")
    top.type("q")
    assert top.end() == 0 and top.is_clean()


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("\x03", 130),
        ("\x1c", -signal.SIGQUIT),
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGHUP, -signal.SIGHUP),
    ],
    ids=["Ctrl-C", "Ctrl-backslash", "SIGTERM", "SIGHUP"],
)
def test_signals_end_it_as_they_end_others_but_cleanly(top: Terminal, end: str | int, status: int) -> None:
    if isinstance(end, str):
        top.type(end)
    else:
        top.process.send_signal(end)
    assert top.end() == status and top.is_clean()


def test_a_silent_job_is_said_to_be_old_and_when_it_is_over_so_is_this(top: Terminal, job: Job) -> None:
    job.stop()
    top.until("no answer since")
    job.file.unlink()
    assert top.end() == 0 and top.is_clean()
    assert top.output.rstrip().endswith(b"job j is over")


def test_a_stopped_one_lends_the_terminal_to_the_shell(top: Terminal) -> None:
    top.process.send_signal(signal.SIGTSTP)
    top.until(top.is_stopped)
    top.until(top.is_clean)  # what it wrote before it stopped is read after
    top.process.send_signal(signal.SIGCONT)
    top.until("Nothing is wrong.")
    top.type("q")
    assert top.end() == 0 and top.is_clean()


def test_an_exception_is_seen_on_a_clean_terminal(job: Job) -> None:
    program = (
        "from collectived_launcher.top.terminal import Screen\n"
        "with Screen() as screen:\n"
        "    screen.draw('a picture')\n"
        "    raise RuntimeError('a fault of ours')\n"
    )
    terminal = Terminal((sys.executable, "-c", program), job.environment)
    try:
        assert terminal.end() == 1 and terminal.is_clean()
        assert b"a fault of ours" in terminal.output[terminal.output.rfind(BACK) :]
    finally:
        terminal.close()


def test_without_a_terminal_it_says_what_to_use_instead(job: Job) -> None:
    done = subprocess.run(COMMAND, env=job.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert "top needs a terminal, and standard input is none: use `collectived status`" in done.stderr


def test_nothing_running_is_said_before_the_terminal_is_taken(job: Job) -> None:
    job.file.unlink()
    terminal = Terminal(COMMAND, job.environment)
    try:
        assert terminal.end() == 3
        assert terminal.settings() == terminal.before and ALTERNATE not in terminal.output
        assert b"collectived launch" in terminal.output
    finally:
        terminal.close()
