"""Programs that a forked launcher starts are what they are after `exec`, and are shown as that."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.forked_launch import run_launcher

DRIVE = "tests.e2e.launcher.run_job"
BEGIN = "import os, signal, sys, threading\n"
SHOWN = f"""{BEGIN}from pathlib import Path
words = Path("/proc/self/cmdline").read_bytes().split(b"\\0")
variables = Path("/proc/self/environ").read_bytes().split(b"\\0")
print(words[-3:], b"RANK=0" in variables, sys.argv, __name__)
"""
STATE = f"""{BEGIN}
print(sorted(os.listdir("/proc/self/fd"))[:-1], os.getpgid(0) == os.getpid(), sys.stdin.read() == "", end=" ")
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL, end=" ")
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, threading.active_count())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short one: sockets have short paths."""
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as made:
        yield Path(made)


def run(program: str, folder: Path, *arguments: str) -> tuple[int, list[str], list[str]]:
    """What a job of one rank ends with, and what the rank says."""
    wish = json.dumps({"workers": 1, "clients": 1, "grace": 0.1})
    command = [sys.executable, "-m", DRIVE, wish, sys.executable, "-c", program, *arguments]
    done = run_launcher(command, {**os.environ, "XDG_RUNTIME_DIR": str(folder)}, timeout=30)
    out, err = (
        [line.removeprefix("[rank 0] ") for line in said.splitlines() if line.startswith("[rank 0]")]
        for said in (done.stdout, done.stderr)
    )
    return done.returncode, out, err


def test_a_program_is_shown_with_its_command_line_and_environment(folder: Path) -> None:
    said = run(SHOWN, folder, "one", "two")[1]
    assert said == ["[b'one', b'two', b''] True ['-c', 'one', 'two'] __main__"]


def test_a_program_has_nothing_of_its_launcher(folder: Path) -> None:
    assert run(STATE, folder)[1] == ["['0', '1', '2'] True True True True True 1"]


@pytest.mark.parametrize(
    ("program", "status", "out", "err"),
    [
        ("print(1); sys.exit()", 0, ["1"], None),
        ("sys.exit(3)", 1, [], None),
        ("sys.exit('no')", 1, [], "no"),
        ("1 / 0", 1, [], "ZeroDivisionError: division by zero"),
        ("import atexit; atexit.register(print, 'last')", 0, ["last"], None),
        ("threading.Timer(0.1, print, ['later']).start()", 0, ["later"], None),
    ],
)
def test_a_program_ends_as_it_does_by_itself(
    folder: Path, program: str, status: int, out: list[str], err: str | None
) -> None:
    ended, said, errors = run(BEGIN + program, folder)
    assert (ended, said, errors[-1] if errors else None) == (status, out, err)
    if err and "Error" in err:
        assert errors[:2] == ["Traceback (most recent call last):", '  File "<string>", line 2, in <module>']


def test_a_program_that_is_interrupted_dies_of_it(folder: Path) -> None:
    wish = json.dumps({"workers": 1, "clients": 1, "grace": 0.1})
    command = [sys.executable, "-m", DRIVE, wish, sys.executable, "-c", "raise KeyboardInterrupt"]
    done = run_launcher(command, {**os.environ, "XDG_RUNTIME_DIR": str(folder)}, timeout=30)
    assert done.returncode == 1 and "killed by signal 2 (SIGINT)" in done.stderr, done


@pytest.mark.parametrize("module", ["collectived_launcher", "collectived_launcher.hosts.reaper"])
def test_a_module_of_ours_is_run_as_the_main_one(folder: Path, module: str) -> None:
    """A package and a module, which the launcher has imported before, by a name that is looked up in PATH."""
    wish = json.dumps({"workers": 1, "clients": 1, "grace": 0.1})
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", DRIVE, wish, "python", "-P", "-m", module, "--help"]
    done = run_launcher(command, {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": str(folder)}, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("Usage: collectived [OPTIONS]" in done.stdout) == (module == "collectived_launcher")
