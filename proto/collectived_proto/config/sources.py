"""The configuration file: where it lies, what stands in which line of it, and that no key of it is unknown."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collectived_proto.config.daemons import DAEMONS
from collectived_proto.config.settings import Setting, list_settings

CONFIG_VARIABLE = "COLLECTIVED_CONFIG"
SYSTEM_PATH = Path("/etc/collectived/collectived.toml")
NO_FILE = "none"  # instead of a path: read no file
_HEADER = re.compile(r"\s*\[+\s*([A-Za-z0-9_.\"-]+)\s*\]+")
_ENTRY = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")


class ConfigError(Exception):
    """An error in the configuration: the key, where its value came from, the value, and what was expected."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file that was read: its entries by table ("" for those before the first), and the line of each."""

    path: Path
    entries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lines: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def locate(self, table: str, name: str) -> str:
        """Return where it stands: `/etc/collectived/collectived.toml:12`."""
        line = self.lines.get((table, name))
        return f"{self.path}:{line}" if line else str(self.path)


def find_config_file(named: str | None, environment: Mapping[str, str], system: Path = SYSTEM_PATH) -> Path | None:
    """The file to read: the argument (of `--config`), else COLLECTIVED_CONFIG, else the user's, else the system's.

    None where there is none, or where `none` was given.
    """
    if given := named or environment.get(CONFIG_VARIABLE):
        return None if given == NO_FILE else Path(given)
    home = environment.get("XDG_CONFIG_HOME") or f"{environment.get('HOME', '')}/.config"
    return next((path for path in (Path(home) / "collectived" / "collectived.toml", system) if _is_file(path)), None)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except PermissionError:  # HOME belongs to another user, as where only the uid was changed
        return False


def load_config_file(path: Path) -> ConfigFile:
    """Read a file, and check that all its keys are known.

    Raises:
        ConfigError: it cannot be read, is no TOML, or has a key that no daemon has.
    """
    try:
        text = path.read_text()
        read = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    tables = {name: entry for name, entry in read.items() if isinstance(entry, dict)}
    tables[""] = {name: entry for name, entry in read.items() if name not in tables}
    file = ConfigFile(path, tables, find_line_numbers(text))
    for table in tables.keys() - {"", *DAEMONS}:
        line = file.lines.get((table, ""))
        place = f"{path}:{line}" if line else str(path)
        raise ConfigError(
            f"{place}: there is no table [{table}]{suggest_nearest(table, DAEMONS)}; tables: {tables_text(DAEMONS)}"
        )
    for table, settings in DAEMONS.items():
        check_settings(file, table, list_settings(settings))
    shared = [key for settings in DAEMONS.values() for key in list_settings(settings) if not key.table]
    check_settings(file, "", shared)
    return file


def check_settings(file: ConfigFile, table: str, keys: Iterable[Setting]) -> None:
    """Raise ConfigError where a table has a key that is none of these."""
    known = {key.name: key for key in keys}
    for name in file.entries.get(table, {}):
        key = known.get(name)
        where = f"in [{table}]" if table else "before the first table"
        if key is None:
            owners = [other for other, settings in DAEMONS.items() if name in {k.name for k in list_settings(settings)}]
            hint = f": it belongs into [{owners[0]}]" if owners and not table else suggest_nearest(name, known)
            raise ConfigError(f"{file.locate(table, name)}: there is no key {name!r} {where}{hint}")
        if not key.allowed_in_file:
            raise ConfigError(
                f"{file.locate(table, name)}: {name!r} must not stand in a file that others may read: put it into a "
                "file of its own, with mode 0600, and name that as secret_file"
            )


def find_line_numbers(text: str) -> dict[tuple[str, str], int]:
    """(table, key) -> line, from 1; (table, "") is the line of its header. Good for messages."""
    found: dict[tuple[str, str], int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = header[1].strip('"')
            found.setdefault((table, ""), number)
        elif entry := _ENTRY.match(line):
            found.setdefault((table, entry[1]), number)
    return found


def suggest_nearest(wrong: str, known: Collection[str]) -> str:
    """`: did you mean 'listen'?`, or nothing where nothing is near."""
    near = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f": did you mean {near[0]!r}?" if near else ""


def tables_text(names: Iterable[str]) -> str:
    return ", ".join(f"[{name}]" for name in names)
