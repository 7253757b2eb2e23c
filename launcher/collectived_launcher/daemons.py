"""The coordinator and the workers of one job on this host: start them, wait until they serve, end them in order."""

from __future__ import annotations

import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collectived_launcher.child import Child, Daemon
from collectived_launcher.job import Job
from collectived_launcher.loop import Loop
from collectived_launcher.output import Terminal
from collectived_launcher.summary import describe

# -P: a file random.py in the user's folder must not be taken for Python's own.
DAEMON = (sys.executable, "-P", "-m", "collectived_runtime")


class StartError(Exception):
    """A daemon or a client could not be started; the text says which and why."""


@dataclass(frozen=True, slots=True)
class DaemonCommand:
    """How daemons are started (`line`, `coordinator …` or `worker …`, `options`), and how long they may take.

    `coordinator` are options of the coordinator alone.
    """

    line: tuple[str, ...] = DAEMON
    options: tuple[str, ...] = ()
    ready_within: float = 30.0
    ended_within: float = 5.0
    coordinator: tuple[str, ...] = ()


class Daemons:
    """`make` gives a new `Daemon` of that name, with everything that it needs but its command line."""

    def __init__(
        self, job: Job, command: DaemonCommand, loop: Loop, terminal: Terminal, make: Callable[[str], Daemon]
    ) -> None:
        self._job, self._command, self._loop, self._terminal = job, command, loop, terminal
        self.coordinator = make("coordinator")
        self.workers = [make(f"worker {task}") for task in range(job.workers)]

    @property
    def all(self) -> list[Daemon]:
        return [*self.workers, self.coordinator]

    def start(self) -> bool:
        """Whether all of them serve; False when a signal came first.

        Raises:
            StartError: one ended or was not ready in time.
        """
        folder = self._job.folder
        secret = secrets.token_hex(32)
        listen = ("--listen", f"unix:{folder}/coordinator.sock")
        self._run(self.coordinator, secret, "coordinator", *listen, *self._command.coordinator)
        if not self._await_ready([self.coordinator]):
            return False
        for task, worker in enumerate(self.workers):
            place = ("--task", str(task), "--coordinator", self.coordinator.address, "--folder", str(folder))
            self._run(worker, secret, "worker", *place)
        return self._await_ready(self.all)

    def end(self) -> None:
        """Workers first, then the coordinator; those who do not end in time are killed, which is said."""
        for daemons in (self.workers, [self.coordinator]):
            living = [daemon for daemon in daemons if daemon.alive]
            for daemon in living:
                daemon.ended = lambda: None
                daemon.end_in_order()
            if not await_end(self._loop, living, self._command.ended_within):
                self._kill(living)
            for daemon in living:
                if daemon.status not in (0, -signal.SIGKILL):
                    self._terminal.say(
                        f"collectived: {daemon.describe()} was told to end and failed: {describe(daemon.status or 0)}"
                    )

    def _kill(self, daemons: Sequence[Daemon]) -> None:
        for daemon in daemons:
            if daemon.alive:
                within = f"within {self._command.ended_within:g} s"
                self._terminal.say(f"collectived: {daemon.describe()} did not end in order {within}: killed")
                daemon.send(signal.SIGKILL)
        await_end(self._loop, daemons)

    def _run(self, daemon: Daemon, secret: str, kind: str, *options: str) -> None:
        line = (*self._command.line, kind, "--job", self._job.name, *options, "--attached", *self._command.options)
        try:
            daemon.start(line, secret)
        except OSError as error:
            raise StartError(f"{daemon.name} cannot be started: {error}") from error

    def _await_ready(self, daemons: Sequence[Daemon]) -> bool:
        def settled() -> bool:
            return all(daemon.ready for daemon in daemons) or not all(daemon.alive for daemon in daemons)

        self._loop.until(settled, self._command.ready_within)
        if self._loop.signals:
            return False
        for daemon in sorted(daemons, key=lambda daemon: daemon.alive):  # whoever ended is why the others are not ready
            if not daemon.alive or not daemon.ready:
                raise StartError(self._why_not_ready(daemon))
        return True

    def _why_not_ready(self, daemon: Daemon) -> str:
        if daemon.status is None:
            what = f"was not ready within {self._command.ready_within:g} s"
        else:
            what = f"ended before it was ready: {describe(daemon.status)}"
        said = f"its last line: {daemon.last_words[-1]}" if daemon.last_words else "it said nothing on standard error"
        return f"{daemon.describe()} {what}; {said}"


def await_end(loop: Loop, children: Sequence[Child], seconds: float = float("inf")) -> bool:
    """Whether all of them ended in that time, whatever signals come meanwhile."""

    def gone() -> bool:
        return not any(child.alive for child in children)

    deadline = time.monotonic() + seconds
    while not gone() and time.monotonic() < deadline:
        loop.turn(None if seconds == float("inf") else deadline - time.monotonic())
    return gone()
