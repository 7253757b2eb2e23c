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

_LOOK_WITHIN = 60.0  # seconds for a host to be reached and to look at itself
_START_WITHIN = 30.0  # seconds until a server waits there
_MEASURE_WITHIN = 60.0  # seconds for a session, and for reaching who dials
_AT_ONCE = 16  # hosts that are asked side by side
_ALL_PAIRS = 4  # up to so many hosts each is measured with each; beyond that, along a ring
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_HERE = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Way:
    """How a command is run on a host: the words before it. None of them on this host."""

    host: str
    carrier: tuple[str, ...]
    python: str

    def command(self, *options: str) -> list[str]:
        line = [self.python, "-P", "-m", "collectived_launcher", "doctor", "--json", *options]
        return [*self.carrier, self.host, shlex.join(line)] if self.carrier else [sys.executable, *line[1:]]


@dataclass(frozen=True, slots=True)
class Reached:
    """A host that has answered. `address`: by which others are to reach it."""

    way: Way
    address: str
    findings: tuple[Finding, ...]


def look_at(hosts: Sequence[str], carrier: str, python: str) -> list[Finding]:
    """
    Args:
        hosts: as `names` gives them.
        carrier: the command that reaches a host.
        python: the interpreter that has collectived there.
    """
    ways = [Way(name, _words(carrier, name), python) for name in hosts]
    if far := [way.host for way in ways if way.carrier]:
        click.echo(f"asking {', '.join(far)}, for {_LOOK_WITHIN:g} s at most", err=True)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        asked = list(pool.map(_ask, ways))
    findings = [finding for one in asked for finding in (one.findings if isinstance(one, Reached) else (one,))]
    chosen = pairs([one for one in asked if isinstance(one, Reached)])
    for number, (dialler, server) in enumerate(chosen, 1):
        between = f"{dialler.way.host} → {server.way.host}"
        click.echo(f"measuring {between} ({number} of {len(chosen)})", err=True)
        findings += _measure(dialler, server, between)
    return findings


def names(text: str) -> list[str]:
    """`a:2,b:2`, as `launch` has them too, as [a, b], each once.

    Raises:
        click.UsageError: no host, or a word that ssh would take for an option.
    """
    found = list(dict.fromkeys(word.partition(":")[0].strip() for word in text.split(",")))
    for name in found:
        if not name or name.startswith("-"):
            raise click.UsageError(f"--hosts {text!r}: {name!r} is no host: expected names such as a,b")
    return found


def pairs(hosts: Sequence[Reached]) -> list[tuple[Reached, Reached]]:
    """Who dials whom. This host always dials: the others can be reached from it, perhaps not the other way round."""
    if len(hosts) <= _ALL_PAIRS:
        chosen = list(itertools.combinations(hosts, 2))
    else:
        chosen = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    return [(one, other) if other.way.carrier else (other, one) for one, other in chosen]


def _words(carrier: str, name: str) -> tuple[str, ...]:
    if name in (*_HERE, socket.gethostname()):
        return ()
    words = shlex.split(carrier)
    return (*words, *_SSH_OPTIONS) if os.path.basename(words[0]) == "ssh" else tuple(words)


def _ask(way: Way) -> Reached | Finding:
    """Has a host look at itself; this one has been looked at already."""
    if not way.carrier:
        return Reached(way, "127.0.0.1", ())
    try:
        done = _run(way.command(), "", _LOOK_WITHIN)
        said = json.loads(done.stdout)
        network = said["facts"]["network"]
        # By the address at which we came in; where the carrier does not say, by the one from which packets leave.
        address = str(network.get("reached_at") or network.get("outward") or "127.0.0.1")
        return Reached(way, address, tuple(report.read(said, way.host)))
    except subprocess.TimeoutExpired:
        return _unreached(way, f"no answer within {_LOOK_WITHIN:g} s")
    except OSError as error:
        return _unreached(way, f"{way.command()[0]!r} cannot be run: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return _unreached(way, _last_line(done.stderr) or f"exit status {done.returncode}")


def _unreached(way: Way, why: str) -> Finding:
    line = shlex.join(way.command())
    text = f"{way.host} cannot be asked: {why}"
    remedy = f"make this work without a password, and with collectived installed there: {line}"
    return replace(failure("reach", text, remedy), host=way.host)


def _measure(dialler: Reached, server: Reached, between: str) -> Iterator[Finding]:
    """Starts a server on one host, lets the other dial it, and takes over what that has found."""
    address = f"[{server.address}]:0" if ":" in server.address else f"{server.address}:0"
    line = server.way.command("--serve", address, "--within", f"{_MEASURE_WITHIN:g}")
    pipe = subprocess.PIPE
    with _ended(subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)) as waiting:
        try:
            serving = json.loads(_first_line(waiting))
            done = _run(dialler.way.command("--to", serving["address"]), f"{serving['token']}\n", _MEASURE_WITHIN)
            said = json.loads(done.stdout)
            yield from (replace(finding, host=between) for finding in report.read(said, between))
        except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
            text = f"the measurement did not come about: {error}"
            remedy = f"try it by hand: `collectived doctor --serve {address}` on {server.way.host}, --to on the other"
            yield replace(failure("reach", text, remedy), host=between)


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """The process, which ends with the block; a server elsewhere that is left waiting ends by its own limit."""
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)
            process.kill()


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(_START_WITHIN):
            raise TimeoutError(f"no server came up within {_START_WITHIN:g} s")
    return process.stdout.readline()


def _run(line: list[str], said: str, within: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, input=said, capture_output=True, text=True, timeout=within)


def _last_line(text: str) -> str:
    lines: list[Any] = text.strip().splitlines()
    return str(lines[-1]) if lines else ""
