"""The hosts of a cluster, opened over ssh or on this host, and given the commands of `host_commands`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from collectived_launcher.cluster.file import MAX_DRAIN_SECONDS, Cluster, ClusterHost
from collectived_launcher.hosts.host import LOCALHOST, Host, ProgramSpec
from collectived_launcher.hosts.local import LocalHost
from collectived_launcher.hosts.loop import Loop, run_until_with_progress
from collectived_launcher.hosts.output import Terminal
from collectived_launcher.hosts.preflight import HostAddresses, Preflight
from collectived_launcher.hosts.remote_host import RemoteCommand
from collectived_launcher.hosts.selection import HostPlan, parse_ssh_command
from collectived_launcher.hosts.ssh_command import make_remote_command
from collectived_launcher.launch.job import make_job_name
from collectived_proto.ipc import job_files
from collectived_proto.report.phrases import names_text

HOST_COMMANDS_MODULE = "collectived_launcher.cluster.host_commands"
SILENCE_TIMEOUT = 30.0  # seconds without a sign of life after which a host is given up
_OPEN_TIMEOUT = 60.0  # seconds for all hosts to answer
_ANSWER_TIMEOUT = MAX_DRAIN_SECONDS + 100.0  # seconds for an answer; draining is the longest


class Interrupted(Exception):
    """A signal came."""


def make_host_plan(cluster: Cluster, ssh_command: str) -> HostPlan:
    """How the hosts of a cluster are reached; one worker of each, as far as places know.

    Raises:
        click.UsageError: the ssh command is none.
    """
    by_name = {host.name: host for host in cluster.hosts}
    command = parse_ssh_command(ssh_command, by_name)

    def carrier(name: str) -> RemoteCommand:
        host = by_name[name]
        return make_remote_command(host.login, host.python or sys.executable, command, SILENCE_TIMEOUT)

    return HostPlan(tuple(host.slots for host in cluster.hosts), tuple(by_name), carrier)


class ClusterHosts:
    """The open hosts of a cluster."""

    def __init__(self, loop: Loop, hosts: Mapping[str, Host], terminal: Terminal) -> None:
        self._loop, self._hosts, self._terminal = loop, hosts, terminal

    def find_addresses(self, names: Sequence[str], interface: str, spread: bool) -> HostAddresses:
        """The address of each of these hosts.

        Raises:
            HostUnreachable: one cannot be used. Interrupted: a signal came.
        """
        ground = Preflight(self._loop, [self._hosts[name] for name in names], interface, self._terminal, spread).run()
        if ground is None:
            raise Interrupted
        return ground

    def run_command(
        self, verb: str, cluster: str, about: Mapping[str, str], secret: str | None = None
    ) -> dict[str, dict[str, Any]]:
        """Run a command of `host_commands`, side by side, on each host that `about` has words for; return the answers.

        Raises:
            Interrupted: a signal came.
        """
        commands = {name: _HostCommand() for name in about}
        for name, command in commands.items():
            host = self._hosts[name]
            assert host.facts is not None
            words = (host.facts.python, "-P", "-m", HOST_COMMANDS_MODULE, verb, cluster, about[name])
            command.process = host.start(ProgramSpec(tuple(filter(None, words)), secret=secret or ""), command)

        def say(passed: str) -> None:
            late = names_text([name for name, command in commands.items() if not command.done])
            self._terminal.say(f"collectived: waiting for the answer of {late} ({verb}), {passed}")

        def draw() -> None:
            done = sum(command.done for command in commands.values())
            self._terminal.draw_progress(verb, done, len(commands), "hosts")

        def settled() -> bool:
            return all(command.done for command in commands.values())

        try:
            run_until_with_progress(self._loop, settled, _ANSWER_TIMEOUT, say, draw)
        finally:
            self._terminal.erase_progress()
        if self._loop.signals and not settled():
            raise Interrupted
        return {name: command.parse_answer() for name, command in commands.items()}


class _HostCommand:
    """Collects what one command says."""

    def __init__(self) -> None:
        self.process: Any = None
        self.done = False
        self._stdout_lines: list[bytes] = []
        self._stderr_lines: list[str] = []

    def on_output(self, stream: int, line: bytes) -> None:
        if stream == 1:
            self._stdout_lines.append(line)
        else:
            self._stderr_lines.append(line.decode(errors="replace"))

    def on_exit(self) -> None:
        self.done = True

    def parse_answer(self) -> dict[str, Any]:
        if not self.done:
            return {"trouble": f"no answer within {_ANSWER_TIMEOUT:g} s"}
        try:
            found: dict[str, Any] = json.loads(self._stdout_lines[-1])
        except (IndexError, ValueError):
            why = self.process.trouble or (
                self._stderr_lines[-1] if self._stderr_lines else f"exit status {self.process.status}"
            )
            return {"trouble": why}
        return found


@contextlib.contextmanager
def open_hosts(
    cluster: Cluster, hosts: Sequence[ClusterHost], ssh_command: str, terminal: Terminal
) -> Iterator[ClusterHosts]:
    """Opens hosts, and leaves nothing there but what is to stay.

    Raises:
        click.UsageError: the ssh command is none. HostUnreachable: one cannot be used. Interrupted: a signal came.
    """
    name = make_job_name()
    places = make_host_plan(cluster, ssh_command)

    wanted = {host.name for host in hosts}
    with Loop() as loop:
        here = LocalHost(loop, job_files.ensure_runtime_folder() / name)
        here.open(lambda: None)
        others = {
            one: host
            for one, host in places.create_remote_hosts(
                loop, here, name=name, silence=SILENCE_TIMEOUT, terminal=terminal
            ).items()
            if one in wanted
        }
        try:
            if not Preflight(loop, list(others.values()), "", terminal, spread=False).open_hosts(_OPEN_TIMEOUT):
                raise Interrupted
            yield ClusterHosts(loop, {LOCALHOST: here, **others}, terminal)
        finally:
            for host in others.values():
                host.close()
            loop.run_until(lambda: all(host.closed for host in others.values()), 5.0)
            for host in others.values():
                if not host.closed:
                    host.kill()
            here.close()
