"""The ranks that measure: those of a new job, ranks beside a running job's programs, or this process."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

import click

from collectived_launcher.bench.screen import Screen
from collectived_launcher.hosts.local import LocalHost
from collectived_launcher.hosts.loop import Loop
from collectived_launcher.launch.child import Client
from collectived_launcher.launch.cli import choose_folder
from collectived_launcher.launch.daemons import await_end
from collectived_launcher.launch.job import Addresses, client_environment, make_job_name, make_local_job
from collectived_launcher.launch.job_state import (
    Action,
    ClientEnded,
    Event,
    Finish,
    Policy,
    SignalRanks,
    SignalReceived,
    TimerFired,
    decide,
    exit_status,
    make_initial_state,
)
from collectived_launcher.launch.messages import JobMessages
from collectived_launcher.launch.run import Run
from collectived_proto.addresses import probe_address
from collectived_proto.ipc import job_files

EXIT_UNREACHABLE = 3
_PROBE_SECONDS = 2.0  # seconds for a worker's socket to answer
Program = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """Where to measure. Without `environments` in a new job; else a client for each of them, by rank."""

    workers: int
    clients: int
    environments: Mapping[int, Mapping[str, str]] | None = None

    @property
    def ranks(self) -> int:
        return self.workers * self.clients

    def run(self, program: Program, screen: Screen) -> int:
        """Runs the program as all ranks; the exit status of the command, if no result is wrong."""
        if self.environments is not None:
            return AttachedClients(program, self.environments, screen).run()
        name = make_job_name()
        job = make_local_job(name, self.workers, self.clients, program)
        return Run(job, Policy(daemon_restarts=0), choose_folder(name, self.workers), terminal=screen).run()


def choose_target(
    workers: int | None, clients: int | None, worker: str | None, job: str | None, environment: Mapping[str, str]
) -> BenchTarget:
    """Choose where to measure: in a new job where `workers` is given or nothing runs, else in the running job.

    Raises:
        click.UsageError: the arguments contradict each other, or several jobs run.
        click.ClickException: the job does not run or the worker does not answer, exit status 3.
    """
    if (worker is not None) + (job is not None) + (workers is not None) > 1:
        raise click.UsageError(
            "--worker names a worker that runs, --job a job that runs, --workers starts new ones: expected one of them"
        )
    if all(environment.get(name) for name in ("COLLECTIVED_WORKER", "RANK", "WORLD_SIZE")):
        return _own_rank_target(workers or clients or worker or job, environment)
    if workers:
        return BenchTarget(workers, clients or 2)
    known = job_files.list_running_jobs()
    running = [one for one in known if one.workers]
    if job:
        from collectived_launcher.status.discovery import Unreachable, find_job  # imports gRPC

        running = [find_job(job, known)]
        if not running[0].workers:
            raise Unreachable(f"no worker of job {job!r} serves: {', '.join(running[0].away)}")
    elif named := worker or environment.get("COLLECTIVED_WORKER"):
        found = next((one for one in running if named in one.workers), None)
        name, coordinator = (found.job, found.coordinator) if found else ("", "")
        return _running_job_target(Addresses(coordinator, (named,), 0), name, clients or 2)
    if not running:
        return BenchTarget(1, clients or 2)
    if len(running) > 1:
        lines = "\n".join(f"    --job {one.job}  ({one.command})" for one in running)
        raise click.UsageError(
            f"you have {len(running)} jobs running on this host; say which, or --workers N for a new one:\n{lines}"
        )
    return _running_job_target(Addresses(running[0].coordinator, running[0].workers, 0), running[0].job, clients or 2)


def _own_rank_target(told: object, environment: Mapping[str, str]) -> BenchTarget:
    """We are a rank ourselves, started as such by `collectived launch` or another launcher."""
    if told:
        raise click.UsageError(
            f"this is rank {environment['RANK']} of a job (RANK is set), which measures with the ranks that it has: "
            "expected no --workers, --clients, --worker or --job"
        )
    try:
        return BenchTarget(1, int(environment["WORLD_SIZE"]), {int(environment["RANK"]): {}})
    except ValueError:
        raise click.UsageError(
            f"RANK={environment['RANK']!r} and WORLD_SIZE={environment['WORLD_SIZE']!r}: expected whole numbers"
        ) from None


def _running_job_target(addresses: Addresses, job: str, clients: int) -> BenchTarget:
    """Clients of a job that runs, in a group of their own."""
    for address in addresses.workers:
        _probe(address)
    group = f"bench-{secrets.token_hex(4)}"
    place = make_local_job(job, len(addresses.workers), clients, ())
    environments = {}
    for rank in range(place.size):
        variables = {**client_environment(place, addresses, rank, restart=0), "COLLECTIVED_GROUP": group}
        unknown = () if job else ("COLLECTIVED_JOB", "COLLECTIVED_COORDINATOR")
        environments[rank] = {name: value for name, value in variables.items() if name not in unknown}
    return BenchTarget(len(addresses.workers), clients, environments)


def _probe(address: str) -> None:
    """Connects and hangs up, so that nothing is started in vain."""
    try:
        probe_address(address, _PROBE_SECONDS)
    except ValueError:
        raise click.UsageError(f"--worker {address!r} is not an address: expected unix:/path or host:port") from None
    except OSError as error:
        from collectived_launcher.status.discovery import Unreachable  # imports gRPC

        raise Unreachable(f"no worker answers at {address}: {error}") from error


class AttachedClients:
    """Clients of daemons that others run: started, watched and ended as those of a job."""

    def __init__(self, program: Program, environments: Mapping[int, Mapping[str, str]], screen: Screen) -> None:
        policy = Policy()
        self._program, self._environments, self._screen = program, environments, screen
        self._messages = JobMessages(policy, screen)
        self._state = make_initial_state(policy, dict.fromkeys(environments, "their worker"))
        self._clients: dict[int, Client] = {}
        self._sent_signals: dict[int, int] = {}
        self._ended_ranks: list[int] = []

    def run(self) -> int:
        """Runs them to their end; returns the exit status of the command."""
        with Loop() as loop:
            here = LocalHost(loop, job_files.ensure_runtime_folder() / f"bench-{make_job_name()}")
            try:
                here.open(lambda: None)
                for rank, variables in self._environments.items():
                    self._clients[rank] = client = Client(rank, self._screen, None)
                    client.exit_callback = lambda rank=rank: self._ended_ranks.append(rank)  # type: ignore[misc]
                    client.start(here, self._program, variables)
                self._run_loop(loop)
            finally:
                for client in self._clients.values():
                    client.send(signal.SIGKILL)
                await_end(loop, list(self._clients.values()))
                here.close()
        if any(client.status == EXIT_UNREACHABLE for client in self._clients.values()):
            return EXIT_UNREACHABLE
        self._messages.print_summary({}, self._clients)
        return exit_status(self._state)

    def _run_loop(self, loop: Loop) -> None:
        finished = False
        while not finished:
            if not self._ended_ranks and not loop.signals:
                wakeup = self._state.next_deadline
                loop.run_once(None if wakeup is None else max(0.0, wakeup - time.monotonic()))
            for event in self._collect_events(loop):
                self._state, actions = decide(self._state, event, time.monotonic())
                self._report(event, actions)
                for action in actions:
                    if isinstance(action, SignalRanks):
                        self._send_signals(action)
                    finished = finished or isinstance(action, Finish)

    def _collect_events(self, loop: Loop) -> list[Event]:
        """As in a job: killed clients come before those that ended by themselves, which may have failed by that."""
        ended = [ClientEnded(rank, self._clients[rank].status or 0) for rank in self._ended_ranks]
        events: list[Event] = [*sorted(ended, key=lambda event: event.status >= 0)]
        self._ended_ranks = []
        while loop.signals:
            events.append(SignalReceived(loop.signals.popleft()))
        if self._screen.is_broken and self._state.interrupted_by is None:
            events.append(SignalReceived(signal.SIGPIPE))
        return [*events, TimerFired()]

    def _send_signals(self, action: SignalRanks) -> None:
        for rank in action.ranks:
            self._sent_signals[rank] = action.signum
            self._clients[rank].send(action.signum)

    def _report(self, event: Event, actions: tuple[Action, ...]) -> None:
        match event:
            case ClientEnded(rank, status) if (
                status not in (0, EXIT_UNREACHABLE) and self._state.interrupted_by is None
            ):
                self._messages.report_client_failure(self._clients[rank], self._state, self._sent_signals.get(rank))
            case SignalReceived(signum):
                self._messages.report_signal(signum, actions)
            case TimerFired():
                self._messages.report_deadline(actions)
