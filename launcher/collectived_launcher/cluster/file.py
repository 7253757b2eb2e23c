"""The cluster file: which hosts have daemons that stay, and the configuration of these."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from collectived_launcher.hosts.host import LOCALHOST
from collectived_launcher.hosts.hostlist import is_host_name
from collectived_proto.config.daemons import DAEMONS
from collectived_proto.config.settings import list_settings
from collectived_proto.config.sources import find_line_numbers, suggest_nearest

COORDINATOR_PORT = 7450
MAX_DRAIN_SECONDS = 300.0  # seconds for which `down` lets workers drain
_TLS = ("tls_cert", "tls_key", "tls_ca")  # of all daemons
_KEYS = ("name", "hosts", "coordinator_host", "coordinator_port", "interface", "restarts", *_TLS)
_HOST_KEYS = ("name", "user", "address", "workers", "slots", "python")
# Keys that `up` sets itself.
_RESERVED_KEYS = {"job", "secret", "secret_file", "task", "coordinator", "folder", "host", "journal"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


class ClusterFileError(Exception):
    """The file cannot be used; the text says where and why."""


@dataclass(frozen=True, slots=True)
class ClusterHost:
    """A host of a cluster.

    address: by which others reach it; '' where that is to be found out. workers: how many it runs. slots: how many
    clients `collectived run` starts per worker there. python: an interpreter there that has collectived; '' for that of
    this process.
    """

    name: str
    user: str = ""
    address: str = ""
    workers: int = 1
    slots: int = 1
    python: str = ""

    @property
    def login(self) -> str:
        """The destination for OpenSSH."""
        return f"{self.user}@{self.name}" if self.user else self.name


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster, as its file describes it. `coordinator_flags` and `worker_flags` are flags of those daemons."""

    name: str
    hosts: tuple[ClusterHost, ...]
    coordinator_host: str
    coordinator_port: int
    coordinator_flags: tuple[str, ...]
    worker_flags: tuple[str, ...]
    interface: str
    restarts: int
    source: str

    @property
    def has_remote_hosts(self) -> bool:
        return any(host.name != LOCALHOST for host in self.hosts)

    def get_tasks(self, host: ClusterHost) -> range:
        """The numbers of its workers."""
        first = sum(other.workers for other in self.hosts[: self.hosts.index(host)])
        return range(first, first + host.workers)


def read_cluster(path: Path) -> Cluster:
    """
    Raises:
        ClusterFileError: it cannot be read, or says what a cluster cannot be.
    """
    try:
        text = path.read_text()
        found = tomllib.loads(text)
    except OSError as error:
        raise ClusterFileError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClusterFileError(f"{path} is no TOML: {error}") from None
    return _ClusterParser(path, found, find_line_numbers(text)).parse()


class _ClusterParser:
    def __init__(self, path: Path, found: Mapping[str, Any], lines: Mapping[tuple[str, str], int]) -> None:
        self._path, self._found, self._lines = path, found, lines

    def parse(self) -> Cluster:
        self._check_known("", self._found, (*_KEYS, *DAEMONS))
        hosts = tuple(self._parse_hosts())
        names = [host.name for host in hosts]
        for name in names:
            if names.count(name) > 1:
                self._fail("hosts", f"{name!r} is named twice: give one host several workers with `workers`")
        name = self._text("name", self._path.stem)
        if not _NAME.fullmatch(name):
            self._fail("name", f"{name!r} is no name: expected at most 32 letters, digits, - and _")
        first = self._text("coordinator_host", names[0])
        if first not in names:
            self._fail("coordinator_host", f"{first!r} is none of the hosts{suggest_nearest(first, names)}")
        port = self._number("coordinator_port", COORDINATOR_PORT)
        return Cluster(
            name,
            hosts,
            first,
            port,
            (*self._parse_certificates(), *self._flags("coordinator")),
            (*self._parse_certificates(), *self._flags("worker")),
            self._text("interface", ""),
            self._number("restarts", 5),
            str(self._path),
        )

    def _parse_hosts(self) -> Iterator[ClusterHost]:
        listed = self._found.get("hosts")
        if not isinstance(listed, list) or not listed:
            self._fail("hosts", 'the hosts are needed: hosts = ["a", "b:2"], or a table [[hosts]] for each')
        for one in listed:
            if isinstance(one, str):
                yield self._parse_host(one)
            elif isinstance(one, dict):
                self._check_known("hosts", one, _HOST_KEYS)
                yield self._parse_host_table(one)
            else:
                self._fail("hosts", f"{one!r} is no host: expected a name, or a table")

    def _parse_host(self, text: str) -> ClusterHost:
        place, _, slots = text.partition(":")
        user, _, name = place.rpartition("@")
        if not is_host_name(place) or (slots and not (slots.isdecimal() and int(slots))):
            self._fail("hosts", f"{text!r} is no host: expected NAME, USER@NAME or NAME:CLIENTS")
        return ClusterHost(name, user, slots=int(slots or 1))

    def _parse_host_table(self, table: Mapping[str, Any]) -> ClusterHost:
        for key in ("name", "user", "address", "python"):
            if not isinstance(table.get(key, ""), str):
                self._fail("hosts", f"{key} = {table[key]!r} of a host is no text")
        for key in ("workers", "slots"):
            value = table.get(key, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                self._fail("hosts", f"{key} = {value!r} of a host is not 1 or more")
        if not table.get("name"):
            self._fail("hosts", "a host needs a name")
        host = ClusterHost(**table)
        if not is_host_name(host.login):
            self._fail("hosts", f"{host.login!r} is no host: expected names of a host and a user, as ssh has them")
        return host

    def _parse_certificates(self) -> tuple[str, ...]:
        """Of every daemon: files at the same paths on all hosts."""
        words = []
        for name in _TLS:
            path = self._text(name, "")
            if path and not os.path.isabs(path):
                self._fail(name, f"{name} = {path!r}: expected an absolute path, which is the same on every host")
            words += [f"--{name.replace('_', '-')}={path}"] if path else []
        return tuple(words)

    def _flags(self, daemon: str) -> tuple[str, ...]:
        table = self._found.get(daemon, {})
        if not isinstance(table, dict):
            self._fail(daemon, f"expected a table [{daemon}]")
        known = {key.name: key for key in list_settings(DAEMONS[daemon]) if key.name not in _RESERVED_KEYS}
        self._check_known(daemon, table, tuple(known))
        words = []
        for name, value in table.items():
            key = known[name]
            try:
                read = key.value_type.parse(value)
            except (ValueError, TypeError):
                self._fail(name, f"{daemon}.{name}: {value!r} is not {key.value_type.expected}", daemon)
            if name == "drain_seconds" and read > MAX_DRAIN_SECONDS:
                longest = f"{MAX_DRAIN_SECONDS:g} s (5min)"
                self._fail(name, f"{daemon}.{name}: {value!r} is longer than {longest}, which `down` waits for", daemon)
            if key.value_type.is_boolean:
                words.append(key.flags[0] if read else f"--no-{key.flags[0].removeprefix('--')}")
            else:
                many = read if isinstance(read, tuple) else (value if isinstance(value, str) else str(value),)
                words += [f"{key.flags[0]}={one}" for one in many]
        return tuple(words)

    def _text(self, key: str, default: str) -> str:
        value = self._found.get(key, default)
        if not isinstance(value, str):
            self._fail(key, f"{key} = {value!r} is no text")
        return value

    def _number(self, key: str, default: int) -> int:
        value = self._found.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 16:
            self._fail(key, f"{key} = {value!r} is no whole number from 0 to 65535")
        return value

    def _check_known(self, table: str, entries: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for name in entries:
            if name in known:
                continue
            if table in DAEMONS and name in _RESERVED_KEYS:
                self._fail(name, f"{table}.{name} cannot be set here: `collectived up` sets it", table)
            where = f" in [{table}]" if table else ""
            self._fail(name, f"there is no key {name!r}{where}{suggest_nearest(name, known)}", table)

    def _fail(self, key: str, text: str, table: str = "") -> NoReturn:
        line = self._lines.get((table, key)) or self._lines.get((key, ""))
        raise ClusterFileError(f"{self._path}:{line}: {text}" if line else f"{self._path}: {text}")
