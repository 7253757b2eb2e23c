"""Daemons of which tests try what nobody should be able to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from tests.forked_daemon import ForkedDaemon

from collectived import testing

ROOT = Path(__file__).parents[3]
SECRET = "the-secret-of-these-tests-0123456789"
Start = Callable[..., testing.daemon.Daemon]
Outcomes = dict[str, tuple[str, str]]

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")


class Place:
    """A folder into which everybody may go, where paths are short, and the daemons of a job that are started there.

    All end in order with the place.
    """

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self.folder = folder
        self._running = running

    def start(self, *arguments: str, within: tuple[str, ...] = (), secret: str = SECRET) -> testing.daemon.Daemon:
        """Starts a daemon of the job."""
        daemon = ForkedDaemon([*arguments, "--job", "test"], secret, within)
        self._running.callback(daemon.close)
        return daemon

    @cached_property
    def coordinator(self) -> str:
        """The address of a coordinator."""
        return str(self.start("coordinator", "--listen", f"unix:{self.folder}/c.sock").wait_ready(30)["address"])

    def worker(
        self, *options: str, mode: int = 0o700, gid: int = -1, within: tuple[str, ...] = (), task: int = 0
    ) -> dict[str, Any]:
        """Starts a worker in a folder of a mode and a group; what it announces."""
        at = self.folder / f"w{task}"
        at.mkdir()
        os.chown(at, -1, gid)
        at.chmod(mode)
        words = ("worker", "--task", str(task), "--folder", str(at), "--coordinator", self.coordinator, *options)
        return self.start(*words, within=within).wait_ready(30)


@contextmanager
def _place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as path, ExitStack() as running:
        Path(path).chmod(0o711)
        yield Place(Path(path), running)


@pytest.fixture
def place() -> Iterator[Place]:
    with _place() as made:
        yield made


@pytest.fixture(scope="module")
def lasting() -> Iterator[Place]:
    """One for all tests of a file that do nothing to its daemons which the others would feel."""
    with _place() as made:
        yield made


@pytest.fixture
def folder(place: Place) -> Path:
    return place.folder


@pytest.fixture
def start(place: Place) -> Start:
    return place.start


@pytest.fixture
def worker(place: Place) -> Callable[..., dict[str, Any]]:
    return place.worker


def asked(address: str, uid: int, *calls: str, groups: str = "", shows: str = "") -> Outcomes:
    """What a client that is that user is told: of each call its code and its words, or "ok" and what came."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COLLECTIVED")}
    if shows:
        environment["COLLECTIVED_SECRET"] = shows
    command = [
        sys.executable,
        "-m",
        "tests.e2e.security.other_user_client",
        address,
        str(uid),
        groups or str(uid),
        *calls,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert not done.returncode, done.stderr
    return {call: (code, said) for call, (code, said) in json.loads(done.stdout).items()}
