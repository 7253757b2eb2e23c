"""The effective configuration as rows, as JSON and as a commented file. Secrets are said to be there, and not shown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from collectived_proto.config.daemons import DAEMONS
from collectived_proto.config.resolve import DEFAULT, Resolved
from collectived_proto.config.settings import Setting, list_settings

HIDDEN = "set, not shown"
NEEDED = "needed"
_WIDTH = 100  # of comments


def rows(daemon: str, told: Resolved) -> Iterator[tuple[str, str, str]]:
    """(key, value, where it came from) of one daemon, in the order of their declaration."""
    for key in list_settings(DAEMONS[daemon]):
        yield f"{daemon}.{key.name}", _format_value(key, told), told.origins.get(key.name, NEEDED)


def document(found: Mapping[str, Resolved], file: Path | None) -> dict[str, Any]:
    """For JSON: the file that was read, and by daemon and key its value and `from`; None for what is not given."""
    daemons = {
        daemon: {
            key.name: {"value": _to_plain(key, told), "from": told.origins.get(key.name, NEEDED)}
            for key in list_settings(DAEMONS[daemon])
        }
        for daemon, told in found.items()
    }
    return {"file": str(file) if file else None, **daemons}


def toml(found: Mapping[str, Resolved]) -> str:
    """A file that says the same: what has its default is there as a comment."""
    parts = [
        "# Configuration of collectived. Variables of the environment go over this file, flags over both.\n"
        "# What is commented out has the value that it has anyway.\n"
    ]
    first = next(iter(found))
    parts += _entries([key for key in list_settings(DAEMONS[first]) if not key.table], found[first])
    for daemon, told in found.items():
        parts.append(f"[{daemon}]\n")
        own = [
            key
            for key in list_settings(DAEMONS[daemon])
            if key.table or told.values[key.name] != _get_first_value(found, key)
        ]
        parts += _entries(own, told)
    return "\n".join(parts)


def _get_first_value(found: Mapping[str, Resolved], key: Setting) -> Any:
    return next(iter(found.values())).values[key.name]


def _entries(keys: Iterable[Setting], told: Resolved) -> Iterator[str]:
    for key in keys:
        if key.allowed_in_file:
            yield "\n".join(_entry(key, told)) + "\n"


def _entry(key: Setting, told: Resolved) -> Iterator[str]:
    yield from textwrap.wrap(key.description, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    origin = told.origins.get(key.name, NEEDED)
    if origin == NEEDED:
        yield f"# needed: {key.value_type.expected}"
        yield f"# {key.name} ="
    elif origin == DEFAULT:
        yield f"# {key.name} = {key.value_type.to_toml(told.values[key.name])}"
    else:
        yield f"{key.name} = {key.value_type.to_toml(told.values[key.name])}"


def _format_value(key: Setting, told: Resolved) -> str:
    if key.name not in told.values:
        return ""
    value = told.values[key.name]
    if key.is_secret:
        return HIDDEN if value else ""
    return "" if value in (None, "") else key.value_type.to_toml(value).strip('"')


def _to_plain(key: Setting, told: Resolved) -> Any:
    value = told.values.get(key.name)
    if key.is_secret:
        return HIDDEN if value else None
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
