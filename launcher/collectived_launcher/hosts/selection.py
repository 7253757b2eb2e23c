"""Which hosts a job runs on, and how they are reached: this one alone, those of a list over ssh, or Slurm's nodes."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from collectived_launcher.hosts import agent, slurm, slurm_rendezvous, ssh_command
from collectived_launcher.hosts.host import LOCALHOST, Host
from collectived_launcher.hosts.hostlist import ClientsByHost, parse_hostfile, parse_hosts
from collectived_launcher.hosts.local import LocalHost
from collectived_launcher.hosts.loop import Loop
from collectived_launcher.hosts.output import Terminal
from collectived_launcher.hosts.remote_host import AgentJob, RemoteCommand, RemoteHost
from collectived_proto.types import RELEASE

# Variables that the launcher sets for clients itself, and secrets, which no program gets.
_LAUNCHER_VARIABLES = {"WORKER", "COORDINATOR", "JOB", "GROUP", "TIMEOUT", "RESTART", "SECRET", "SECRET_FILE"}
_RENDEZVOUS_TIMEOUT = 120.0  # srun starts tasks one after the other
_PREFIX = "COLLECTIVED_"


class RendezvousFailed(click.ClickException):
    """The tasks of a step did not find each other."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The user's options about hosts; None and '' where there is none. `clients` is per host without a number."""

    workers: int | None = None
    clients: int | None = None
    hosts: str = ""
    hostfile: Path | None = None
    ssh: str = "ssh"
    python: str = ""
    host_timeout: float = 30.0


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Clients of each worker, the host of each, and what starts an agent on a host that is not this one,
    `local_host`.
    """

    clients: tuple[int, ...]
    hosts: tuple[str, ...]
    make_remote_command: Callable[[str], RemoteCommand] | None = None
    local_host: str = LOCALHOST

    @property
    def has_remote_hosts(self) -> bool:
        return self.make_remote_command is not None and any(host != LOCALHOST for host in self.hosts)

    def create_remote_hosts(
        self, loop: Loop, here: LocalHost, name: str, silence: float, terminal: Terminal
    ) -> dict[str, Host]:
        """The hosts other than this one, not opened yet."""
        made: dict[str, Host] = {}
        if self.make_remote_command is None:
            return made
        for number, host in enumerate(self.hosts):
            if host != self.local_host:
                job = AgentJob(f"{name}-{number}", RELEASE, silence)
                said = partial(terminal.show, 2, host)
                made[host] = RemoteHost(loop, host, self.make_remote_command(host), job, here.reaper, said)
        return made


def choose_hosts(wish: HostOptions, environment: Mapping[str, str], program: Sequence[str]) -> HostPlan:
    """
    Raises:
        click.UsageError: the wishes contradict each other, or name no hosts.
        SystemExit: we were the agent of a node, and are done.
    """
    if wish.hosts and wish.hostfile:
        raise click.UsageError("--hosts and --hostfile both name the hosts: expected one of the two")
    if (wish.hosts or wish.hostfile) and wish.workers:
        raise click.UsageError("--workers starts workers on this host alone; every host of --hosts has one worker")
    if wish.hosts or wish.hostfile:
        listed = _parse_listed_hosts(wish)
        return HostPlan(tuple(listed.values()), tuple(listed), _make_ssh_factory(wish, listed))
    if wish.workers is None and (allocation := slurm.find_allocation(environment)):
        nodes = slurm.expand_nodes(allocation.nodes)
        tasks = (wish.clients,) if wish.clients else allocation.tasks or (1,)
        clients = tasks if len(tasks) == len(nodes) else tasks[:1] * len(nodes)
        return HostPlan(clients, nodes, lambda node: slurm.make_remote_command(node, _python(wish)))
    if wish.workers is None and (step := slurm.find_step(environment, program)):
        return _plan_slurm_step(step, wish)
    workers = wish.workers or 1
    return HostPlan((wish.clients or 1,) * workers, (LOCALHOST,) * workers)


def _plan_slurm_step(step: slurm.SlurmStep, wish: HostOptions) -> HostPlan:
    """As the first task of srun's step: its nodes. As another one: serves the first until that has ended."""
    try:
        if not step.is_leader:
            connection = slurm_rendezvous.offer_agent(step.folder / str(step.task), _RENDEZVOUS_TIMEOUT)
            raise SystemExit(agent.serve_socket(connection.detach()))
        nodes = slurm.expand_nodes(step.nodes)
        others = slurm_rendezvous.await_offers(step.folder, list(range(1, step.tasks)), _RENDEZVOUS_TIMEOUT)
    except (OSError, slurm_rendezvous.RendezvousTimeout) as error:
        raise RendezvousFailed(str(error)) from error
    offers = dict(zip(nodes[1:], others, strict=True))
    return HostPlan(
        (wish.clients or 1,) * len(nodes),
        nodes,
        lambda node: slurm_rendezvous.make_remote_command(offers[node]),
        nodes[0],
    )


def _parse_listed_hosts(wish: HostOptions) -> ClientsByHost:
    try:
        if wish.hostfile is None:
            return parse_hosts(wish.hosts, wish.clients or 1)
        return parse_hostfile(wish.hostfile.read_text(), str(wish.hostfile), wish.clients or 1)
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from error


def _make_ssh_factory(wish: HostOptions, listed: ClientsByHost) -> Callable[[str], RemoteCommand]:
    command = parse_ssh_command(wish.ssh, listed)
    return lambda host: ssh_command.make_remote_command(host, _python(wish), command, wish.host_timeout)


def parse_ssh_command(written: str, hosts: Collection[str]) -> list[str]:
    """Split the value of `--ssh` into words.

    Raises:
        click.UsageError: it is no command, and one of the hosts is not this one.
    """
    try:
        command = shlex.split(written)
    except ValueError as error:
        raise click.UsageError(f"--ssh {written!r} is no command: {error}") from None
    if any(host != LOCALHOST for host in hosts) and not (command and shutil.which(command[0])):
        raise click.UsageError(f"--ssh {written!r}: no such program; other hosts are reached by OpenSSH's client")
    return command


def _python(wish: HostOptions) -> str:
    return wish.python or sys.executable


def collect_forwarded_variables(environment: Mapping[str, str], wished: tuple[str, ...]) -> dict[str, str]:
    """Return the variables for programs on other hosts: those of collectived, and those that `--env` names.

    Raises:
        click.UsageError: one of them is not set here.
    """
    found = {
        name: value
        for name, value in environment.items()
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in _LAUNCHER_VARIABLES
    }
    return {**found, **parse_env_options(environment, wished)}


def parse_env_options(environment: Mapping[str, str], wished: tuple[str, ...]) -> dict[str, str]:
    """`NAME=VALUE`, or `NAME` for the value that it has here."""
    found = {}
    for word in wished:
        name, equals, value = word.partition("=")
        if not name or (not equals and name not in environment):
            raise click.UsageError(f"--env {word!r}: expected NAME=VALUE, or the name of a variable that is set here")
        found[name] = value if equals else environment[name]
    return found
