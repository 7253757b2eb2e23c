"""The effective configuration of one daemon: file < environment < flags, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from collectived_proto.configuration.daemons import DaemonSettings
from collectived_proto.configuration.files import File, Misconfigured, meant
from collectived_proto.configuration.keys import PREFIX, REQUIRED, Key, keys_of
from collectived_proto.private_files import Unusable, read_private

SettingsT = TypeVar("SettingsT", bound=DaemonSettings)

DEFAULT = "default"
STANDARD_INPUT = "standard input"
SHORTEST_SECRET = 16  # characters


@dataclass(frozen=True, slots=True)
class Told:
    """What one daemon has been told: values of all keys that have one, where each came from, and what is missing."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    missing: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Given:
    """A value as somebody has given it, and where."""

    value: Any
    origin: str


def effective(
    settings: type[SettingsT],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: File | None,
    secret: str | None = None,
) -> SettingsT:
    """The settings of a daemon. Arguments as of `told`.

    Raises:
        Misconfigured: as `told`; or a key that is needed was given nowhere.
    """
    found = told(settings, flags, environment, file, secret)
    for key in found.missing:
        raise Misconfigured(f"{key.path} is needed: {key.sentence.removesuffix('.')}; {_ways(key)}")
    return settings(**found.values)


def told(
    settings: type[DaemonSettings],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: File | None,
    secret: str | None = None,
) -> Told:
    """Reads everything once.

    Args:
        flags: by name of the key, as words.
        secret: that came over standard input, where it did.

    Raises:
        Misconfigured: a value is none of its key's kind, a variable is not known, or the secret is short.
    """
    _check_variables(settings, environment)
    keys = keys_of(settings)
    values = {key.name: key.default for key in keys if key.default is not REQUIRED}
    origins = dict.fromkeys(values, DEFAULT)
    for key in keys:
        given = _given(key, flags, environment, file, settings.TABLE)
        if given is not None:
            values[key.name], origins[key.name] = _read(key, given), given.origin
    if secret is not None:
        values["secret"], origins["secret"] = secret, STANDARD_INPUT
    elif values["secret_file"]:
        values["secret"], origins["secret"] = _secret(values["secret_file"], origins["secret_file"])
    _check_secret(values["secret"], origins["secret"])
    return Told(values, origins, tuple(key for key in keys if key.name not in values))


def _given(
    key: Key, flags: Mapping[str, Any], environment: Mapping[str, str], file: File | None, own: str
) -> Given | None:
    if key.name in flags:
        return Given(flags[key.name], key.flags[0])
    if text := environment.get(key.variable):
        return Given(text, key.variable)
    if file is not None and key.in_file:
        for table in dict.fromkeys((own, key.table)):  # what both have may stand in a daemon's own table too
            if key.name in file.entries.get(table, {}):
                return Given(file.entries[table][key.name], file.place(table, key.name))
    return None


def _read(key: Key, given: Given) -> Any:
    try:
        return key.kind.read(given.value)
    except (ValueError, TypeError):
        value = "what it says" if key.hidden else repr(given.value)
        raise Misconfigured(f"{key.path}, from {given.origin}: {value} is not {key.kind.expected}") from None


def _secret(path: Path, origin: str) -> tuple[str, str]:
    try:
        text = read_private(path).strip()
    except Unusable as error:
        raise Misconfigured(f"secret_file, from {origin}: {str(path)!r} {error}") from None
    if not text or not text.isascii() or not text.isprintable():
        raise Misconfigured(f"secret_file, from {origin}: {str(path)!r} is not one line of printable ASCII")
    return text, str(path)


def _check_secret(secret: str, origin: str) -> None:
    """Whoever dials a link is shown a digest of it, and may guess at home: it must not be a word."""
    if 0 < len(secret) < SHORTEST_SECRET:
        raise Misconfigured(
            f"secret, from {origin}: it is shorter than {SHORTEST_SECRET} characters, and could be guessed: make one "
            "with `openssl rand -hex 32`, and give it to all daemons and clients of the job"
        )


def _ways(key: Key) -> str:
    table = f" in [{key.table}]" if key.table else ""
    return f"give {key.flags[0]}, set {key.variable}, or write {key.name}{table} into a file"


def _check_variables(settings: type[DaemonSettings], environment: Mapping[str, str]) -> None:
    """A variable that begins as this daemon's do and is none of them is a mistake."""
    known = {key.variable for key in keys_of(settings)}
    prefix = f"{PREFIX}{settings.TABLE.upper()}_"
    for name in environment:
        if name.startswith(prefix) and name not in known:
            raise Misconfigured(f"there is no variable {name} of the environment{meant(name, known)}")
