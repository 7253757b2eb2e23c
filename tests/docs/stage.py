"""A place in which pages are tried: a shell, a folder with their programs, and a runtime directory of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest
from tests.forked_launch import start_launcher
from tests.forked_process import ForkedProcess

from collectived_launcher.status.discovery import find_target, request_status
from collectived_proto.v1.status_pb2 import StatusReply

PATIENCE = 60.0
_OF_A_SHELL = re.compile(r"[|&;<>$()`]")
_KEPT = r"ranks? \d+(?:, \d+)*|#\d+|\.py:\d+|(?:mode|uid) 0\d+|\d+ of \d+ ranks?|exit status \d+|_arrive\":\d+"


def plain(text: str) -> str:
    """Without what differs from run to run: numbers but those that are the point, paths, hosts, layout."""
    text = re.sub(r"(?<![\w:.])(unix:)?/(?!job:)[\w./-]+", "PATH", text)
    text = re.sub(r"host [\w.-]+", "host H", text)
    text = re.sub(rf"({_KEPT})|\d+(?:\.\d+)?", lambda found: found[1] or "N", text)
    return " ".join(re.sub("─+", "─", text).split())


class Stage:
    """A shell in a folder with the programs, and a runtime directory of its own."""

    def __init__(self, folder: Path, runtime: str, programs: Mapping[str, str]) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": runtime}
        self._job: ForkedProcess | None = None
        for name, source in programs.items():
            (folder / name).write_text(source)

    def run(self, command: str) -> str:
        words = shlex.split(command)
        if words[0] == "collectived" and not _OF_A_SHELL.search(command):
            with (self.folder / "said.txt").open("w+") as file, self._start(words[1:], file) as ours:
                ours.wait(PATIENCE)
                return file.read()
        done = subprocess.run(["bash", "-c", command], timeout=PATIENCE, **self._place(subprocess.PIPE))
        return str(done.stdout.decode())

    def start(self, command: str) -> None:
        words = shlex.split(command)
        assert words[0] == "collectived" and not _OF_A_SHELL.search(command), command
        with (self.folder / "job.txt").open("w") as file:
            self._job = self._start(words[1:], file)

    def said(self) -> str:
        """What the job has printed so far."""
        return (self.folder / "job.txt").read_text()

    def has_ended(self) -> bool:
        return self._job is not None and self._job.poll() is not None

    def end(self) -> None:
        if self._job is not None:
            with self._job as job:
                job.send_signal(signal.SIGTERM)
                try:
                    job.wait(PATIENCE)
                finally:
                    job.kill()
            self._job = None

    def _start(self, arguments: list[str], output: IO[str]) -> ForkedProcess:
        """The command, which says everything into that file; pages show the stacks of the programs that it starts."""
        command = [sys.executable, "-m", "collectived_launcher", *arguments]
        started = start_launcher(command, self.environment, self.folder, Path(output.name), fresh_programs=True)
        started.stdin.close()  # nobody types anything
        return started

    def _place(self, output: object) -> dict[str, Any]:
        return {
            "cwd": self.folder,
            "env": self.environment,
            "stdin": subprocess.DEVNULL,
            "stdout": output,
            "stderr": subprocess.STDOUT,
        }


@contextlib.contextmanager
def set_stage(folder: Path, programs: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A stage in that folder; in the end all that it started is gone."""
    for name in ("COLLECTIVED_WORKER", "COLLECTIVED_JOB", "COLLECTIVED_TIMEOUT", "COLUMNS", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        made = Stage(folder, runtime, programs)
        try:
            yield made
        finally:
            made.end()
        assert os.listdir(runtime) == []


def until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def reply() -> StatusReply | None:
    try:
        return request_status(find_target(None, None, os.environ))
    except Exception:  # not up yet, or too busy to answer
        return None


def missing(shown: list[str], said: str) -> list[str]:
    """Lines of the page that did not come out."""
    found = plain(said)
    return [line for line in shown if plain(line) not in found]
