"""Before a job starts: its hosts are opened, their addresses chosen, and each has reached each other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from collectived_launcher.launch.host import Answer, Host, Interface
from collectived_launcher.launch.loop import Loop

LOOPBACK = "127.0.0.1"
_FIRST_WORD, _NEXT_WORD = 2.0, 10.0  # seconds of waiting until we say for whom, and say it again
_OTHERS_TOO = 0.5  # seconds for other hosts to fail, once one has
_ANSWER = 30.0  # seconds for an errand


class Unreachable(Exception):
    """A host cannot be used, or others cannot reach it; the text names it, and says what to do."""


@dataclass(frozen=True, slots=True)
class Ground:
    """Where a job stands: the address of each of its hosts by their names, and a free port of the first worker's."""

    addresses: Mapping[str, str]
    rendezvous: int


class Surveyor:
    """Makes the ground of one job.

    Args:
        hosts: those of the workers, the first worker's first, and that of the coordinator; each once.
        interface: as `errands.address` takes it.
    """

    def __init__(
        self, loop: Loop, hosts: Sequence[Host], interface: str, say: Callable[[str], None], spread: bool
    ) -> None:
        self._loop, self._hosts, self._interface, self._say, self._spread = loop, hosts, interface, say, spread

    def survey(self) -> Ground | None:
        """None when a signal came first.

        Raises:
            Unreachable: a host is not to be had.
        """
        if not self.open():
            return None
        first = self._hosts[0]
        addresses = self._addresses() if self._spread else {host.name: LOOPBACK for host in self._hosts}
        if addresses is None or (self._spread and not self._reached(addresses)):
            return None
        ports = self._ask({first: {"address": addresses[first.name]}}, "listen")
        if ports is None or self._ask({first: {}}, "hush") is None:
            return None
        return Ground(addresses, int(ports[first]["port"]))

    def open(self, within: float = math.inf) -> bool:
        """Opens all hosts, and says for whom we wait; whether there was time for it before a signal came.

        Raises:
            Unreachable: a host is not to be had, or not within so many seconds.
        """
        for host in self._hosts:
            if host.gone:
                try:
                    host.open(lambda: None)
                except OSError as error:
                    raise Unreachable(f"{host.name} cannot be used: {error}") from error
        begun = time.monotonic()
        while waiting := [host for host in self._hosts if host.facts is None and not host.trouble]:
            failed = any(host.trouble for host in self._hosts)
            patience = _OTHERS_TOO if failed else (_FIRST_WORD if time.monotonic() - begun < 1 else _NEXT_WORD)
            settled = partial(_fewer, waiting, failed)
            if not self._loop.until(settled, patience):
                if self._loop.signals:
                    return False
                if failed:
                    break
                if time.monotonic() - begun > within:
                    raise Unreachable("\n    ".join(f"{_how(host)}: no answer within {within:g} s" for host in waiting))
                self._say(f"waiting for {', '.join(_how(host) for host in waiting)}")
        if troubles := [f"{host.name} {host.trouble}" for host in self._hosts if host.trouble]:
            raise Unreachable("\n    ".join(troubles))
        return True

    def _addresses(self) -> dict[str, str] | None:
        """By which each host is reached."""
        if len(self._hosts) == 1 and not self._interface:
            return {self._hosts[0].name: LOOPBACK}
        about = {}
        for host in self._hosts:
            others = [other for other in self._hosts if other is not host]
            towards = [name for other in others for name in known_as(other)]
            about[host] = {"interface": self._interface, "towards": towards}
        answers = self._ask(about, "address", strict=False)
        if answers is None:
            return None
        addresses = {}
        for host, answer in answers.items():
            assert host.facts is not None
            found = answer.get("address") or ("" if self._interface else host.facts.reached_at)
            if not found:
                raise Unreachable(f"{host.name}: {answer['trouble']}")
            addresses[host.name] = str(found)
        return addresses

    def _reached(self, addresses: Mapping[str, str]) -> bool:
        """Whether there was time for each host to dial each other."""
        ports = self._ask({host: {"address": addresses[host.name]} for host in self._hosts}, "listen")
        if ports is None:
            return False
        others = {host: [other for other in self._hosts if other is not host] for host in self._hosts}
        dials = {
            host: {"targets": [[addresses[to.name], ports[to]["port"]] for to in others[host]]} for host in self._hosts
        }
        answers = self._ask(dials, "dial")
        if answers is None:
            return False
        failures = [
            f"{host.name} cannot reach {to.name} at {addresses[to.name]} ({why}); {_choice(to)}"
            for host, answer in answers.items()
            for to, why in zip(others[host], answer["failures"], strict=True)
            if why
        ]
        if failures:
            raise Unreachable("\n    ".join(failures))
        return self._ask(dict.fromkeys(self._hosts, {}), "hush") is not None

    def _ask(
        self, about: Mapping[Host, Mapping[str, Any]], errand: str, strict: bool = True
    ) -> dict[Host, Answer] | None:
        """What each answers; None when a signal came first."""
        answers: dict[Host, Answer] = {}
        for host, details in about.items():
            host.ask(errand, details, partial(answers.__setitem__, host))
        if not self._loop.until(lambda: len(answers) == len(about), _ANSWER):
            if self._loop.signals:
                return None
            late = [host.name for host in about if host not in answers]
            raise Unreachable(f"{', '.join(late)}: no answer within {_ANSWER:g} s ({errand})")
        if strict and (troubles := [f"{host.name}: {a['trouble']}" for host, a in answers.items() if a.get("trouble")]):
            raise Unreachable("\n    ".join(troubles))
        return {host: answers[host] for host in about}


def _fewer(waiting: Sequence[Host], already: bool) -> bool:
    """Whether one of them has come to be, or to fail."""
    return (not already and any(host.trouble for host in waiting)) or all(
        host.facts or host.trouble for host in waiting
    )


def known_as(host: Host) -> list[str]:
    """Names under which others may look for it."""
    assert host.facts is not None
    return [name for name in (host.target, host.facts.reached_at, host.facts.hostname) if name]


def _how(host: Host) -> str:
    return f"{host.name} ({host.how})" if host.how else host.name


def _choice(host: Host) -> str:
    assert host.facts is not None
    found: tuple[Interface, ...] = host.facts.interfaces
    has = ", ".join(f"{one.name} ({one.address}/{one.prefix})" for one in found)
    return f"choose another interface with --interface, {host.name} has {has}"
