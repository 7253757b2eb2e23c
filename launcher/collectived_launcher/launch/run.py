"""Runs one job on its hosts: coordinator, workers, then clients; and takes them down again, clients first.

What to do when something ends is decided in `supervise`, and told by `account`; here it is done. One thread, one wait
(`loop`). What starts processes on this host and on others lies behind `host`: whatever happens to the launcher, nothing
outlives it.
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from collectived_launcher.doctor.at_start import tell_failures
from collectived_launcher.launch.account import Account
from collectived_launcher.launch.child import Client, Daemon
from collectived_launcher.launch.daemons import DaemonCommand, Daemons, StartError, await_end
from collectived_launcher.launch.ground import Ground, Surveyor, Unreachable
from collectived_launcher.launch.here import Here
from collectived_launcher.launch.host import NOT_RUN, Answer, Host
from collectived_launcher.launch.job import COORDINATOR, LOCALHOST, Addresses, Job, client_environment
from collectived_launcher.launch.keeper import PATIENCE
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

UNREACHABLE = 3
_ENDED_WITHIN = PATIENCE + 3.0  # seconds for an agent to end what it started, and itself

Elsewheres = Callable[[Loop, Here], dict[str, Host]]


class Run:
    """One run of one job.

    Args:
        folder: for the job's sockets on this host.
        others: gives the job's other hosts by their names; None: there are none.
        here: what the user calls this host.
        coordinator: name of the host where the coordinator runs.
        interface: by which hosts reach each other, as `errands.address` takes it.
        log_dir: gets one file per process; what they print is shown on `terminal`.
        running: the daemons, where they run already and stay.
    """

    def __init__(
        self,
        job: Job,
        policy: Policy,
        folder: Path,
        *,
        others: Elsewheres | None = None,
        here: str = LOCALHOST,
        coordinator: str = LOCALHOST,
        interface: str = "",
        log_dir: Path | None = None,
        command: DaemonCommand | None = None,
        terminal: Terminal | None = None,
        running: Addresses | None = None,
    ) -> None:
        self._job, self._policy, self._folder, self._log_dir = job, policy, folder, log_dir
        self._here, self._others, self._coordinator, self._interface = here, others, coordinator, interface
        self._command = command or DaemonCommand()
        self._running = running
        self._terminal = terminal or Terminal()
        self._account = Account(policy, self._terminal)
        self._state = begin(policy, {})
        self._finished = False
        self._daemons: Daemons | None = None
        self._clients: dict[int, Client] = {}
        self._sent: dict[int, int] = {}  # rank -> the last signal that we sent it
        self._events: list[Event] = []
        self._logged: set[str] = set()  # whose log was begun by this job

    def run(self) -> int:
        """Runs the job to its end; returns the exit status of the command."""
        with Loop() as self._loop:
            here = Here(self._loop, self._folder, self._here)
            self._hosts: dict[str, Host] = {self._here: here}
            try:
                here.open(lambda: None)  # first of all, for from then on somebody cleans up after us
                self._terminal.say(self._job.opening(), stream=1)
                if self._others is not None:
                    self._hosts.update(self._others(self._loop, here))
                self._start()
                self._attend()
            except StartError as error:
                self._terminal.say(f"collectived: {error}")
                if not self._job.spread:  # it looks at this host
                    tell_failures(self._terminal.say)
                return 1
            except Unreachable as error:
                self._terminal.say(f"collectived: {error}")
                return UNREACHABLE
            finally:
                self._take_down()
        self._account.close()
        return exit_status(self._state)

    def _start(self) -> None:
        """All of it, or as much as there was time for before a signal."""
        names = dict.fromkeys([*self._job.hosts, self._coordinator])
        hosts = [self._hosts[name] for name in names]
        spread = self._job.spread
        ground = Surveyor(self._loop, hosts, self._interface, self._say, spread).survey()
        if ground is None:
            return
        if spread:
            self._terminal.while_waiting = self._keep_warm
        if self._running is not None:
            first = ground.addresses[self._job.hosts[0]]
            self._addresses = replace(self._running, rendezvous=ground.rendezvous, master=first)
            self._start_clients()
            return
        where = {name: self._host_of(worker) for worker, name in enumerate(self._job.worker_names)}
        self._daemons = Daemons(
            self._job,
            self._command,
            {COORDINATOR: self._hosts[self._coordinator], **where},
            ground.addresses if spread else {},
            self._loop,
            self._terminal,
            self._new_daemon,
            self._policy.ready_within,
        )
        if self._daemons.start():
            self._publish(self._daemons, ground)
            self._start_clients()

    def _say(self, text: str) -> None:
        self._terminal.say(f"collectived: {text}")

    def _keep_warm(self) -> None:
        for host in self._hosts.values():
            host.keep_warm()

    def _host_of(self, worker: int) -> Host:
        return self._hosts[self._job.hosts[worker]]

    def _publish(self, daemons: Daemons, ground: Ground) -> None:
        """From now on notices when a daemon dies, and lets others find the job."""
        job = self._job
        workers = tuple(worker.address for worker in daemons.workers)
        first = ground.addresses[job.hosts[0]]
        self._addresses = Addresses(daemons.coordinator.address, workers, ground.rendezvous, first)
        for daemon in daemons.all:
            self._watch(daemon)
        page = daemons.page
        answers: list[Answer] = []
        names = dict.fromkeys(job.hosts)
        for name in names:
            about = {
                "job": job.name,
                "coordinator": daemons.coordinator.address,
                "workers": [workers[worker] for worker, host in enumerate(job.hosts) if host == name],
                "command": shlex.join(job.program),
                "page": page.link if page else "",
            }
            self._hosts[name].ask("publish", about, answers.append)
        self._loop.until(lambda: len(answers) == len(names), self._policy.ready_within)
        for answer in answers:
            if answer.get("trouble"):
                self._say(f"`collectived status` will not find this job: {answer['trouble']}")
        if page:
            file, place = f"{self._first_folder()}.json", self._coordinator if job.spread else ""
            self._terminal.say(page.line(file, os.isatty(1), place), stream=1)
        for daemon in daemons.all:
            self._say_metrics(daemon)
        if any(daemon.metrics for daemon in daemons.all):
            self._hand_out_token(daemons.viewing_token)

    def _hand_out_token(self, token: str) -> None:
        """Puts the token for metrics into the job's folder on every host, for whoever scrapes there."""
        answers: list[Answer] = []
        names = dict.fromkeys(self._job.hosts)
        for name in names:
            self._hosts[name].ask("token", {"token": token}, answers.append)
        self._loop.until(lambda: len(answers) == len(names), self._policy.ready_within)
        for trouble in (answer["trouble"] for answer in answers if "trouble" in answer):
            self._say(f"the token that metrics need cannot be written: {trouble}")
        if places := dict.fromkeys(str(answer["path"]) for answer in answers if "path" in answer):
            self._say(f"metrics need the token in {' or '.join(places)} (Prometheus: credentials_file)")

    def _first_folder(self) -> str:
        """Of the host of the first worker, beside which the job's file is."""
        known = self._host_of(0).facts
        return known.folder if known else ""

    def _say_metrics(self, daemon: Daemon) -> None:
        if daemon.metrics:
            self._say(daemon.metrics)

    def _watch(self, daemon: Daemon) -> None:
        daemon.when_ended = lambda: self._events.append(DaemonEnded(daemon.name, daemon.status or 0, random.random()))
        daemon.became_ready = lambda: self._events.append(DaemonReady(daemon.name))

    def _new_daemon(self, name: str) -> Daemon:
        spread = self._job.spread
        worker = None if name == COORDINATOR else self._job.worker_names.index(name)
        place = self._coordinator if worker is None and spread else "" if worker is None else self._job.place_of(worker)
        return Daemon(name, self._terminal, self._log(name), place)

    def _start_clients(self) -> None:
        names = self._job.worker_names
        self._state = begin(self._policy, {rank: names[self._job.worker_of(rank)] for rank in range(self._job.size)})
        for rank in range(self._job.size):
            self._start_client(rank, restart=0)

    def _start_client(self, rank: int, restart: int) -> None:
        worker = self._job.worker_of(rank)
        client = Client(rank, self._terminal, self._log(f"rank {rank}"), self._job.place_of(worker))
        client.when_ended = lambda: self._events.append(ClientEnded(rank, client.status or 0))
        self._clients[rank] = client
        variables = client_environment(self._job, self._addresses, rank, restart)
        client.start(self._host_of(worker), self._job.program, variables, self._job.folder)

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
        """
        Raises:
            StartError: a client cannot be run.
        """
        if isinstance(event, ClientEnded) and event.status == NOT_RUN and self._clients[event.rank].trouble:
            client = self._clients[event.rank]
            raise StartError(f"{client.describe()}: {client.trouble}")
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
                    self._account.daemon_started_again(self._daemon(name))
                    self._watch(self._all_daemons.start_again(name))
                case KillDaemon(name):
                    self._account.daemon_late(self._daemon(name))
                    self._all_daemons.kill(name)
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
                self._say_metrics(self._daemon(name))  # it has another port now
            case DaemonEnded(name):
                self._account.daemon_ended(self._daemon(name), self._state, now)
            case Signalled(signum):
                self._account.signalled(signum, actions)
            case Elapsed():
                self._account.sends(actions)

    @property
    def _all_daemons(self) -> Daemons:
        assert self._daemons is not None
        return self._daemons

    def _daemon(self, name: str) -> Daemon:
        return self._all_daemons[name]

    def _take_down(self) -> None:
        """Clients that are still there only because of an error; then the daemons; then every trace."""
        for client in self._clients.values():
            client.send(signal.SIGKILL)
        await_end(self._loop, list(self._clients.values()))
        if self._daemons is not None:
            self._daemons.end()
        here, *others = self._hosts.values()
        for host in others:
            host.close()
        deadline = time.monotonic() + _ENDED_WITHIN
        while not all(host.gone for host in others) and time.monotonic() < deadline:
            self._loop.turn(deadline - time.monotonic())
        for host in others:
            if not host.gone:
                self._say(f"{host.name} did not end within {_ENDED_WITHIN:g} s; what is left there ends by itself")
                host.kill()
        here.close()
