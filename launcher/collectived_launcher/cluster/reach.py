"""The hosts of a cluster from here: opened over ssh or on this one, and asked to do what `there` does."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from collectived_launcher.cluster.file import LONGEST_DRAIN, Cluster, ClusterHost
from collectived_launcher.launch import ssh
from collectived_launcher.launch.elsewhere import Carrier
from collectived_launcher.launch.ground import Ground, Surveyor
from collectived_launcher.launch.here import Here
from collectived_launcher.launch.host import Host, Program
from collectived_launcher.launch.job import LOCALHOST, new_name
from collectived_launcher.launch.loop import Loop
from collectived_launcher.launch.output import Terminal
from collectived_launcher.launch.places import Places, ssh_words
from collectived_proto.local import jobs

THERE = "collectived_launcher.cluster.there"
SILENCE = 30.0  # seconds without a sign of life after which a host is given up
_OPEN_WITHIN = 60.0  # seconds for all hosts to answer
_PATIENCE = LONGEST_DRAIN + 100.0  # seconds for an answer; draining is the longest


class Interrupted(Exception):
    """A signal came."""


def carrier_of(cluster: Cluster, ssh_command: str) -> Places:
    """How the hosts of a cluster are reached; one worker of each, as far as places know.

    Raises:
        click.UsageError: the ssh command is none.
    """
    by_name = {host.name: host for host in cluster.hosts}
    command = ssh_words(ssh_command, by_name)

    def carrier(name: str) -> Carrier:
        host = by_name[name]
        return ssh.carrier(host.login, host.python or sys.executable, command, SILENCE)

    return Places(tuple(host.slots for host in cluster.hosts), tuple(by_name), carrier)


class Reach:
    """The open hosts of a cluster."""

    def __init__(self, loop: Loop, hosts: Mapping[str, Host], say: Any) -> None:
        self._loop, self._hosts, self._say = loop, hosts, say

    def survey(self, names: Sequence[str], interface: str, spread: bool) -> Ground:
        """The address of each of these hosts.

        Raises:
            Unreachable: one cannot be used. Interrupted: a signal came.
        """
        ground = Surveyor(self._loop, [self._hosts[name] for name in names], interface, self._say, spread).survey()
        if ground is None:
            raise Interrupted
        return ground

    def ask(
        self, verb: str, cluster: str, about: Mapping[str, str], secret: str | None = None
    ) -> dict[str, dict[str, Any]]:
        """What `there` answers on each host that `about` has words for; side by side.

        Raises:
            Interrupted: a signal came.
        """
        errands = {name: _Errand() for name in about}
        for name, errand in errands.items():
            host = self._hosts[name]
            assert host.facts is not None
            words = (host.facts.python, "-P", "-m", THERE, verb, cluster, about[name])
            errand.process = host.start(Program(tuple(filter(None, words)), secret=secret or ""), errand)
        while not self._loop.until(lambda: all(errand.over for errand in errands.values()), _PATIENCE):
            if self._loop.signals:
                raise Interrupted
            break
        return {name: errand.answer() for name, errand in errands.items()}


class _Errand:
    """Listens to one `there`."""

    def __init__(self) -> None:
        self.process: Any = None
        self.over = False
        self._lines: list[bytes] = []
        self._said: list[str] = []

    def heard(self, stream: int, line: bytes) -> None:
        if stream == 1:
            self._lines.append(line)
        else:
            self._said.append(line.decode(errors="replace"))

    def ended(self) -> None:
        self.over = True

    def answer(self) -> dict[str, Any]:
        if not self.over:
            return {"trouble": f"no answer within {_PATIENCE:g} s"}
        try:
            found: dict[str, Any] = json.loads(self._lines[-1])
        except (IndexError, ValueError):
            why = self.process.trouble or (self._said[-1] if self._said else f"exit status {self.process.status}")
            return {"trouble": why}
        return found


@contextlib.contextmanager
def reach(cluster: Cluster, hosts: Sequence[ClusterHost], ssh_command: str, terminal: Terminal) -> Iterator[Reach]:
    """Opens hosts, and leaves nothing there but what is to stay.

    Raises:
        click.UsageError: the ssh command is none. Unreachable: one cannot be used. Interrupted: a signal came.
    """
    name = new_name()
    places = carrier_of(cluster, ssh_command)

    def say(text: str) -> None:
        terminal.say(f"collectived: {text}")

    wanted = {host.name for host in hosts}
    with Loop() as loop:
        here = Here(loop, jobs.runtime_folder() / name)
        here.open(lambda: None)
        others = {
            one: host
            for one, host in places.open(loop, here, name=name, silence=SILENCE, terminal=terminal).items()
            if one in wanted
        }
        try:
            if not Surveyor(loop, list(others.values()), "", say, spread=False).open(_OPEN_WITHIN):
                raise Interrupted
            yield Reach(loop, {LOCALHOST: here, **others}, say)
        finally:
            for host in others.values():
                host.close()
            loop.until(lambda: all(host.gone for host in others.values()), 5.0)
            for host in others.values():
                if not host.gone:
                    host.kill()
            here.close()
