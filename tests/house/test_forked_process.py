"""Forked programs are what `python -u -c` makes of them, and have nothing of the server that forks them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.conftest import WARM
from tests.forked_process import ForkedProcess, ForkServer

Start = Callable[[str], ForkedProcess]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(WARM)
    yield server
    server.close()


@pytest.fixture
def start(server: ForkServer) -> Start:
    return lambda program: server.start(program, os.environ)


@pytest.mark.parametrize(
    ("program", "code", "out", "err"),
    [
        ("print(1)", 0, "1\n", ""),
        ("import sys; print(input(), sys.argv, __name__); sys.exit(3)", 3, "said ['-c'] __main__\n", ""),
        ("import atexit; atexit.register(print, 'last')", 0, "last\n", ""),
        ("import threading; threading.Timer(0.1, print, ['later']).start()", 0, "later\n", ""),
        ("class Kept:\n    def __del__(self): print('gone')\nkept = Kept()", 0, "gone\n", ""),
        ("import sys; sys.stdout = None", 0, "", ""),
        ("import sys; sys.exit('no')", 1, "", "no\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, "", ""),
    ],
)
def test_a_program_ends_as_it_does_by_itself(start: Start, program: str, code: int, out: str, err: str) -> None:
    process = start(program)
    assert process.communicate("said\n", timeout=20) == (out, err)
    assert process.returncode == process.poll() == process.wait() == code


@pytest.mark.parametrize(
    ("program", "code", "last"),
    [
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_an_exception_ends_a_program_as_it_does_by_itself(start: Start, program: str, code: int, last: str) -> None:
    process = start(program)
    assert process.communicate(timeout=20)[1].splitlines()[-1] == last
    assert process.returncode == code


def test_a_program_has_the_folder_and_the_environment_of_who_starts_it(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    process = server.start("import os; print(os.getcwd(), dict(os.environ))", {"ONE": "1"})
    assert process.communicate(timeout=20)[0] == f"{tmp_path} {{'ONE': '1'}}\n"


def test_signals_reach_a_program_and_whoever_waits_for_it_in_vain_is_told(start: Start) -> None:
    with start("print('here'); input()") as process:
        assert process.stdout.readline() == "here\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL


def test_a_child_has_one_thread_and_no_descriptor_of_the_server(start: Start) -> None:
    listed = "import os; print(os.listdir('/proc/self/task'), sorted(os.listdir('/proc/self/fd'))[:-1])"
    with start("input()") as other:
        process = start(listed)  # the last descriptor is that of the listing
        assert process.communicate(timeout=20)[0] == f"['{process.pid}'] ['0', '1', '2']\n"
        other.kill()
