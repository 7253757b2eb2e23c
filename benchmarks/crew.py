"""The processes of one contestant: started once, given orders over a socket, ended when all is measured."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.contestants import Contestant
from benchmarks.environments import ROOT
from benchmarks.rank import SOCKET

START_SECONDS = 90.0
ANSWER_SECONDS = 60.0
END_SECONDS = 15.0


class Failed(Exception):
    """A contestant could not be measured, and why."""


class Crew:
    """All ranks of one contestant, as many as `ranks`.

    Args:
        patience: seconds for an answer. start_patience: seconds for the ranks to start.

    Raises:
        Failed: it is not installed, or did not start in time.
    """

    def __init__(
        self,
        contestant: Contestant,
        ranks: int,
        patience: float = ANSWER_SECONDS,
        start_patience: float = START_SECONDS,
    ) -> None:
        self.contestant = contestant
        self._patience = patience
        self._start_patience = start_patience
        self.versions: dict[str, str] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="collectived-bench-")
        self._output = open(Path(self._folder.name) / "output", "w+b")  # noqa: SIM115
        self._children: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._ranks: dict[int, Any] = {}
        try:
            self._start(ranks)
        except BaseException:
            self.close()
            raise

    def _start(self, ranks: int) -> None:
        environment = self.contestant.folder()
        if environment is None:
            raise Failed("it is not installed: make bench does that")
        path = str(Path(self._folder.name) / "runner.sock")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            for launch in self.contestant.launches(environment, ranks, free_ports):
                # Files that a contestant leaves lying go with the folder.
                own = {"PYTHONPATH": str(ROOT), "TMPDIR": self._folder.name, SOCKET: path}
                variables = {**os.environ, **own, **launch.environment}
                child = subprocess.Popen(
                    launch.command,
                    cwd=ROOT,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    start_new_session=True,
                )
                self._children.append(child)
            until = time.monotonic() + self._start_patience
            for _ in range(self.contestant.processes(ranks)):
                self._admit(listener, ranks, until)

    def _admit(self, listener: socket.socket, ranks: int, until: float) -> None:
        listener.settimeout(0.5)
        while True:
            try:
                connection, _ = listener.accept()
                break
            except TimeoutError:
                if time.monotonic() > until or any(child.poll() is not None for child in self._children):
                    raise Failed(f"its ranks did not start: {self._last_words()}") from None
        connection.settimeout(self._patience)
        lines = connection.makefile("rwb")
        self._connections.append(connection)
        hello = json.loads(lines.readline() or b"{}")
        if hello.get("size") != ranks:
            raise Failed(f"a rank says that it is one of {hello.get('size')}, not of {ranks}: {self._last_words()}")
        self._ranks[hello["rank"]] = lines
        self.versions.update(hello["versions"])

    def _last_words(self) -> str:
        self._output.flush()
        lines = Path(self._output.name).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def ask(self, **order: Any) -> list[dict[str, Any]]:
        """Gives all ranks the same order; their answers, by rank.

        Raises:
            Failed: a rank did not answer in time.
        """
        line = json.dumps(order).encode() + b"\n"
        try:
            for rank in self._ranks.values():
                rank.write(line)
                rank.flush()
            answers = [self._ranks[rank].readline() for rank in sorted(self._ranks)]
        except OSError as error:
            raise Failed(f"a rank did not answer to {order} ({error}): {self._last_words()}") from None
        if not all(answers):
            raise Failed(f"a rank ended at {order}: {self._last_words()}")
        return [json.loads(answer) for answer in answers]

    def kill(self) -> None:
        """Ends them at once."""
        self._signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Ends the ranks by closing their sockets; those that do not end are terminated, and then killed."""
        if self._output.closed:
            return
        for lines in self._ranks.values():
            with contextlib.suppress(OSError):
                lines.close()
        for connection in self._connections:
            connection.close()
        if len(self._ranks) < len(self._connections) or not self._ranks:
            self._signal(signal.SIGTERM)  # they wait for each other
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                self._wait()
                break
            except subprocess.TimeoutExpired:
                self._signal(how)
        self._output.close()
        self._folder.cleanup()

    def _wait(self) -> None:
        until = time.monotonic() + END_SECONDS
        for child in self._children:
            child.wait(max(0.1, until - time.monotonic()))

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, number)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def free_ports(count: int) -> int:
    """The first of `count` ports in a row on the loopback that are free at this moment.

    They lie below those that systems give to outgoing connections, else they could be gone when they are used.
    """
    while True:
        first = random.randrange(15_000, 32_000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
