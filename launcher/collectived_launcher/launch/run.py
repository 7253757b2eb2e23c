"""Runs one job on its hosts: coordinator, workers, then clients; and takes them down again, clients first.

`job_state` decides what to do when a process ends, `messages` reports it, and this module does it. One thread, one
wait (`loop`). `host` starts processes on this host and on others: whatever happens to the launcher,
nothing outlives it.
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from collectived_launcher.doctor.startup import report_failures
from collectived_launcher.hosts.host import LOCALHOST, NOT_RUN, Host, TaskResult
from collectived_launcher.hosts.host_tasks import failure_file
from collectived_launcher.hosts.local import LocalHost
from collectived_launcher.hosts.log_file import LogFile
from collectived_launcher.hosts.loop import Loop
from collectived_launcher.hosts.output import Terminal
from collectived_launcher.hosts.preflight import HostAddresses, HostUnreachable, Preflight
from collectived_launcher.hosts.reaper import KILL_AFTER
from collectived_launcher.launch.child import Client, Daemon
from collectived_launcher.launch.daemons import DaemonCommand, Daemons, StartError, await_end
from collectived_launcher.launch.job import COORDINATOR, Addresses, Job, client_environment
from collectived_launcher.launch.job_logs import open_daemon_log
from collectived_launcher.launch.job_state import (
    Action,
    ClientEnded,
    DaemonEnded,
    DaemonReady,
    Event,
    Finish,
    KillDaemon,
    Policy,
    Restart,
    SignalRanks,
    SignalReceived,
    StartDaemon,
    TimerFired,
    decide,
    exit_status,
    make_initial_state,
)
from collectived_launcher.launch.messages import JobMessages
from collectived_launcher.launch.summary import ClientReport, read_reports

UNREACHABLE = 3
_REPORTS_TIMEOUT = 5.0  # seconds for hosts to report why clients failed
_END_TIMEOUT = KILL_AFTER + 3.0  # seconds for an agent to end what it started, and itself

RemoteHostsFactory = Callable[[Loop, LocalHost], dict[str, Host]]


@dataclass(frozen=True, slots=True)
class JobHosts:
    """The hosts of a job, as this one reaches them.

    Attributes:
        others: gives the other hosts by their names; None: there are none.
        here: what the user calls this host.
        coordinator: name of the host where the coordinator runs.
        interface: by which hosts reach each other, as `host_tasks.choose_address` takes it.
    """

    others: RemoteHostsFactory | None = None
    here: str = LOCALHOST
    coordinator: str = LOCALHOST
    interface: str = ""


_THIS_HOST = JobHosts()


class Run:
    """One run of one job.

    Args:
        folder: for the job's sockets on this host.
        daemons: how they are started, or where they are if they run already and stay.
        log_dir: gets one file per process, whose output is also shown on `terminal`.
    """

    def __init__(
        self,
        job: Job,
        policy: Policy,
        folder: Path,
        *,
        hosts: JobHosts = _THIS_HOST,
        daemons: DaemonCommand | Addresses | None = None,
        log_dir: Path | None = None,
        terminal: Terminal | None = None,
    ) -> None:
        self._job, self._policy, self._folder, self._log_dir = job, policy, folder, log_dir
        self._job_hosts = hosts
        self._daemon_source = daemons or DaemonCommand()
        self._terminal = terminal or Terminal()
        self._messages = JobMessages(policy, self._terminal)
        self._state = make_initial_state(policy, {})
        self._finished = False
        self._daemons: Daemons | None = None
        self._clients: dict[int, Client] = {}
        self._last_signals: dict[int, int] = {}  # rank -> the last signal that we sent it
        self._events: list[Event] = []
        self._started_logs: set[str] = set()  # whose log was begun by this job

    def run(self) -> int:
        """Runs the job to its end; returns the exit status of the command."""
        with Loop() as self._loop:
            here = LocalHost(self._loop, self._folder, self._job_hosts.here)
            self._hosts: dict[str, Host] = {self._job_hosts.here: here}
            try:
                here.open(lambda: None)  # first of all, for from then on the reaper cleans up after the launcher
                self._terminal.say(self._job.format_banner(), stream=1)
                if self._job_hosts.others is not None:
                    self._hosts.update(self._job_hosts.others(self._loop, here))
                self._start()
                self._run_events()
                reports = self._collect_reports()
            except StartError as error:
                self._terminal.say(f"collectived: {error}")
                if not self._job.has_remote_hosts:  # it looks at this host
                    report_failures(self._terminal.say)
                return 1
            except HostUnreachable as error:
                self._terminal.say(f"collectived: {error}")
                return UNREACHABLE
            finally:
                self._shut_down()
        self._messages.print_summary(reports, self._clients)
        return exit_status(self._state)

    def _start(self) -> None:
        """All of it, or as much as there was time for before a signal."""
        names = dict.fromkeys([*self._job.hosts, self._job_hosts.coordinator])
        hosts = [self._hosts[name] for name in names]
        spread = self._job.has_remote_hosts
        preflight = Preflight(self._loop, hosts, self._job_hosts.interface, self._terminal, spread)
        ground = preflight.run()
        if ground is None or (spread and not self._check_program(preflight)):
            return
        if spread:
            self._terminal.blocked_callback = self._send_keepalives
        if isinstance(self._daemon_source, Addresses):
            first = ground.addresses[self._job.hosts[0]]
            self._addresses = replace(self._daemon_source, master_port=ground.master_port, master_address=first)
            self._start_clients()
            return
        where = {name: self._get_host(worker) for worker, name in enumerate(self._job.worker_names)}
        self._daemons = Daemons(
            self._job,
            replace(self._daemon_source, ready_timeout=self._policy.ready_timeout),
            {COORDINATOR: self._hosts[self._job_hosts.coordinator], **where},
            ground.addresses if spread else {},
            self._loop,
            self._terminal,
            self._new_daemon,
        )
        if self._daemons.start():
            self._publish(self._daemons, ground)
            self._start_clients()

    def _check_program(self, preflight: Preflight) -> bool:
        """Whether all hosts have the program's files, and no signal came first."""
        job = self._job
        hosts = [self._hosts[name] for name in dict.fromkeys(job.hosts)]
        return preflight.check_program(hosts, job.program, job.folder, job.variables.get("PATH", ""))

    def _say(self, text: str) -> None:
        self._terminal.say(f"collectived: {text}")

    def _send_keepalives(self) -> None:
        for host in self._hosts.values():
            host.send_keepalive()

    def _get_host(self, worker: int) -> Host:
        return self._hosts[self._job.hosts[worker]]

    def _publish(self, daemons: Daemons, ground: HostAddresses) -> None:
        """From now on notices when a daemon dies, and lets others find the job."""
        job = self._job
        workers = tuple(worker.address for worker in daemons.workers)
        first = ground.addresses[job.hosts[0]]
        self._addresses = Addresses(daemons.coordinator.address, workers, ground.master_port, first)
        for daemon in daemons.all_daemons:
            self._observe_daemon(daemon)
        page = daemons.page
        answers: list[TaskResult] = []
        names = dict.fromkeys(job.hosts)
        for name in names:
            about = {
                "job": job.name,
                "coordinator": daemons.coordinator.address,
                "workers": [workers[worker] for worker, host in enumerate(job.hosts) if host == name],
                "command": shlex.join(job.program),
                "page": page.link if page else "",
            }
            self._hosts[name].run_task("publish", about, answers.append)
        self._loop.run_until(lambda: len(answers) == len(names), self._policy.ready_timeout)
        for answer in answers:
            if answer.get("trouble"):
                self._say(f"`collectived status` will not find this job: {answer['trouble']}")
        if page:
            file, place = (
                f"{self._get_first_host_folder()}.json",
                self._job_hosts.coordinator if job.has_remote_hosts else "",
            )
            self._terminal.say(page.format_line(file, os.isatty(1), place), stream=1)
        for daemon in daemons.all_daemons:
            self._say_metrics(daemon)
        if any(daemon.metrics_line for daemon in daemons.all_daemons):
            self._write_metrics_token(daemons.viewing_token)

    def _write_metrics_token(self, token: str) -> None:
        """Puts the token for metrics into the job's folder on every host, for scrapers there."""
        answers: list[TaskResult] = []
        names = dict.fromkeys(self._job.hosts)
        for name in names:
            self._hosts[name].run_task("token", {"token": token}, answers.append)
        self._loop.run_until(lambda: len(answers) == len(names), self._policy.ready_timeout)
        for trouble in (answer["trouble"] for answer in answers if "trouble" in answer):
            self._say(f"the token that metrics need cannot be written: {trouble}")
        if places := dict.fromkeys(str(answer["path"]) for answer in answers if "path" in answer):
            self._say(f"metrics need the token in {' or '.join(places)} (Prometheus: credentials_file)")

    def _get_first_host_folder(self) -> str:
        """Of the host of the first worker, beside which the job's file is."""
        known = self._get_host(0).facts
        return known.folder if known else ""

    def _say_metrics(self, daemon: Daemon) -> None:
        if daemon.metrics_line:
            self._say(daemon.metrics_line)

    def _observe_daemon(self, daemon: Daemon) -> None:
        daemon.exit_callback = lambda: self._events.append(
            DaemonEnded(daemon.name, daemon.status or 0, random.random())
        )
        daemon.ready_callback = lambda: self._events.append(DaemonReady(daemon.name))

    def _new_daemon(self, name: str) -> Daemon:
        spread = self._job.has_remote_hosts
        if name == COORDINATOR:
            host = self._job_hosts.coordinator
            place = host if spread else ""
        else:
            worker = self._job.worker_names.index(name)
            host, place = self._job.hosts[worker], self._job.get_host_label(worker)
        log = None
        try:
            log = open_daemon_log(self._folder, host, name, self._find_log(name))
        except OSError as error:
            self._say(f"`collectived logs` will not show {name}: {error}")
        return Daemon(name, self._terminal, log, place)

    def _start_clients(self) -> None:
        names = self._job.worker_names
        self._state = make_initial_state(
            self._policy, {rank: names[self._job.find_worker(rank)] for rank in range(self._job.size)}
        )
        for rank in range(self._job.size):
            self._start_client(rank, restart=0)

    def _start_client(self, rank: int, restart: int) -> None:
        worker = self._job.find_worker(rank)
        log = self._find_log(f"rank {rank}")
        client = Client(rank, self._terminal, LogFile(log) if log else None, self._job.get_host_label(worker))
        client.exit_callback = lambda: self._events.append(ClientEnded(rank, client.status or 0))
        self._clients[rank] = client
        variables = client_environment(self._job, self._addresses, rank, restart)
        host = self._get_host(worker)
        if host.facts is not None:
            variables["COLLECTIVED_FAILURE_FILE"] = failure_file(host.facts.folder, rank, restart)
        client.start(host, self._job.program, variables, self._job.folder)

    def _find_log(self, name: str) -> Path | None:
        """In --log-dir, of a process that is started, or started again and goes on in the same file."""
        if self._log_dir is None:
            return None
        path = self._log_dir / f"{name.replace(' ', '-')}.log"
        if name not in self._started_logs:
            path.write_bytes(b"")
            self._started_logs.add(name)
        return path

    def _run_events(self) -> None:
        while not self._finished:
            if not self._events and not self._loop.signals:
                wakeup = self._state.next_deadline
                self._loop.run_once(None if wakeup is None else max(0.0, wakeup - time.monotonic()))
            for event in self._collect_events():
                if not self._finished:
                    self._handle_event(event)

    def _collect_events(self) -> list[Event]:
        """Return the events since the last call, in order.

        Killed daemons and clients come before clients that ended by themselves in the same turn. The latter may have
        failed because of the former, never the other way round.
        """
        events, self._events = self._events, []
        events.sort(key=lambda event: isinstance(event, ClientEnded) and event.status >= 0)
        while self._loop.signals:
            events.append(SignalReceived(self._loop.signals.popleft()))
        if self._terminal.is_broken and self._state.interrupted_by is None:
            events.append(SignalReceived(signal.SIGPIPE))
        return [*events, TimerFired()]

    def _handle_event(self, event: Event) -> None:
        """
        Raises:
            StartError: a client cannot be run.
        """
        if isinstance(event, ClientEnded) and event.status == NOT_RUN and self._clients[event.rank].trouble:
            client = self._clients[event.rank]
            raise StartError(f"{client.describe()}: {client.trouble}")
        now = time.monotonic()
        self._state, actions = decide(self._state, event, now)
        self._report_event(event, actions, now)
        for action in actions:
            match action:
                case Restart(rank, count):
                    self._start_client(rank, count)
                case SignalRanks(ranks, signum):
                    self._signal_ranks(ranks, signum)
                case StartDaemon(name):
                    self._messages.count_daemon_restart(self._daemon(name))
                    self._observe_daemon(self._started_daemons.restart(name))
                case KillDaemon(name):
                    self._messages.report_daemon_timeout(self._daemon(name))
                    self._started_daemons.kill(name)
                case Finish():
                    self._finished = True

    def _collect_reports(self) -> dict[int, ClientReport]:
        """Collect the reports in which clients say why they failed, as far as their hosts answer in time."""
        if not self._messages.has_failures:
            return {}
        ranks: dict[str, dict[str, int]] = {}
        for rank in self._clients:
            host = self._job.hosts[self._job.find_worker(rank)]
            ranks.setdefault(host, {})[str(rank)] = self._state.restarts.get(rank, 0)
        answers: list[TaskResult] = []
        for host, restarts in ranks.items():
            self._hosts[host].run_task("failures", {"ranks": restarts}, answers.append)
        self._loop.run_until(lambda: len(answers) == len(ranks), _REPORTS_TIMEOUT)
        found = {int(rank): report for answer in answers for rank, report in answer.get("reports", {}).items()}
        places = {rank: (self._job.find_worker(rank), client.pid) for rank, client in self._clients.items()}
        return read_reports(found, places)

    def _signal_ranks(self, ranks: Sequence[int], signum: int) -> None:
        for rank in ranks:
            self._last_signals[rank] = signum
            self._clients[rank].send(signum)

    def _report_event(self, event: Event, actions: Sequence[Action], now: float) -> None:
        match event:
            case ClientEnded(rank, status) if status != 0 and self._state.interrupted_by is None:
                self._messages.report_client_failure(self._clients[rank], self._state, self._last_signals.get(rank))
            case DaemonReady(name):
                self._say_metrics(self._daemon(name))  # it has another port now
            case DaemonEnded(name):
                self._messages.report_daemon_end(self._daemon(name), self._state, now)
            case SignalReceived(signum):
                self._messages.report_signal(signum, actions)
            case TimerFired():
                self._messages.report_deadline(actions)

    @property
    def _started_daemons(self) -> Daemons:
        assert self._daemons is not None
        return self._daemons

    def _daemon(self, name: str) -> Daemon:
        return self._started_daemons[name]

    def _shut_down(self) -> None:
        """Clients that are still there only because of an error; then the daemons; then every trace."""
        for client in self._clients.values():
            client.send(signal.SIGKILL)
        await_end(self._loop, list(self._clients.values()))
        if self._daemons is not None:
            self._daemons.stop()
        here, *others = self._hosts.values()
        for host in others:
            host.close()
        deadline = time.monotonic() + _END_TIMEOUT
        while not all(host.closed for host in others) and time.monotonic() < deadline:
            self._loop.run_once(deadline - time.monotonic())
        for host in others:
            if not host.closed:
                self._say(f"{host.name} did not end within {_END_TIMEOUT:g} s; its processes end by themselves")
                host.kill()
        here.close()
