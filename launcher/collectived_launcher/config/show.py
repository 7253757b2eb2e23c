"""The effective configuration as rows, as JSON and as a commented file. Secrets are said to be there, and not shown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from collectived_proto.configuration.daemons import DAEMONS
from collectived_proto.configuration.effective import DEFAULT, Told
from collectived_proto.configuration.keys import Key, keys_of

HIDDEN = "set, not shown"
NEEDED = "needed"
_WIDTH = 100  # of comments


def rows(daemon: str, told: Told) -> Iterator[tuple[str, str, str]]:
    """(key, value, where it came from) of one daemon, in the order of their declaration."""
    for key in keys_of(DAEMONS[daemon]):
        yield f"{daemon}.{key.name}", _shown(key, told), told.origins.get(key.name, NEEDED)


def document(found: Mapping[str, Told], file: Path | None) -> dict[str, Any]:
    """For JSON: the file that was read, and by daemon and key its value and `from`; None for what is not given."""
    daemons = {
        daemon: {
            key.name: {"value": _plain(key, told), "from": told.origins.get(key.name, NEEDED)}
            for key in keys_of(DAEMONS[daemon])
        }
        for daemon, told in found.items()
    }
    return {"file": str(file) if file else None, **daemons}


def toml(found: Mapping[str, Told]) -> str:
    """A file that says the same: what has its default is there as a comment."""
    parts = [
        "# Configuration of collectived. Variables of the environment go over this file, flags over both.\n"
        "# What is commented out has the value that it has anyway.\n"
    ]
    first = next(iter(found))
    parts += _entries([key for key in keys_of(DAEMONS[first]) if not key.table], found[first])
    for daemon, told in found.items():
        parts.append(f"[{daemon}]\n")
        own = [key for key in keys_of(DAEMONS[daemon]) if key.table or told.values[key.name] != _of_first(found, key)]
        parts += _entries(own, told)
    return "\n".join(parts)


def _of_first(found: Mapping[str, Told], key: Key) -> Any:
    return next(iter(found.values())).values[key.name]


def _entries(keys: Iterable[Key], told: Told) -> Iterator[str]:
    for key in keys:
        if key.in_file:
            yield "\n".join(_entry(key, told)) + "\n"


def _entry(key: Key, told: Told) -> Iterator[str]:
    yield from textwrap.wrap(key.sentence, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    origin = told.origins.get(key.name, NEEDED)
    if origin == NEEDED:
        yield f"# needed: {key.kind.expected}"
        yield f"# {key.name} ="
    elif origin == DEFAULT:
        yield f"# {key.name} = {key.kind.write(told.values[key.name])}"
    else:
        yield f"{key.name} = {key.kind.write(told.values[key.name])}"


def _shown(key: Key, told: Told) -> str:
    if key.name not in told.values:
        return ""
    value = told.values[key.name]
    if key.hidden:
        return HIDDEN if value else ""
    return "" if value in (None, "") else key.kind.write(value).strip('"')


def _plain(key: Key, told: Told) -> Any:
    value = told.values.get(key.name)
    if key.hidden:
        return HIDDEN if value else None
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
