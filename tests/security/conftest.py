"""Daemons of which tests try what nobody should be able to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from collectived import testing

ROOT = Path(__file__).parents[2]
SECRET = "the-secret-of-these-tests-0123456789"
Start = Callable[..., testing.daemon.Daemon]
Outcomes = dict[str, tuple[str, str]]

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Into which everybody may go, and where paths are short."""
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as path:
        Path(path).chmod(0o711)
        yield Path(path)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts a daemon of the job; all end in order with the test."""
    with ExitStack() as running:

        def one(*arguments: str, within: tuple[str, ...] = (), secret: str = SECRET) -> testing.daemon.Daemon:
            daemon = testing.daemon.Daemon([*arguments, "--job", "test"], secret, within)
            running.callback(daemon.close)
            return daemon

        yield one


@pytest.fixture
def coordinator(folder: Path, start: Start) -> str:
    """The address of a coordinator."""
    return str(start("coordinator", "--listen", f"unix:{folder}/c.sock").ready(30)["address"])


@pytest.fixture
def worker(folder: Path, start: Start, coordinator: str) -> Callable[..., dict[str, Any]]:
    """Starts a worker in a folder of a mode and a group; what it announces."""

    def one(
        *options: str, mode: int = 0o700, gid: int = -1, within: tuple[str, ...] = (), task: int = 0
    ) -> dict[str, Any]:
        place = folder / f"w{task}"
        place.mkdir()
        os.chown(place, -1, gid)
        place.chmod(mode)
        words = ("worker", "--task", str(task), "--folder", str(place), "--coordinator", coordinator, *options)
        return start(*words, within=within).ready(30)

    return one


def asked(address: str, uid: int, *calls: str, groups: str = "", shows: str = "") -> Outcomes:
    """What a client that is that user is told: of each call its code and its words, or "ok" and what came."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COLLECTIVED")}
    if shows:
        environment["COLLECTIVED_SECRET"] = shows
    command = [sys.executable, "-m", "tests.security.probe", address, str(uid), groups or str(uid), *calls]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert not done.returncode, done.stderr
    return {call: (code, said) for call, (code, said) in json.loads(done.stdout).items()}
