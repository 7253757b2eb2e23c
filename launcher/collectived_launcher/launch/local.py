"""Runs one job on this host: coordinator, workers, then clients; and takes them down again, clients first.

What to do when something ends is decided in `supervise`, and told by `account`; here it is done. One thread, one wait
(`loop`). Whatever happens to the launcher, nothing outlives it: daemons end with their standard input, clients by the
kernel's parent-death signal, and the rest of their process groups by the keeper.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from collectived_launcher.doctor.at_start import tell_failures
from collectived_launcher.launch.account import Account
from collectived_launcher.launch.child import Client, Daemon
from collectived_launcher.launch.daemons import DaemonCommand, Daemons, Page, StartError, await_end
from collectived_launcher.launch.job import Addresses, Job, client_environment
from collectived_launcher.launch.keeper import Keeper, remove_traces
from collectived_launcher.launch.loop import Loop
from collectived_launcher.launch.output import Terminal
from collectived_launcher.launch.supervise import (
    Action,
    ClientEnded,
    DaemonEnded,
    DaemonReady,
    Elapsed,
    Event,
    Finish,
    KillDaemon,
    Policy,
    Restart,
    Send,
    Signalled,
    StartDaemon,
    begin,
    decide,
    exit_status,
)
from collectived_proto.local import jobs


class LocalJob:
    """One run of one job. `log_dir` gets one file per process; what they print is shown on `terminal`."""

    def __init__(
        self,
        job: Job,
        policy: Policy,
        *,
        log_dir: Path | None = None,
        command: DaemonCommand | None = None,
        terminal: Terminal | None = None,
    ) -> None:
        self._job, self._policy, self._log_dir = job, policy, log_dir
        self._command = command or DaemonCommand()
        self._terminal = terminal or Terminal()
        self._account = Account(policy, self._terminal)
        self._state = begin(policy, {})
        self._finished = False
        self._clients: dict[int, Client] = {}
        self._sent: dict[int, int] = {}  # rank -> the last signal that we sent it
        self._events: list[Event] = []
        self._logged: set[str] = set()  # whose log was begun by this job

    def run(self) -> int:
        """Runs the job to its end; returns the exit status of the command."""
        with Loop() as self._loop:
            self._terminal.say(self._job.opening(), stream=1)
            self._keeper = Keeper(self._job.folder)
            self._daemons = Daemons(
                self._job, self._command, self._loop, self._terminal, self._new_daemon, self._policy.ready_within
            )
            try:
                self._make_folder()
                if self._daemons.start():
                    self._publish()
                    self._start_clients()
                self._attend()
            except StartError as error:
                self._terminal.say(f"collectived: {error}")
                tell_failures(self._terminal.say)
                return 1
            finally:
                self._take_down()
        self._account.close()
        return exit_status(self._state)

    def _make_folder(self) -> None:
        while not self._job.folder.exists():
            with contextlib.suppress(FileNotFoundError):  # another job ended and removed the user's empty folder
                jobs.runtime_folder()
                self._job.folder.mkdir(mode=0o700)

    def _publish(self) -> None:
        """Lets others find the job, and from now on notices when a daemon dies."""
        job, daemons = self._job, self._daemons
        workers = tuple(worker.address for worker in daemons.workers)
        self._addresses = Addresses(daemons.coordinator.address, workers, _free_port())
        page, command = daemons.page, shlex.join(job.program)
        path = jobs.publish(
            jobs.JobFile(
                job.name, os.getpid(), daemons.coordinator.address, workers, command, page.link if page else ""
            )
        )
        if page:
            self._terminal.say(page_line(page, path, os.isatty(1)), stream=1)
        for daemon in daemons.all:
            self._watch(daemon)
            self._say_metrics(daemon)
        if any(daemon.metrics for daemon in daemons.all):
            token = write_token(job.folder, daemons.viewing_token)
            self._terminal.say(f"collectived: metrics need the token in {token} (Prometheus: credentials_file)")

    def _watch(self, daemon: Daemon) -> None:
        daemon.ended = lambda: self._events.append(DaemonEnded(daemon.name, daemon.status or 0, random.random()))
        daemon.became_ready = lambda: self._events.append(DaemonReady(daemon.name))

    def _say_metrics(self, daemon: Daemon) -> None:
        if daemon.metrics:
            self._terminal.say(f"collectived: {daemon.metrics}")

    def _new_daemon(self, name: str) -> Daemon:
        return Daemon(name, self._loop, self._keeper, self._terminal, self._log(name))

    def _start_clients(self) -> None:
        names = self._job.worker_names
        self._state = begin(self._policy, {rank: names[self._job.worker_of(rank)] for rank in range(self._job.size)})
        for rank in range(self._job.size):
            self._start_client(rank, restart=0)

    def _start_client(self, rank: int, restart: int) -> None:
        client = Client(rank, self._loop, self._keeper, self._terminal, self._log(f"rank {rank}"))
        client.ended = lambda: self._events.append(ClientEnded(rank, client.status or 0))
        try:
            client.start(self._job.program, client_environment(self._job, self._addresses, rank, restart))
        except OSError as error:
            raise StartError(f"rank {rank}: {self._job.program[0]!r} cannot be run: {error}") from error
        self._clients[rank] = client

    def _log(self, name: str) -> Path | None:
        """Where a process writes that is started, or started again and goes on in the same file."""
        if self._log_dir is None:
            return None
        path = self._log_dir / f"{name.replace(' ', '-')}.log"
        if name not in self._logged:
            path.write_bytes(b"")
            self._logged.add(name)
        return path

    def _attend(self) -> None:
        while not self._finished:
            if not self._events and not self._loop.signals:
                wakeup = self._state.wakeup
                self._loop.turn(None if wakeup is None else max(0.0, wakeup - time.monotonic()))
            for event in self._gather():
                if not self._finished:
                    self._act_on(event)

    def _gather(self) -> list[Event]:
        """What happened. Daemons and clients that were killed go before clients that ended by themselves in the same
        turn: they may have failed because of those, never the other way round."""
        events, self._events = self._events, []
        events.sort(key=lambda event: isinstance(event, ClientEnded) and event.status >= 0)
        while self._loop.signals:
            events.append(Signalled(self._loop.signals.popleft()))
        if self._terminal.broken and self._state.interrupted_by is None:
            events.append(Signalled(signal.SIGPIPE))
        return [*events, Elapsed()]

    def _act_on(self, event: Event) -> None:
        now = time.monotonic()
        self._state, actions = decide(self._state, event, now)
        self._tell(event, actions, now)
        for action in actions:
            match action:
                case Restart(rank, count):
                    self._start_client(rank, count)
                case Send(ranks, signum):
                    self._send(ranks, signum)
                case StartDaemon(name):
                    self._account.daemon_started_again(self._daemons[name])
                    self._watch(self._daemons.start_again(name))
                case KillDaemon(name):
                    self._account.daemon_late(self._daemons[name])
                    self._daemons[name].send(signal.SIGKILL)
                case Finish():
                    self._finished = True

    def _send(self, ranks: Sequence[int], signum: int) -> None:
        for rank in ranks:
            self._sent[rank] = signum
            self._clients[rank].send(signum)

    def _tell(self, event: Event, actions: Sequence[Action], now: float) -> None:
        match event:
            case ClientEnded(rank, status) if status != 0 and self._state.interrupted_by is None:
                self._account.client_failed(self._clients[rank], self._state, self._sent.get(rank))
            case DaemonReady(name):
                self._say_metrics(self._daemons[name])  # it has another port now
            case DaemonEnded(name):
                self._account.daemon_ended(self._daemons[name], self._state, now)
            case Signalled(signum):
                self._account.signalled(signum, actions)
            case Elapsed():
                self._account.sends(actions)

    def _take_down(self) -> None:
        """Clients that are still there only because of an error; then the daemons; then every trace."""
        for client in self._clients.values():
            client.send(signal.SIGKILL)
        await_end(self._loop, list(self._clients.values()))
        self._daemons.end()
        remove_traces(self._job.folder)
        self._keeper.close()


def write_token(folder: Path, token: str) -> Path:
    """Puts the viewing token where scrapers of this user find it, for as long as the job's folder is there."""
    path = folder / "viewing-token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(f"{token}\n")
    return path


def page_line(page: Page, job_file: Path, terminal: bool) -> str:
    """The line about the page. A token is shown to people only: what is no terminal may be a log that others read."""
    if page.token and not terminal:
        return f"page: {page.url} (the link with its token is in {job_file})"
    return f"page: {page.link}"


def _free_port() -> int:
    """A TCP port that nobody uses right now."""
    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
