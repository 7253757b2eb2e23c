"""Before a job starts: its hosts are opened, their addresses chosen, and each has reached each other."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from collectived_launcher.hosts.host import Host, NetworkInterface, TaskResult
from collectived_launcher.hosts.loop import DRAW_INTERVAL, Loop, run_until_with_progress
from collectived_launcher.hosts.output import Terminal
from collectived_proto.addresses import LOOPBACK
from collectived_proto.report.phrases import names_text

_FIRST_NOTICE, _NEXT_NOTICE = 2.0, 10.0  # seconds until the hosts that are still to come are named, and named again
_FAILURE_GRACE = 0.5  # seconds for other hosts to fail, once one has
_TASK_TIMEOUT = 30.0  # seconds for a task
_STEPS = {  # each task of the hosts in words
    "address": "choosing addresses",
    "listen": "opening ports for a test",
    "dial": "testing connections between the hosts",
    "hush": "closing the ports of the test",
    "program": "looking for the program",
}


class HostUnreachable(Exception):
    """A host cannot be used, or others cannot reach it; the text names it, and says what to do."""


@dataclass(frozen=True, slots=True)
class HostAddresses:
    """Where a job stands: the address of each of its hosts by their names, and a free port of the first worker's."""

    addresses: Mapping[str, str]
    master_port: int


class Preflight:
    """Makes the ground of one job.

    Args:
        hosts: those of the workers, the first worker's first, and that of the coordinator; each once.
        interface: as `host_tasks.choose_address` takes it.
    """

    def __init__(self, loop: Loop, hosts: Sequence[Host], interface: str, terminal: Terminal, spread: bool) -> None:
        self._loop, self._hosts, self._interface, self._terminal = loop, hosts, interface, terminal
        self._has_remote_hosts = spread

    def run(self) -> HostAddresses | None:
        """None when a signal came first.

        Raises:
            HostUnreachable: a host is not to be had.
        """
        if not self.open_hosts():
            return None
        first = self._hosts[0]
        addresses = self._find_addresses() if self._has_remote_hosts else {host.name: LOOPBACK for host in self._hosts}
        if addresses is None or (self._has_remote_hosts and not self._check_reachability(addresses)):
            return None
        ports = self._run_task({first: {"address": addresses[first.name]}}, "listen")
        if ports is None or self._run_task({first: {}}, "hush") is None:
            return None
        return HostAddresses(addresses, int(ports[first]["port"]))

    def check_program(self, hosts: Sequence[Host], argv: Sequence[str], folder: str, path: str) -> bool:
        """Check that every host has the files of the program that it is to run. Return False if a signal came first.

        Args:
            folder: where the program runs.
            path: the program's own PATH; '' for that of the host.

        Raises:
            HostUnreachable: a host lacks one of them.
        """
        about = {"argv": list(argv), "folder": folder, "path": path}
        return self._run_task(dict.fromkeys(hosts, about), "program") is not None

    def open_hosts(self, within: float = math.inf) -> bool:
        """Open all hosts, and name those that are waited for. Return whether all is open before a signal came.

        Raises:
            HostUnreachable: a host is not to be had, or not within so many seconds.
        """
        for host in self._hosts:
            if host.closed:
                try:
                    host.open(lambda: None)
                except OSError as error:
                    raise HostUnreachable(f"{host.name} cannot be used: {error}") from error
        try:
            return self._await_hosts(within)
        finally:
            self._terminal.erase_progress()

    def _await_hosts(self, within: float) -> bool:
        begun = time.monotonic()
        next_notice = begun + _FIRST_NOTICE
        while waiting := [host for host in self._hosts if host.facts is None and not host.trouble]:
            failed = any(host.trouble for host in self._hosts)
            patience = _FAILURE_GRACE if failed else DRAW_INTERVAL
            if self._loop.run_until(partial(_has_outcome, waiting, failed), patience):
                continue
            if self._loop.signals:
                return False
            if failed:
                break
            now = time.monotonic()
            if now - begun > within:
                raise HostUnreachable(
                    "\n    ".join(f"{_describe_host(host)}: no answer within {within:g} s" for host in waiting)
                )
            if now >= next_notice:
                self._terminal.say(
                    f"collectived: connecting to the hosts, {now - begun:.0f} s so far: "
                    f"{len(self._hosts) - len(waiting)} of {len(self._hosts)} ready, still to come: "
                    f"{names_text([_describe_host(host) for host in waiting])}"
                )
                next_notice = now + _NEXT_NOTICE
            self._terminal.draw_progress("opening", len(self._hosts) - len(waiting), len(self._hosts), "hosts")
        if troubles := [f"{host.name} {host.trouble}" for host in self._hosts if host.trouble]:
            raise HostUnreachable("\n    ".join(troubles))
        return True

    def _find_addresses(self) -> dict[str, str] | None:
        """By which each host is reached."""
        if len(self._hosts) == 1 and not self._interface:
            return {self._hosts[0].name: LOOPBACK}
        about = {}
        for host in self._hosts:
            others = [other for other in self._hosts if other is not host]
            towards = [name for other in others for name in list_host_names(other)]
            about[host] = {"interface": self._interface, "towards": towards}
        answers = self._run_task(about, "address", strict=False)
        if answers is None:
            return None
        addresses = {}
        for host, answer in answers.items():
            assert host.facts is not None
            found = answer.get("address") or ("" if self._interface else host.facts.reached_at)
            if not found:
                raise HostUnreachable(f"{host.name}: {answer['trouble']}")
            addresses[host.name] = str(found)
        return addresses

    def _check_reachability(self, addresses: Mapping[str, str]) -> bool:
        """Whether there was time for each host to dial each other."""
        ports = self._run_task({host: {"address": addresses[host.name]} for host in self._hosts}, "listen")
        if ports is None:
            return False
        others = {host: [other for other in self._hosts if other is not host] for host in self._hosts}
        dials = {
            host: {"targets": [[addresses[to.name], ports[to]["port"]] for to in others[host]]} for host in self._hosts
        }
        answers = self._run_task(dials, "dial")
        if answers is None:
            return False
        failures = [
            f"{host.name} cannot reach {to.name} at {addresses[to.name]} ({why}); {_suggest_interface(to)}"
            for host, answer in answers.items()
            for to, why in zip(others[host], answer["failures"], strict=True)
            if why
        ]
        if failures:
            raise HostUnreachable("\n    ".join(failures))
        return self._run_task(dict.fromkeys(self._hosts, {}), "hush") is not None

    def _run_task(
        self, about: Mapping[Host, Mapping[str, Any]], task: str, strict: bool = True
    ) -> dict[Host, TaskResult] | None:
        """Return the answer of each host; None when a signal came first."""
        answers: dict[Host, TaskResult] = {}
        for host, details in about.items():
            host.run_task(task, details, partial(answers.__setitem__, host))

        def late() -> str:
            return names_text([host.name for host in about if host not in answers])

        def say(passed: str) -> None:
            self._terminal.say(f"collectived: {_STEPS[task]}, {passed}; still to come: {late()}")

        def draw() -> None:
            self._terminal.draw_progress(_STEPS[task], len(answers), len(about), "hosts")

        try:
            is_done = run_until_with_progress(self._loop, lambda: len(answers) == len(about), _TASK_TIMEOUT, say, draw)
        finally:
            self._terminal.erase_progress()
        if not is_done:
            if self._loop.signals:
                return None
            raise HostUnreachable(f"{late()}: no answer within {_TASK_TIMEOUT:g} s ({_STEPS[task]})")
        ordered = {host: answers[host] for host in about}
        hosts_by_trouble: dict[str, list[str]] = {}
        for host, answer in ordered.items():
            if strict and answer.get("trouble"):
                hosts_by_trouble.setdefault(str(answer["trouble"]), []).append(host.name)
        if hosts_by_trouble:
            lines = [f"{names_text(names)}: {trouble}" for trouble, names in hosts_by_trouble.items()]
            raise HostUnreachable("\n    ".join(lines))
        return ordered


def _has_outcome(waiting: Sequence[Host], already: bool) -> bool:
    """Whether one of them has come to be, or to fail."""
    return (not already and any(host.trouble for host in waiting)) or all(
        host.facts or host.trouble for host in waiting
    )


def list_host_names(host: Host) -> list[str]:
    """Names under which others may look for it."""
    assert host.facts is not None
    return [name for name in (host.target, host.facts.reached_at, host.facts.hostname) if name]


def _describe_host(host: Host) -> str:
    return f"{host.name} ({host.transport})" if host.transport else host.name


def _suggest_interface(host: Host) -> str:
    assert host.facts is not None
    found: tuple[NetworkInterface, ...] = host.facts.interfaces
    has = ", ".join(f"{one.name} ({one.address}/{one.prefix})" for one in found)
    return f"choose another interface with --interface, {host.name} has {has}"
