"""docs/operate/troubleshooting.md is run as it stands: its programs, and its commands in their order.

A command that ends with `&` is a job that goes on until its section is over; the next command comes when the job is in
the state that the section is about. Each line that is shown must come out, apart from numbers that differ from run to
run; `…` stands for any lines.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from collectived_launcher.status.discovery import find_target, request_status
from collectived_proto.v1.status_pb2 import StatusReply

PAGE = Path(__file__).parents[2] / "docs" / "operate" / "troubleshooting.md"
PATIENCE = 60.0
_KEPT = r"ranks? \d+(?:, \d+)*|#\d+|\.py:\d+|(?:mode|uid) 0\d+|\d+ of \d+ ranks?|exit status \d+|_arrive\":\d+"
_ELLIPSIS = "…"


def sections() -> dict[str, str]:
    """The body of each section, by the title of the innermost heading."""
    parts = re.split(r"^###? (.*)\n", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {title: body for title, body in zip(parts[::2], parts[1::2], strict=True) if "```console" in body}


def programs() -> dict[str, str]:
    return dict(re.findall(r"^`(\w+\.py)`:\n\n```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def steps(body: str) -> Iterator[tuple[str, list[str]]]:
    """(command, the lines that are shown below it), in order."""
    for block in re.findall(r"^```console\n(.*?)^```$", body, re.MULTILINE | re.DOTALL):
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *shown = step.splitlines()
            yield command, [line for line in shown if line != _ELLIPSIS]


def plain(text: str) -> str:
    """Without what differs from run to run: numbers but those that are the point, paths, hosts, layout."""
    text = re.sub(r"(?<![\w:.])(unix:)?/(?!job:)[\w./-]+", "PATH", text)
    text = re.sub(r"host [\w.-]+", "host H", text)
    text = re.sub(rf"({_KEPT})|\d+(?:\.\d+)?", lambda found: found[1] or "N", text)
    return " ".join(re.sub("─+", "─", text).split())


class Stage:
    """A shell in a folder with the programs, and a runtime directory of its own."""

    def __init__(self, folder: Path, runtime: str) -> None:
        self._folder = folder
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": runtime}
        self._job: subprocess.Popen[bytes] | None = None
        for name, source in programs().items():
            (folder / name).write_text(source)

    def run(self, command: str) -> str:
        done = subprocess.run(self._shell(command), timeout=PATIENCE, **self._place(subprocess.PIPE))
        return str(done.stdout.decode())

    def start(self, command: str) -> None:
        with (self._folder / "job.txt").open("wb") as file:
            self._job = subprocess.Popen(self._shell(f"exec {command}"), **self._place(file))

    def said(self) -> str:
        """What the job has printed so far."""
        return (self._folder / "job.txt").read_text()

    def end(self) -> None:
        if self._job is not None:
            self._job.send_signal(signal.SIGTERM)
            try:
                self._job.wait(PATIENCE)
            finally:
                self._job.kill()
                self._job.wait()
            self._job = None

    def _shell(self, command: str) -> list[str]:
        return ["bash", "-c", command]

    def _place(self, output: object) -> dict[str, Any]:
        return {
            "cwd": self._folder,
            "env": self._environment,
            "stdin": subprocess.DEVNULL,
            "stdout": output,
            "stderr": subprocess.STDOUT,
        }


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    for name in ("COLLECTIVED_WORKER", "COLLECTIVED_JOB", "COLLECTIVED_TIMEOUT", "COLUMNS", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        made = Stage(tmp_path, runtime)
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


def misses_rank_2() -> bool:
    seen = reply()
    flights = [flight for group in seen.groups for flight in group.in_flight] if seen else []
    return any(list(flight.missing) == [2] and flight.seconds > 1.2 for flight in flights)


def has_run_for_a_while() -> bool:
    seen = reply()
    return seen is not None and any(group.collectives_done >= 40 for group in seen.groups)


def forms_without_rank_2() -> bool:
    seen = reply()
    return seen is not None and any("2 of 3 ranks here" in group.waiting_for for group in seen.groups)


STATES = {"hangs.py": misses_rank_2, "slow.py": has_run_for_a_while, "joins.py": forms_without_rank_2}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("title", list(sections()))
def test_what_the_page_shows_comes_out(title: str, stage: Stage) -> None:
    for command, shown in steps(sections()[title]):
        if command.endswith("&"):
            stage.start(command.removesuffix("&"))
            (program,) = [name for name in STATES if name in command]
            until(STATES[program], f"{program} did not come to the state that this is about:\n{stage.said()}")
            until(partial(_all_said, shown, stage), f"{missing(shown, stage.said())} in:\n{stage.said()}")
        else:
            if "launch" in command:
                stage.end()
            said = stage.run(command)
            assert not missing(shown, said), f"$ {command}\n{said}"


def _all_said(shown: list[str], stage: Stage) -> bool:
    return not missing(shown, stage.said())


def missing(shown: list[str], said: str) -> list[str]:
    """Lines of the page that did not come out."""
    found = plain(said)
    return [line for line in shown if plain(line) not in found]


def test_every_command_of_ours_on_the_page_exists() -> None:
    from collectived_launcher.__main__ import collectived

    for body in sections().values():
        for command, _ in steps(body):
            for verb in re.findall(r"\bcollectived ([a-z]+)", command):
                assert verb in collectived.commands, command


def test_every_program_of_the_page_is_staged() -> None:
    assert set(programs()) == set(STATES)
