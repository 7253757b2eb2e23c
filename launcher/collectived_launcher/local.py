"""Runs one job on this host: coordinator, workers, then clients; and takes them down again, clients first.

What to do when something ends is decided in `supervise`; here it is done. One thread, one wait (`loop`). Whatever
happens to the launcher, nothing outlives it: daemons end with their standard input, clients by the kernel's
parent-death signal, and the rest of their process groups by the keeper.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from collectived_launcher.child import Child, Client, Daemon
from collectived_launcher.daemons import DaemonCommand, Daemons, StartError, await_end
from collectived_launcher.job import Addresses, Job, client_environment
from collectived_launcher.keeper import Keeper, remove_traces
from collectived_launcher.loop import Loop
from collectived_launcher.output import Terminal
from collectived_launcher.summary import Ending, describe, signal_name, summary
from collectived_launcher.supervise import (
    Action,
    ClientEnded,
    DaemonEnded,
    Elapsed,
    Event,
    Finish,
    Phase,
    Policy,
    Restart,
    Send,
    Signalled,
    begin,
    decide,
    exit_status,
)
from collectived_proto.local import jobs


class LocalJob:
    """One run of one job. `log_dir` gets one file per process."""

    def __init__(
        self, job: Job, policy: Policy, *, log_dir: Path | None = None, command: DaemonCommand | None = None
    ) -> None:
        self._job, self._policy, self._log_dir = job, policy, log_dir
        self._command = command or DaemonCommand()
        self._terminal = Terminal()
        self._state = begin(policy, ())
        self._finished = False
        self._clients: dict[int, Client] = {}
        self._sent: dict[int, int] = {}  # rank -> the last signal that we sent it
        self._events: list[Event] = []
        self._failures: list[Ending] = []

    def run(self) -> int:
        """Runs the job to its end; returns the exit status of the command."""
        with Loop() as self._loop:
            self._terminal.say(self._job.opening(), stream=1)
            self._keeper = Keeper(self._job.folder)
            self._daemons = Daemons(self._job, self._command, self._loop, self._terminal, self._new_daemon)
            try:
                self._make_folder()
                if self._daemons.start():
                    self._publish()
                    self._start_clients()
                self._attend()
            except StartError as error:
                self._terminal.say(f"collectived: {error}")
                return 1
            finally:
                self._take_down()
        for line in summary(self._failures):
            self._terminal.say(line)
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
        jobs.publish(jobs.JobFile(job.name, os.getpid(), daemons.coordinator.address, workers, shlex.join(job.program)))
        for daemon in daemons.all:
            daemon.ended = partial(self._daemon_ended, daemon)

    def _new_daemon(self, name: str) -> Daemon:
        return Daemon(name, self._loop, self._keeper, self._terminal, self._log(name))

    def _start_clients(self) -> None:
        self._state = begin(self._policy, range(self._job.size))
        for rank in range(self._job.size):
            self._start_client(rank, restart=0)

    def _start_client(self, rank: int, restart: int) -> None:
        log = self._log(f"rank {rank}", fresh=restart == 0)
        client = Client(rank, self._loop, self._keeper, self._terminal, log)
        client.ended = lambda: self._events.append(ClientEnded(rank, client.status or 0))
        try:
            client.start(self._job.program, client_environment(self._job, self._addresses, rank, restart))
        except OSError as error:
            raise StartError(f"rank {rank}: {self._job.program[0]!r} cannot be run: {error}") from error
        self._clients[rank] = client

    def _log(self, name: str, *, fresh: bool = True) -> Path | None:
        if self._log_dir is None:
            return None
        path = self._log_dir / f"{name.replace(' ', '-')}.log"
        if fresh:
            path.write_bytes(b"")
        return path

    def _attend(self) -> None:
        while not self._finished:
            if not self._events and not self._loop.signals:
                deadline = self._state.deadline
                self._loop.turn(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for event in self._gather():
                if not self._finished:
                    self._act_on(event)

    def _gather(self) -> list[Event]:
        """What happened. A client that was killed goes before clients that ended by themselves in the same turn: they
        may have failed because of it, never the other way round."""
        events, self._events = self._events, []
        events.sort(key=lambda event: isinstance(event, ClientEnded) and event.status >= 0)
        while self._loop.signals:
            events.append(Signalled(self._loop.signals.popleft()))
        if self._terminal.broken and self._state.interrupted_by is None:
            events.append(Signalled(signal.SIGPIPE))
        return [*events, Elapsed()]

    def _act_on(self, event: Event) -> None:
        self._state, actions = decide(self._state, event, time.monotonic())
        self._tell(event, actions)
        for action in actions:
            match action:
                case Restart(rank, count):
                    self._start_client(rank, count)
                case Send(ranks, signum):
                    self._send(ranks, signum)
                case Finish():
                    self._finished = True

    def _send(self, ranks: Sequence[int], signum: int) -> None:
        for rank in ranks:
            self._sent[rank] = signum
            self._clients[rank].send(signum)

    def _daemon_ended(self, daemon: Daemon) -> None:
        self._events.append(DaemonEnded(daemon.name, daemon.status or 0))

    def _tell(self, event: Event, actions: Sequence[Action]) -> None:
        """Says what is going on, and notes failures for the summary."""
        match event:
            case ClientEnded(rank, status) if status != 0 and self._state.interrupted_by is None:
                if any(isinstance(action, Restart) for action in actions):
                    again = f"starting it again ({self._state.restarts[rank]} of {self._policy.max_restarts})"
                    self._terminal.say(f"collectived: {self._clients[rank].describe()}: {describe(status)}; {again}")
                else:
                    self._note(self._clients[rank], self._sent.get(rank))
                    self._announce_grace(self._clients[rank], status)
            case DaemonEnded(name, status):
                daemon = next(daemon for daemon in self._daemons.all if daemon.name == name)
                self._note(daemon)
                self._terminal.say(f"collectived: {daemon.describe()} died: {describe(status)}; {self._effect(daemon)}")
            case Signalled(signum):
                self._terminal.say("; ".join([f"collectived: got {signal_name(signum)}", *_sending(actions)]))
            case Elapsed() if actions:
                self._terminal.say("; ".join(["collectived: some ranks are still running", *_sending(actions)]))

    def _announce_grace(self, client: Client, status: int) -> None:
        if self._state.phase is Phase.GRACE and len(self._failures) == 1 and self._state.alive:
            others = f"{_ranks(sorted(self._state.alive))} may take {self._policy.grace:g} s to end"
            self._terminal.say(f"collectived: {client.describe()} failed: {describe(status)}; {others}")

    def _effect(self, daemon: Daemon) -> str:
        """What the loss of a daemon means for the clients."""
        if daemon is self._daemons.coordinator:
            return "running groups go on, new ones cannot be formed"
        ranks = self._job.ranks_of(self._daemons.workers.index(daemon))
        return f"{_ranks(ranks)} lost their worker; their groups get errors"

    def _note(self, child: Child, sent: int | None = None) -> None:
        assert child.status is not None
        self._failures.append(Ending(child.name, child.pid, child.status, tuple(child.last_words), sent))

    def _take_down(self) -> None:
        """Clients that are still there only because of an error; then the daemons; then every trace."""
        for client in self._clients.values():
            client.send(signal.SIGKILL)
        await_end(self._loop, list(self._clients.values()))
        self._daemons.end()
        remove_traces(self._job.folder)
        self._keeper.close()


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _sending(actions: Sequence[Action]) -> list[str]:
    return [f"sending {signal_name(a.signum)} to {_ranks(a.ranks)}" for a in actions if isinstance(a, Send)]


def _free_port() -> int:
    """A TCP port that nobody uses right now."""
    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
