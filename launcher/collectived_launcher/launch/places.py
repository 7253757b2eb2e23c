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

from collectived_launcher.launch import agent, meeting, slurm, ssh
from collectived_launcher.launch.elsewhere import Carrier, Elsewhere
from collectived_launcher.launch.elsewhere import Job as AgentJob
from collectived_launcher.launch.here import Here
from collectived_launcher.launch.host import Host
from collectived_launcher.launch.hostlist import Listed, parse_hostfile, parse_hosts
from collectived_launcher.launch.job import LOCALHOST
from collectived_launcher.launch.loop import Loop
from collectived_launcher.launch.output import Terminal
from collectived_proto.types import RELEASE

# What the launcher sets for clients itself, and what is told to nobody.
_OWN = {"WORKER", "COORDINATOR", "JOB", "GROUP", "TIMEOUT", "RESTART", "SECRET", "SECRET_FILE"}
_MEET_SECONDS = 120.0  # srun starts tasks one after the other
_PREFIX = "COLLECTIVED_"


class Unmet(click.ClickException):
    """The tasks of a step did not find each other."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user says about hosts; None and '' where nothing is said. `clients` is per host without a number."""

    workers: int | None = None
    clients: int | None = None
    hosts: str = ""
    hostfile: Path | None = None
    ssh: str = "ssh"
    python: str = ""
    silence: float = 30.0


@dataclass(frozen=True, slots=True)
class Places:
    """Clients of each worker, the host of each, and what starts an agent on a host that is not this one, `here`."""

    clients: tuple[int, ...]
    hosts: tuple[str, ...]
    carrier: Callable[[str], Carrier] | None = None
    here: str = LOCALHOST

    @property
    def spread(self) -> bool:
        return self.carrier is not None and any(host != LOCALHOST for host in self.hosts)

    def open(self, loop: Loop, here: Here, name: str, silence: float, terminal: Terminal) -> dict[str, Host]:
        """The hosts other than this one, not opened yet."""
        made: dict[str, Host] = {}
        if self.carrier is None:
            return made
        for number, host in enumerate(self.hosts):
            if host != self.here:
                job = AgentJob(f"{name}-{number}", RELEASE, silence)
                said = partial(terminal.show, 2, host)
                made[host] = Elsewhere(loop, host, self.carrier(host), job, here.keeper, said)
        return made


def choose(wish: Wish, environment: Mapping[str, str], program: Sequence[str]) -> Places:
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
        listed = _listed(wish)
        return Places(tuple(listed.values()), tuple(listed), _over_ssh(wish, listed))
    if wish.workers is None and (allocation := slurm.allocation(environment)):
        nodes = slurm.nodes(allocation.nodes)
        tasks = (wish.clients,) if wish.clients else allocation.tasks or (1,)
        clients = tasks if len(tasks) == len(nodes) else tasks[:1] * len(nodes)
        return Places(clients, nodes, lambda node: slurm.carrier(node, _python(wish)))
    if wish.workers is None and (step := slurm.step(environment, program)):
        return _of_step(step, wish)
    workers = wish.workers or 1
    return Places((wish.clients or 1,) * workers, (LOCALHOST,) * workers)


def _of_step(step: slurm.Step, wish: Wish) -> Places:
    """As the first task of srun's step: its nodes. As another one: serves the first until that has ended."""
    try:
        if not step.leads:
            connection = meeting.offer(step.folder / str(step.task), _MEET_SECONDS)
            raise SystemExit(agent.over(connection.detach()))
        nodes = slurm.nodes(step.nodes)
        others = meeting.await_offers(step.folder, list(range(1, step.tasks)), _MEET_SECONDS)
    except (OSError, meeting.NobodyCame) as error:
        raise Unmet(str(error)) from error
    offers = dict(zip(nodes[1:], others, strict=True))
    return Places((wish.clients or 1,) * len(nodes), nodes, lambda node: meeting.carrier(offers[node]), nodes[0])


def _listed(wish: Wish) -> Listed:
    try:
        if wish.hostfile is None:
            return parse_hosts(wish.hosts, wish.clients or 1)
        return parse_hostfile(wish.hostfile.read_text(), str(wish.hostfile), wish.clients or 1)
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from error


def _over_ssh(wish: Wish, listed: Listed) -> Callable[[str], Carrier]:
    command = ssh_words(wish.ssh, listed)
    return lambda host: ssh.carrier(host, _python(wish), command, wish.silence)


def ssh_words(written: str, hosts: Collection[str]) -> list[str]:
    """What `--ssh` says, as words.

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


def _python(wish: Wish) -> str:
    return wish.python or sys.executable


def forwarded(environment: Mapping[str, str], wished: tuple[str, ...]) -> dict[str, str]:
    """What programs on other hosts get of our environment: our own variables, and those that `--env` names.

    Raises:
        click.UsageError: one of them is not set here.
    """
    found = {
        name: value
        for name, value in environment.items()
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in _OWN
    }
    return {**found, **wished_variables(environment, wished)}


def wished_variables(environment: Mapping[str, str], wished: tuple[str, ...]) -> dict[str, str]:
    """`NAME=VALUE`, or `NAME` for the value that it has here."""
    found = {}
    for word in wished:
        name, equals, value = word.partition("=")
        if not name or (not equals and name not in environment):
            raise click.UsageError(f"--env {word!r}: expected NAME=VALUE, or the name of a variable that is set here")
        found[name] = value if equals else environment[name]
    return found
