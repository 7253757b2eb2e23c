"""Jobs on stand-in or real daemons, each in a runtime directory of its own, which they must leave as they found it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.forked_launch import run_launcher, start_launcher
from tests.forked_process import ForkedProcess
from tests.waiting import settle

DRIVE = "tests.e2e.launcher.run_job"
PATIENCE = 20.0
Started = subprocess.Popen[str] | ForkedProcess


class Place:
    """A private runtime directory; every process of a job started here has it in its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[Started] = []
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
        for name in ("COLLECTIVED_WORKER", "COLLECTIVED_JOB", "COLLECTIVED_TIMEOUT", "PYTHONUNBUFFERED"):
            self.environment.pop(name, None)

    def command(self, *program: str, **wish: object) -> list[str]:
        return [sys.executable, "-m", DRIVE, json.dumps(wish), *program]

    def start(self, *program: str, **wish: object) -> Started:
        """A job that the test will end."""
        return self.run_in_background(self.command(*program, **wish))

    def run_in_background(self, command: list[str]) -> Started:
        process: Started
        if command[:2] == [sys.executable, "-m"]:
            process = start_launcher(command, self.environment)
            process.stdin.close()  # nobody types anything
        else:
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
        """A job from its start to its end, on stand-in daemons, or on real ones."""
        return run_launcher(self.command(*program, **wish), self.environment, timeout=PATIENCE)

    def lines_with(self, launcher: Started, word: str, count: int) -> list[str]:
        """Reads the launcher's standard output until so many lines with this word have come; returns those."""
        found: list[str] = []
        assert launcher.stdout is not None
        while len(found) < count:
            line = launcher.stdout.readline()
            assert line, f"the launcher ended after {found}"
            if word in line:
                found.append(line.rstrip("\n"))
        return found

    def error_with(self, launcher: Started, pattern: str) -> str:
        """Reads the launcher's standard error until a line has this pattern in it; returns the line."""
        assert launcher.stderr is not None
        for line in launcher.stderr:
            if re.search(pattern, line):
                return line.rstrip("\n")
        raise AssertionError(f"the launcher ended and said nothing like {pattern!r}")

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
        return sorted(pid for pid in self.processes() if set(words) <= set(self.command_of(pid)))

    def clients(self) -> list[int]:
        """Clients that run Python, in the order in which they were started."""
        return [pid for pid in self.having(b"-c") if DRIVE.encode() not in self.command_of(pid)]

    def daemon(self, name: str) -> int:
        kind, _, task = name.encode().partition(b" ")
        (pid,) = self.having(kind, b"--task", task) if task else self.having(kind)
        return pid

    def successor(self, name: str, former: int) -> int:
        """Waits for the daemon that takes the place of one that ended."""

        def other() -> int | None:
            with contextlib.suppress(ValueError):  # there is none yet
                return pid if (pid := self.daemon(name)) != former else None
            return None

        return settle(other, PATIENCE)

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

    def command_of(self, pid: int) -> list[bytes]:
        """The arguments of a process; none when it is over."""
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return []


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
