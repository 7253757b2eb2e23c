"""Hosts and how many clients each has, as users write them: `--hosts a:2,b:2`, or a file with one host a line."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterable, Sequence
from itertools import takewhile

# A name that ssh takes: of the config, of the network, an address, [an IPv6 address]; perhaps with a user before it.
# Nothing that ssh would take for an option.
_NAME = r"(?:\w[\w.-]*@)?(?:\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9_][\w.-]*)"
_HOST = re.compile(rf"(?P<name>{_NAME})(?::(?P<clients>\d+))?")
_EXPECTED = "expected NAME or NAME:CLIENTS"
_MOST_CLIENTS = 1024  # that are named with a host: a larger number is a port of ssh, most likely
_PORT_HINT = f"expected at most {_MOST_CLIENTS}; a port of ssh is set in ~/.ssh/config, or with --ssh 'ssh -p PORT'"
_COMMA_HINT = "hosts are separated by commas, without spaces"

ClientsByHost = dict[str, int]  # host -> clients, in order of the workers


def is_host_name(text: str) -> bool:
    """Whether this is a host for ssh, with or without a user."""
    return re.fullmatch(_NAME, text) is not None


def parse_hosts(text: str, clients: int) -> ClientsByHost:
    """`a:2,b` is two clients on `a`, and `clients` on `b`.

    Raises:
        ValueError: that is no list of hosts.
    """
    has_spaces = any(" " in word.strip() for word in text.split(","))
    if has_spaces and (joined := _join_hosts(text.split())):
        raise ValueError(f"--hosts {text!r}: {_COMMA_HINT}: --hosts {joined}")
    return _parse_entries(((f"--hosts {text!r}", word) for word in text.split(",")), clients)


def check_separators(text: str, program: Sequence[str]) -> None:
    """Check that a program without `--` before it is no host: with `--hosts a b -- python x.py`, `a` would run `b`.

    Raises:
        ValueError: it is one, as far as can be seen; shows the line with commas.
    """
    if not text or "--" not in program or shutil.which(program[0]):
        return
    hosts = list(takewhile(lambda word: not word.startswith("-"), program))
    if hosts and (joined := _join_hosts([text, *hosts])):
        raise ValueError(
            f"--hosts {text} is followed by {' '.join(hosts)}: {_COMMA_HINT}; write\n"
            f"    --hosts {joined} {shlex.join(program[len(hosts) :])}\n"
            f"or, if {hosts[0]!r} is the program, -- before it"
        )


def _join_hosts(words: Iterable[str]) -> str:
    """The list that `parse_hosts` takes, of words with or without commas; '' if one of them is no host."""
    hosts = [host for word in words for host in word.split(",") if host]
    return ",".join(hosts) if all(map(_HOST.fullmatch, hosts)) else ""


def parse_hostfile(text: str, name: str, clients: int) -> ClientsByHost:
    """Lines `a`, `a:2` or `a slots=2`, as mpirun and Horovod have them; `#` begins a comment.

    Raises:
        ValueError: a line says something else; names it.
    """
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{name}, line {number}: {line.strip()!r}"
        host, *rest = words
        for word in rest:
            if not (slots := re.fullmatch(r"(?:slots|max[-_]slots)=(\d+)", word)):
                raise ValueError(f"{where}: {word!r} is not understood, {_EXPECTED}, or NAME slots=CLIENTS")
            if word.startswith("slots"):
                host = f"{host}:{slots[1]}"
        entries.append((where, host))
    if not entries:
        raise ValueError(f"{name} names no host: {_EXPECTED}, one a line")
    return _parse_entries(entries, clients)


def _parse_entries(entries: Iterable[tuple[str, str]], clients: int) -> ClientsByHost:
    found: ClientsByHost = {}
    for where, word in entries:
        match = _HOST.fullmatch(word.strip())
        if match is None:
            raise ValueError(f"{where}: {word!r} is no host, {_EXPECTED}")
        name = match["name"]
        if name in found:
            raise ValueError(f"{where}: host {name!r} is named twice; a host has one worker: {name}:CLIENTS for more")
        found[name] = int(match["clients"]) if match["clients"] else clients
        if found[name] == 0:
            raise ValueError(f"{where}: host {name!r} would have no client: expected at least 1")
        if match["clients"] and found[name] > _MOST_CLIENTS:
            raise ValueError(f"{where}: host {name!r} would have {found[name]} clients: {_PORT_HINT}")
    return found
