"""The effective configuration of one daemon: file < environment < flags, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from collectived_proto.config.daemons import DaemonSettings
from collectived_proto.config.settings import REQUIRED, VARIABLE_PREFIX, Setting, list_settings
from collectived_proto.config.sources import ConfigError, ConfigFile, suggest_nearest
from collectived_proto.private_files import PrivateFileError, read_credential

SettingsT = TypeVar("SettingsT", bound=DaemonSettings)

DEFAULT = "default"
STANDARD_INPUT = "standard input"
MIN_SECRET_LENGTH = 16  # characters


@dataclass(frozen=True, slots=True)
class Resolved:
    """The configuration of one daemon: the values of its keys, where each came from, and which are missing."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    missing: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class RawValue:
    """A value as it was written, and the place where it was written."""

    value: Any
    origin: str


def resolve_settings(
    settings: type[SettingsT],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: ConfigFile | None,
    secret: str | None = None,
) -> SettingsT:
    """The settings of a daemon. Arguments as of `resolve_values`.

    Raises:
        ConfigError: as `resolve_values`; or a key that is needed was given nowhere.
    """
    found = resolve_values(settings, flags, environment, file, secret)
    for key in found.missing:
        raise ConfigError(f"{key.path} is needed: {key.description.removesuffix('.')}; {_how_to_set(key)}")
    return settings(**found.values)


def resolve_values(
    settings: type[DaemonSettings],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: ConfigFile | None,
    secret: str | None = None,
) -> Resolved:
    """Read everything once.

    Args:
        flags: by name of the key, as words.
        secret: that came over standard input, where it did.

    Raises:
        ConfigError: a value is none of its key's kind, a variable is not known, or the secret is short.
    """
    _check_variables(settings, environment)
    keys = list_settings(settings)
    values = {key.name: key.default for key in keys if key.default is not REQUIRED}
    origins = dict.fromkeys(values, DEFAULT)
    for key in keys:
        given = _find_raw_value(key, flags, environment, file, settings.TABLE)
        if given is not None:
            values[key.name], origins[key.name] = _parse_value(key, given), given.origin
    if secret is not None:
        values["secret"], origins["secret"] = secret, STANDARD_INPUT
    elif values["secret_file"]:
        values["secret"], origins["secret"] = _read_secret(values["secret_file"], origins["secret_file"])
    _check_secret(values["secret"], origins["secret"])
    return Resolved(values, origins, tuple(key for key in keys if key.name not in values))


def _find_raw_value(
    key: Setting, flags: Mapping[str, Any], environment: Mapping[str, str], file: ConfigFile | None, own: str
) -> RawValue | None:
    if key.name in flags:
        return RawValue(flags[key.name], key.flags[0])
    if text := environment.get(key.variable):
        return RawValue(text, key.variable)
    if file is not None and key.allowed_in_file:
        for table in dict.fromkeys((own, key.table)):  # keys of both daemons may stand in a daemon's own table too
            if key.name in file.entries.get(table, {}):
                return RawValue(file.entries[table][key.name], file.locate(table, key.name))
    return None


def _parse_value(key: Setting, given: RawValue) -> Any:
    try:
        return key.value_type.parse(given.value)
    except (ValueError, TypeError):
        value = "its value" if key.is_secret else repr(given.value)
        raise ConfigError(f"{key.path}, from {given.origin}: {value} is not {key.value_type.expected}") from None


def _read_secret(path: Path, origin: str) -> tuple[str, str]:
    try:
        return read_credential(path), str(path)
    except PrivateFileError as error:
        raise ConfigError(f"secret_file, from {origin}: {str(path)!r} {error}") from None


def _check_secret(secret: str, origin: str) -> None:
    """Refuse a short secret. Each process that dials a link gets a digest of it, and may guess secrets offline."""
    if 0 < len(secret) < MIN_SECRET_LENGTH:
        raise ConfigError(
            f"secret, from {origin}: it is shorter than {MIN_SECRET_LENGTH} characters, and could be guessed: make one "
            "with `openssl rand -hex 32`, and give it to all daemons and clients of the job"
        )


def _how_to_set(key: Setting) -> str:
    table = f" in [{key.table}]" if key.table else ""
    return f"give {key.flags[0]}, set {key.variable}, or write {key.name}{table} into a file"


def _check_variables(settings: type[DaemonSettings], environment: Mapping[str, str]) -> None:
    """A variable that begins as this daemon's do and is none of them is a mistake."""
    known = {key.variable for key in list_settings(settings)}
    prefix = f"{VARIABLE_PREFIX}{settings.TABLE.upper()}_"
    for name in environment:
        if name.startswith(prefix) and name not in known:
            raise ConfigError(f"there is no variable {name} of the environment{suggest_nearest(name, known)}")
