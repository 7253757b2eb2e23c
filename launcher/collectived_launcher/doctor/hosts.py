"""`doctor --hosts`: has every host look at itself, and measures between them, over ssh or what else reaches them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import click

from collectived_launcher.doctor import report
from collectived_launcher.doctor.finding import Finding, failure
from collectived_launcher.hosts import hostlist
from collectived_proto.report.progress import Progress

_EXAMINE_TIMEOUT = 60.0  # seconds for a host to be reached and to look at itself
_START_TIMEOUT = 30.0  # seconds until a server waits there
_MEASURE_TIMEOUT = 60.0  # seconds for a session, and for reaching the dialler
_MAX_PARALLEL_HOSTS = 16  # hosts that are asked side by side
_MAX_ALL_PAIRS = 4  # up to so many hosts each is measured with each; beyond that, along a ring
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_LOCAL_NAMES = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class HostAccess:
    """How a command is run on a host: the words before it. None of them on this host."""

    host: str
    remote_command: tuple[str, ...]
    python: str

    def build_command(self, *options: str) -> list[str]:
        line = [self.python, "-P", "-m", "collectived_launcher", "doctor", "--json", *options]
        return (
            [*self.remote_command, self.host, shlex.join(line)] if self.remote_command else [sys.executable, *line[1:]]
        )


@dataclass(frozen=True, slots=True)
class ReachedHost:
    """A host that has answered. `address`: by which others are to reach it."""

    access: HostAccess
    address: str
    findings: tuple[Finding, ...]


def examine_hosts(hosts: Sequence[str], carrier: str, python: str) -> list[Finding]:
    """Have each host look at itself over `carrier`, with its `python`, and measure between them."""
    ways = [HostAccess(name, _remote_command_words(carrier, name), python) for name in hosts]
    far = [way.host for way in ways if way.remote_command]

    def examine(way: HostAccess) -> ReachedHost | Finding:
        found = _examine_host(way)
        progress.advance(way.host)
        return found

    with Progress("collectived doctor", "asking hosts", len(ways), "hosts") as progress:
        if far:
            progress.say(f"asking {', '.join(far)}, for {_EXAMINE_TIMEOUT:g} s at most")
        with ThreadPoolExecutor(_MAX_PARALLEL_HOSTS) as pool:
            asked = list(pool.map(examine, ways))
    findings = [finding for one in asked for finding in (one.findings if isinstance(one, ReachedHost) else (one,))]
    return findings + _measure_pairs(choose_pairs([one for one in asked if isinstance(one, ReachedHost)]))


def _measure_pairs(chosen: Sequence[tuple[ReachedHost, ReachedHost]]) -> list[Finding]:
    findings: list[Finding] = []
    with Progress("collectived doctor", "measuring between hosts", len(chosen), "pairs") as progress:
        for number, (dialler, server) in enumerate(chosen, 1):
            between = f"{dialler.access.host} → {server.access.host}"
            progress.say(f"measuring {between} ({number} of {len(chosen)})")
            findings += _measure_pair(dialler, server, between)
            progress.advance(between)
    return findings


def parse_hosts(text: str) -> list[str]:
    """The hosts of `a:2,b:2`, as `launch` has them.

    Raises:
        click.UsageError: that is no list of hosts.
    """
    try:
        return list(hostlist.parse_hosts(text, 1))
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def choose_pairs(hosts: Sequence[ReachedHost]) -> list[tuple[ReachedHost, ReachedHost]]:
    """Choose the pairs of hosts, the dialling one first.

    This host always dials: the others can be reached from it, perhaps not the other way round.
    """
    if len(hosts) <= _MAX_ALL_PAIRS:
        chosen = list(itertools.combinations(hosts, 2))
    else:
        chosen = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    return [(one, other) if other.access.remote_command else (other, one) for one, other in chosen]


def _remote_command_words(carrier: str, name: str) -> tuple[str, ...]:
    if name in (*_LOCAL_NAMES, socket.gethostname()):
        return ()
    words = shlex.split(carrier)
    return (*words, *_SSH_OPTIONS) if os.path.basename(words[0]) == "ssh" else tuple(words)


def _examine_host(way: HostAccess) -> ReachedHost | Finding:
    """Has a host look at itself; this one has been looked at already."""
    if not way.remote_command:
        return ReachedHost(way, "127.0.0.1", ())
    try:
        done = _run_command(way.build_command(), "", _EXAMINE_TIMEOUT)
        said = json.loads(done.stdout)
        network = said["facts"]["network"]
        # By the address at which we came in; where the carrier does not say, by the one from which packets leave.
        address = str(network.get("reached_at") or network.get("outward") or "127.0.0.1")
        return ReachedHost(way, address, tuple(report.parse_document(said, way.host)))
    except subprocess.TimeoutExpired:
        return _unreachable_finding(way, f"no answer within {_EXAMINE_TIMEOUT:g} s")
    except OSError as error:
        return _unreachable_finding(way, f"{way.build_command()[0]!r} cannot be run: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return _unreachable_finding(way, _last_line(done.stderr) or f"exit status {done.returncode}")


def _unreachable_finding(way: HostAccess, why: str) -> Finding:
    line = shlex.join(way.build_command())
    text = f"{way.host} cannot be asked: {why}"
    remedy = f"make this work without a password, and with collectived installed there: {line}"
    return replace(failure("reach", text, remedy), host=way.host)


def _measure_pair(dialler: ReachedHost, server: ReachedHost, between: str) -> Iterator[Finding]:
    """Starts a server on one host, lets the other dial it, and takes over what that has found."""
    address = f"[{server.address}]:0" if ":" in server.address else f"{server.address}:0"
    line = server.access.build_command("--serve", address, "--within", f"{_MEASURE_TIMEOUT:g}")
    pipe = subprocess.PIPE
    with _kill_on_exit(
        subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    ) as waiting:
        try:
            serving = json.loads(_read_first_line(waiting))
            done = _run_command(
                dialler.access.build_command("--to", serving["address"]), f"{serving['token']}\n", _MEASURE_TIMEOUT
            )
            said = json.loads(done.stdout)
            yield from (replace(finding, host=between) for finding in report.parse_document(said, between))
        except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
            text = f"the measurement did not come about: {error}"
            remedy = (
                f"try it by hand: `collectived doctor --serve {address}` on {server.access.host}, --to on the other"
            )
            yield replace(failure("reach", text, remedy), host=between)


@contextlib.contextmanager
def _kill_on_exit(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """The process, which ends with the block; a server elsewhere that is left waiting ends by its own limit."""
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)
            process.kill()


def _read_first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(_START_TIMEOUT):
            raise TimeoutError(f"no server came up within {_START_TIMEOUT:g} s")
    return process.stdout.readline()


def _run_command(line: list[str], said: str, within: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, input=said, capture_output=True, text=True, timeout=within)


def _last_line(text: str) -> str:
    lines: list[Any] = text.strip().splitlines()
    return str(lines[-1]) if lines else ""
