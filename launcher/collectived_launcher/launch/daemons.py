"""The coordinator and the workers of one job: start them (again), wait until they serve, end them."""

from __future__ import annotations

import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from collectived_launcher.launch import patience
from collectived_launcher.launch.child import Child, Daemon
from collectived_launcher.launch.host import NOT_RUN, Host
from collectived_launcher.launch.job import COORDINATOR, Job
from collectived_launcher.launch.loop import Loop
from collectived_launcher.launch.output import Terminal
from collectived_launcher.launch.page import Page
from collectived_proto.configuration.flags import NO_CERTIFICATES
from collectived_proto.viewing import viewing_token

# -P: a file random.py in the user's folder must not be taken for Python's own.
DAEMON = (sys.executable, "-P", "-m", "collectived_runtime")


class StartError(Exception):
    """A daemon or a client could not be started; the text says which and why."""


@dataclass(frozen=True, slots=True)
class DaemonCommand:
    """How daemons are started (`line`, `coordinator …` or `worker …`, `options`), and how long they may take to end.

    `coordinator` are options of the coordinator alone, `worker` of every worker; `http` is where the coordinator serves
    the web page, if it is to; `variables` come on top of the environment of their host.
    """

    line: tuple[str, ...] = DAEMON
    options: tuple[str, ...] = ()
    ended_within: float = 5.0
    coordinator: tuple[str, ...] = ()
    worker: tuple[str, ...] = ()
    http: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


class Daemons:
    """The daemons of one job, by name. A daemon that is started again takes the place of the one that ended.

    Args:
        hosts: where each of them runs, by the daemon's name.
        addresses: of the hosts, by the host's name, where the job is spread over several.
        make: gives a new `Daemon` of that name, with everything that it needs but its command line.
        ready_within: seconds from its start until a daemon serves.
    """

    def __init__(
        self,
        job: Job,
        command: DaemonCommand,
        hosts: Mapping[str, Host],
        addresses: Mapping[str, str],
        loop: Loop,
        terminal: Terminal,
        make: Callable[[str], Daemon],
        ready_within: float,
    ) -> None:
        self._job, self._command, self._loop, self._terminal = job, command, loop, terminal
        self._hosts, self._addresses = hosts, addresses
        self._make, self._ready_within = make, ready_within
        self._secret = secrets.token_hex(32)
        self._http = command.http
        self._daemons = {name: make(name) for name in (COORDINATOR, *job.worker_names)}
        first = hosts[COORDINATOR].facts
        folder = first.folder if first else ""
        # The coordinator's address; with a port that is chosen at its first start, and then kept.
        self._serves_at = "" if addresses else f"unix:{folder}/coordinator.sock"
        self._waiting: dict[str, list[Daemon]] = {}  # host -> those that start when it is back

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
        return Page.of(told, self._secret) if told else None

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
        if self._addresses:
            self._serves_at = self.coordinator.address
        if self.page:  # a coordinator that is started again is to be found where browsers look for it
            host, colon, _ = self._http.rpartition(":")
            self._http = f"{host}{colon}{self.page.port}"
        for worker in self.workers:
            self._run(worker)
        return self._await_ready(self.all)

    def start_again(self, name: str) -> Daemon:
        """Starts a daemon that has ended as it was started before, without waiting until it serves. A host that was
        lost is opened again for it.
        """
        former, daemon = self._daemons[name], self._make(name)
        daemon.last_words.extend(former.last_words)
        self._daemons[name] = daemon
        host = self._hosts[name]
        if host.facts is not None:
            self._run(daemon)
        else:
            self._waiting.setdefault(host.name, []).append(daemon)
            if host.gone:
                self._open_again(host)
        return daemon

    def _open_again(self, host: Host) -> None:
        try:
            host.open(partial(self._host_changed, host))
        except OSError as error:  # no more processes here, for instance
            host.trouble = f"cannot be opened again: {error}"
            self._loop.later(0.0, partial(self._host_changed, host))

    def kill(self, name: str) -> None:
        """One that was started again and does not come to serve."""
        daemon, host = self._daemons[name], self._hosts[name]
        if daemon in self._waiting.get(host.name, []):
            self._waiting[host.name].remove(daemon)
            daemon.refuse(f"its host {host.name} did not come back")
        else:
            daemon.send(signal.SIGKILL)

    def _host_changed(self, host: Host) -> None:
        for daemon in self._waiting.pop(host.name, []):
            if host.facts is not None:
                self._run(daemon)
            else:
                daemon.refuse(f"its host {host.name} {host.trouble}")

    def end(self) -> None:
        """Workers first, then the coordinator; those who do not end in time are killed, which is said."""
        for daemons in (self.workers, [self.coordinator]):
            living = [daemon for daemon in daemons if daemon.alive]
            for daemon in living:
                daemon.when_ended = lambda: None
                if daemon.ready:
                    daemon.end_in_order()
                else:  # it may not listen yet, and nobody knows it
                    daemon.send(signal.SIGKILL)
            if not await_end(self._loop, living, self._command.ended_within):
                self._kill(living)
            for daemon in living:
                if daemon.status not in (0, -signal.SIGKILL) or daemon.trouble:
                    self._terminal.say(
                        f"collectived: {daemon.describe()} was told to end and failed: {daemon.describe_end()}"
                    )

    def _kill(self, daemons: Sequence[Daemon]) -> None:
        for daemon in daemons:
            if daemon.alive:
                within = f"within {self._command.ended_within:g} s"
                self._terminal.say(f"collectived: {daemon.describe()} did not end in order {within}: killed")
                daemon.send(signal.SIGKILL)
        await_end(self._loop, daemons)

    def _run(self, daemon: Daemon) -> None:
        host, command = self._hosts[daemon.name], self._command
        kind, *place = self._arguments(daemon.name, host)
        assert host.facts is not None
        python, *line = command.line
        if python == sys.executable:  # over there it is another
            python = host.facts.python
        # What a file says about addresses is meant for daemons that stay, of which a host has one.
        start = ("--config", "none", *NO_CERTIFICATES, "--job", self._job.name)
        words = (python, *line, kind, *start, *place, "--attached", *command.options)
        daemon.start(host, words, self._secret, command.variables)

    def _arguments(self, name: str, host: Host) -> tuple[str, ...]:
        """The same at each start: a daemon comes back at its address, and the coordinator with its journal."""
        assert host.facts is not None
        folder, address = host.facts.folder, self._addresses.get(host.name, "")
        if name == COORDINATOR:
            listen = ("--listen", self._serves_at or with_port(address, 0), "--journal", f"{folder}/epoch")
            page = ("--http", self._http) if self._http else ()
            return ("coordinator", *listen, *page, *self._command.coordinator)
        task = self._job.worker_names.index(name)
        # The coordinator may be on its way back too. Whoever looks for it in vain is to say so before we lose patience.
        patience = f"{self._ready_within * 0.8:g}"
        links = ("--link-listen", with_port(address, 0), "--host-name", host.name) if address else ()
        place = ("--coordinator", self._serves_at, "--patience", patience, "--folder", folder)
        return ("worker", "--task", str(task), *place, *links, *self._command.worker)

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
        if daemon.status == NOT_RUN and daemon.trouble:
            return f"{daemon.describe()} cannot be started: {daemon.trouble}"
        if daemon.status is None:
            what = f"was not ready within {self._ready_within:g} s"
        else:
            what = f"ended before it was ready: {daemon.describe_end()}"
        said = f"its last line: {daemon.last_words[-1]}" if daemon.last_words else "it said nothing on standard error"
        return f"{daemon.describe()} {what}; {said}"


def with_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def await_end(loop: Loop, children: Sequence[Child], seconds: float = float("inf")) -> bool:
    """Whether all of them ended in that time, whatever signals come meanwhile."""

    def gone() -> bool:
        return not any(child.alive for child in children)

    deadline = time.monotonic() + seconds
    while not gone() and time.monotonic() < deadline:
        loop.turn(None if seconds == float("inf") else deadline - time.monotonic())
    return gone()
