"""The coordinator and the workers of one job: start them (again), wait until they serve, end them.

Also the web page that the coordinator of a job serves, and the line that shows its link.
"""

from __future__ import annotations

import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from collectived_launcher.hosts.host import NOT_RUN, Host
from collectived_launcher.hosts.loop import Loop, run_until_with_progress
from collectived_launcher.hosts.output import Terminal
from collectived_launcher.launch.child import Child, Daemon
from collectived_launcher.launch.job import COORDINATOR, Job
from collectived_proto.config.flags import NO_TLS_FLAGS
from collectived_proto.report.phrases import names_text
from collectived_proto.viewing_token import viewing_token

# -P: a file random.py in the user's folder must not be taken for Python's own.
DAEMON_COMMAND = (sys.executable, "-P", "-m", "collectived_runtime")


class StartError(Exception):
    """A daemon or a client could not be started; the text says which and why."""


@dataclass(frozen=True, slots=True)
class DaemonCommand:
    """How daemons are started (`line`, `coordinator …` or `worker …`, `options`), how long they may take
    to end, and how long to serve.

    `coordinator_options` are options of the coordinator alone, `worker_options` of every worker; `http_address` is
    where the coordinator serves the web page, if it is to; `variables` come on top of the environment of their host.
    """

    line: tuple[str, ...] = DAEMON_COMMAND
    options: tuple[str, ...] = ()
    end_timeout: float = 5.0
    coordinator_options: tuple[str, ...] = ()
    worker_options: tuple[str, ...] = ()
    http_address: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    ready_timeout: float = 30.0


class Daemons:
    """The daemons of one job, by name. A daemon that is started again takes the place of the one that ended.

    Args:
        hosts: where each of them runs, by the daemon's name.
        addresses: of the hosts, by the host's name, where the job is spread over several.
        make: gives a new `Daemon` of that name, with everything that it needs but its command line.
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
    ) -> None:
        self._job, self._command, self._loop, self._terminal = job, command, loop, terminal
        self._hosts, self._addresses = hosts, addresses
        self._create_daemon = make
        self._secret = secrets.token_hex(32)
        self._http = command.http_address
        self._daemons = {name: make(name) for name in (COORDINATOR, *job.worker_names)}
        first = hosts[COORDINATOR].facts
        folder = first.folder if first else ""
        # The coordinator's address; with a port that is chosen at its first start, and then kept.
        self._coordinator_address = "" if addresses else f"unix:{folder}/coordinator.sock"
        self._waiting_for_host: dict[str, list[Daemon]] = {}  # host -> those that start when it is back

    def __getitem__(self, name: str) -> Daemon:
        return self._daemons[name]

    @property
    def coordinator(self) -> Daemon:
        return self._daemons[COORDINATOR]

    @property
    def workers(self) -> list[Daemon]:
        return [self._daemons[name] for name in self._job.worker_names]

    @property
    def all_daemons(self) -> list[Daemon]:
        return list(self._daemons.values())

    @property
    def page(self) -> WebPageLink | None:
        """Where the coordinator serves its web page, if it does."""
        told = (self.coordinator.ready_info or {}).get("page")
        return WebPageLink.from_ready_info(told, self._secret) if told else None

    @property
    def viewing_token(self) -> str:
        """The token for the page and the metrics."""
        return viewing_token(self._secret)

    def start(self) -> bool:
        """Whether all of them serve; False when a signal came first.

        Raises:
            StartError: one ended or was not ready in time.
        """
        self._start_daemon(self.coordinator)
        if not self._await_ready([self.coordinator]):
            return False
        if self._addresses:
            self._coordinator_address = self.coordinator.address
        if self.page:  # a coordinator that is started again is to be found where browsers look for it
            host, colon, _ = self._http.rpartition(":")
            self._http = f"{host}{colon}{self.page.port}"
        for worker in self.workers:
            self._start_daemon(worker)
        return self._await_ready(self.all_daemons)

    def restart(self, name: str) -> Daemon:
        """Starts a daemon that has ended as it was started before, without waiting until it serves. A host that was
        lost is opened again for it.
        """
        former, daemon = self._daemons[name], self._create_daemon(name)
        daemon.stderr_tail.extend(former.stderr_tail)
        self._daemons[name] = daemon
        host = self._hosts[name]
        if host.facts is not None:
            self._start_daemon(daemon)
        else:
            self._waiting_for_host.setdefault(host.name, []).append(daemon)
            if host.closed:
                self._reopen_host(host)
        return daemon

    def _reopen_host(self, host: Host) -> None:
        try:
            host.open(partial(self._on_host_change, host))
        except OSError as error:  # no more processes here, for instance
            host.trouble = f"cannot be opened again: {error}"
            self._loop.call_later(0.0, partial(self._on_host_change, host))

    def kill(self, name: str) -> None:
        """One that was started again and does not come to serve."""
        daemon, host = self._daemons[name], self._hosts[name]
        if daemon in self._waiting_for_host.get(host.name, []):
            self._waiting_for_host[host.name].remove(daemon)
            daemon.mark_not_run(f"its host {host.name} did not come back")
        else:
            daemon.send(signal.SIGKILL)

    def _on_host_change(self, host: Host) -> None:
        for daemon in self._waiting_for_host.pop(host.name, []):
            if host.facts is not None:
                self._start_daemon(daemon)
            else:
                daemon.mark_not_run(f"its host {host.name} {host.trouble}")

    def stop(self) -> None:
        """Workers first, then the coordinator; those who do not end in time are killed, which is said."""
        for daemons in (self.workers, [self.coordinator]):
            living = [daemon for daemon in daemons if daemon.is_alive]
            for daemon in living:
                daemon.exit_callback = lambda: None
                if daemon.ready_info:
                    daemon.close_stdin()
                else:  # it may not listen yet, and no process knows it
                    daemon.send(signal.SIGKILL)
            if not await_end(self._loop, living, self._command.end_timeout):
                self._kill(living)
            for daemon in living:
                if daemon.status not in (0, -signal.SIGKILL) or daemon.trouble:
                    self._terminal.say(
                        f"collectived: {daemon.describe()} was asked to end and failed: {daemon.describe_end()}"
                    )

    def _kill(self, daemons: Sequence[Daemon]) -> None:
        for daemon in daemons:
            if daemon.is_alive:
                within = f"within {self._command.end_timeout:g} s"
                self._terminal.say(f"collectived: {daemon.describe()} did not end in order {within}: killed")
                daemon.send(signal.SIGKILL)
        await_end(self._loop, daemons)

    def _start_daemon(self, daemon: Daemon) -> None:
        host, command = self._hosts[daemon.name], self._command
        kind, *place = self._arguments(daemon.name, host)
        assert host.facts is not None
        python, *line = command.line
        if python == sys.executable:  # over there it is another
            python = host.facts.python
        # Addresses in a file are meant for daemons that stay, of which a host has one.
        start = ("--config", "none", *NO_TLS_FLAGS, "--job", self._job.name)
        words = (python, *line, kind, *start, *place, "--attached", *command.options)
        daemon.start(host, words, self._secret, command.variables)

    def _arguments(self, name: str, host: Host) -> tuple[str, ...]:
        """The same at each start: a daemon comes back at its address, and the coordinator with its journal."""
        assert host.facts is not None
        folder, address = host.facts.folder, self._addresses.get(host.name, "")
        if name == COORDINATOR:
            listen = (
                "--listen",
                self._coordinator_address or join_host_port(address, 0),
                "--journal",
                f"{folder}/epoch",
            )
            page = ("--http", self._http) if self._http else ()
            return ("coordinator", *listen, *page, *self._command.coordinator_options)
        task = self._job.worker_names.index(name)
        # The coordinator may be on its way back too. A worker that looks for it in vain must say so before the launcher
        # gives up.
        patience = f"{self._command.ready_timeout * 0.8:g}"
        links = ("--link-listen", join_host_port(address, 0), "--host-name", host.name) if address else ()
        place = ("--coordinator", self._coordinator_address, "--patience", patience, "--folder", folder)
        return ("worker", "--task", str(task), *place, *links, *self._command.worker_options)

    def _await_ready(self, daemons: Sequence[Daemon]) -> bool:
        def settled() -> bool:
            return all(daemon.ready_info for daemon in daemons) or not all(daemon.is_alive for daemon in daemons)

        def say(passed: str) -> None:
            late = names_text([daemon.describe() for daemon in daemons if not daemon.ready_info])
            self._terminal.say(f"collectived: waiting until {late} can serve, {passed}")

        def draw() -> None:
            ready = sum(daemon.ready_info is not None for daemon in self.all_daemons)
            self._terminal.draw_progress("starting", ready, len(self.all_daemons), "daemons")

        try:
            run_until_with_progress(self._loop, settled, self._command.ready_timeout, say, draw)
        finally:
            self._terminal.erase_progress()
        if self._loop.signals:
            return False
        for daemon in sorted(
            daemons, key=lambda daemon: daemon.is_alive
        ):  # a daemon that ended is why the others are not ready
            if not daemon.is_alive or not daemon.ready_info:
                raise StartError(self._explain_not_ready(daemon))
        return True

    def _explain_not_ready(self, daemon: Daemon) -> str:
        if daemon.status == NOT_RUN and daemon.trouble:
            return f"{daemon.describe()} cannot be started: {daemon.trouble}"
        if daemon.status is None:
            what = f"was not ready within {self._command.ready_timeout:g} s"
        else:
            what = f"ended before it was ready: {daemon.describe_end()}"
        said = f"its last line: {daemon.stderr_tail[-1]}" if daemon.stderr_tail else "it said nothing on standard error"
        return f"{daemon.describe()} {what}; {said}"


def join_host_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def await_end(loop: Loop, children: Sequence[Child], seconds: float = float("inf")) -> bool:
    """Whether all of them ended in that time, whatever signals come meanwhile."""

    def gone() -> bool:
        return not any(child.is_alive for child in children)

    deadline = time.monotonic() + seconds
    while not gone() and time.monotonic() < deadline:
        loop.run_once(None if seconds == float("inf") else deadline - time.monotonic())
    return gone()


@dataclass(frozen=True, slots=True)
class WebPageLink:
    """The coordinator's web page; readers must show `token`."""

    url: str
    token: str = ""

    @classmethod
    def from_ready_info(cls, told: Mapping[str, Any], secret: str) -> WebPageLink:
        """Make the link from the data that the coordinator of a job with this secret sent when it was ready."""
        return cls(told["url"], viewing_token(secret) if told["needs_token"] else "")

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    @property
    def link(self) -> str:
        """The link for a browser. The browser never sends the part after the #, so no server logs it."""
        return f"{self.url}#token={self.token}" if self.token else self.url

    def format_line(self, job_file: str, terminal: bool, place: str = "") -> str:
        """Format the line about the page. Only a terminal gets the token: other output may be a log that others read.

        Args:
            place: the host of the coordinator, where it has to be said.
        """
        page = f"page on {place}" if place else "page"
        if self.token and not terminal:
            return f"{page}: {self.url} (the link with its token is in {job_file})"
        return f"{page}: {self.link}"
