"""The coordinator and the workers of one job on this host: start them (again), wait until they serve, end them."""

from __future__ import annotations

import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collectived_launcher.launch import patience
from collectived_launcher.launch.child import Child, Daemon
from collectived_launcher.launch.job import COORDINATOR, Job
from collectived_launcher.launch.loop import Loop
from collectived_launcher.launch.output import Terminal
from collectived_launcher.launch.summary import describe
from collectived_proto.viewing import viewing_token

# -P: a file random.py in the user's folder must not be taken for Python's own.
DAEMON = (sys.executable, "-P", "-m", "collectived_runtime")


class StartError(Exception):
    """A daemon or a client could not be started; the text says which and why."""


@dataclass(frozen=True, slots=True)
class DaemonCommand:
    """How daemons are started (`line`, `coordinator …` or `worker …`, `options`), and how long they may take to end.

    `coordinator` are options of the coordinator alone, `worker` of every worker; `http` is where the coordinator serves
    the web page, if it is to.
    """

    line: tuple[str, ...] = DAEMON
    options: tuple[str, ...] = ()
    ended_within: float = 5.0
    coordinator: tuple[str, ...] = ()
    worker: tuple[str, ...] = ()
    http: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """The coordinator's web page; `token` is to be shown by whoever looks."""

    url: str
    token: str = ""

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    @property
    def link(self) -> str:
        """What a browser opens. What follows the # never leaves it, so no server logs it."""
        return f"{self.url}#token={self.token}" if self.token else self.url


class Daemons:
    """The daemons of one job, by name. A daemon that is started again takes the place of the one that ended.

    Args:
        make: gives a new `Daemon` of that name, with everything that it needs but its command line.
        ready_within: seconds from its start until a daemon serves.
    """

    def __init__(
        self,
        job: Job,
        command: DaemonCommand,
        loop: Loop,
        terminal: Terminal,
        make: Callable[[str], Daemon],
        ready_within: float,
    ) -> None:
        self._job, self._command, self._loop, self._terminal = job, command, loop, terminal
        self._make, self._ready_within = make, ready_within
        self._secret = secrets.token_hex(32)
        self._http = command.http
        self._daemons = {name: make(name) for name in (COORDINATOR, *job.worker_names)}

    def __getitem__(self, name: str) -> Daemon:
        return self._daemons[name]

    @property
    def coordinator(self) -> Daemon:
        return self._daemons[COORDINATOR]

    @property
    def workers(self) -> list[Daemon]:
        return [self._daemons[name] for name in self._job.worker_names]

    @property
    def all(self) -> list[Daemon]:
        return list(self._daemons.values())

    @property
    def page(self) -> Page | None:
        """Where the coordinator serves its web page, if it does."""
        told = (self.coordinator.ready or {}).get("page")
        return Page(told["url"], self.viewing_token if told["needs_token"] else "") if told else None

    @property
    def viewing_token(self) -> str:
        """What whoever looks at the page or at metrics is to show."""
        return viewing_token(self._secret)

    def start(self) -> bool:
        """Whether all of them serve; False when a signal came first.

        Raises:
            StartError: one ended or was not ready in time.
        """
        self._run(self.coordinator)
        if not self._await_ready([self.coordinator]):
            return False
        if self.page:  # a coordinator that is started again is to be found where browsers look for it
            host, colon, _ = self._http.rpartition(":")
            self._http = f"{host}{colon}{self.page.port}"
        for worker in self.workers:
            self._run(worker)
        return self._await_ready(self.all)

    def start_again(self, name: str) -> Daemon:
        """Starts a daemon that has ended as it was started before, without waiting until it serves.

        Raises:
            StartError: the kernel cannot run it.
        """
        former, daemon = self._daemons[name], self._make(name)
        daemon.last_words.extend(former.last_words)
        self._daemons[name] = daemon
        self._run(daemon)
        return daemon

    def end(self) -> None:
        """Workers first, then the coordinator; those who do not end in time are killed, which is said."""
        for daemons in (self.workers, [self.coordinator]):
            living = [daemon for daemon in daemons if daemon.alive]
            for daemon in living:
                daemon.ended = lambda: None
                if daemon.ready:
                    daemon.end_in_order()
                else:  # it may not listen yet, and nobody knows it
                    daemon.send(signal.SIGKILL)
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

    def _run(self, daemon: Daemon) -> None:
        command = self._command
        kind, *place = self._arguments(daemon.name)
        line = (*command.line, kind, "--job", self._job.name, *place, "--attached", *command.options)
        try:
            daemon.start(line, self._secret)
        except OSError as error:
            raise StartError(f"{daemon.name} cannot be started: {error}") from error

    def _arguments(self, name: str) -> tuple[str, ...]:
        """The same at each start: a daemon comes back at its address, and the coordinator with its journal."""
        folder = str(self._job.folder)
        if name == COORDINATOR:
            listen = ("--listen", f"unix:{folder}/coordinator.sock", "--journal", f"{folder}/epoch")
            page = ("--http", self._http) if self._http else ()
            return ("coordinator", *listen, *page, *self._command.coordinator)
        task = self._job.worker_names.index(name)
        # The coordinator may be on its way back too. Whoever looks for it in vain is to say so before we lose patience.
        patience = f"{self._ready_within * 0.8:g}"
        place = ("--coordinator", f"unix:{folder}/coordinator.sock", "--patience", patience, "--folder", folder)
        return ("worker", "--task", str(task), *place, *self._command.worker)

    def _await_ready(self, daemons: Sequence[Daemon]) -> bool:
        def settled() -> bool:
            return all(daemon.ready for daemon in daemons) or not all(daemon.alive for daemon in daemons)

        def say(passed: str) -> None:
            late = ", ".join(daemon.describe() for daemon in daemons if not daemon.ready)
            self._terminal.say(f"collectived: waiting until {late} can serve, {passed}")

        patience.until(self._loop, settled, self._ready_within, say)
        if self._loop.signals:
            return False
        for daemon in sorted(daemons, key=lambda daemon: daemon.alive):  # whoever ended is why the others are not ready
            if not daemon.alive or not daemon.ready:
                raise StartError(self._why_not_ready(daemon))
        return True

    def _why_not_ready(self, daemon: Daemon) -> str:
        if daemon.status is None:
            what = f"was not ready within {self._ready_within:g} s"
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
