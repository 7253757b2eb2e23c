"""The file of stored tables: JSON, from `world 2,2` (a group's name and the ranks on each of its workers) to rows.

A row is a `Tier`: algorithm, shards, limit in bytes (-1 in the last: any size) and bytes per pack. The file is written
whole or not at all, and what other coordinators have stored in it meanwhile is kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from collectived_proto.types import Tier
from collectived_runtime.coordinator.tables import stored
from collectived_runtime.plan.named import FLAT

Tables = dict[str, tuple[Tier, ...]]


def default_path() -> Path:
    """`$XDG_STATE_HOME/collectived/tables.json`, by default below `~/.local/state`."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local/state") / "collectived" / "tables.json"


def read(path: Path) -> Tables:
    """The tables of a file; none where there is no file.

    Raises:
        ValueError: it holds something else.
        OSError: it cannot be read.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise _damaged(path, str(error)) from None
    try:
        return {name: _table(name, rows) for name, rows in _pairs(json.loads(text))}
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None


def store(path: Path, name: str, table: tuple[Tier, ...]) -> None:
    """Adds one table to a file, or replaces the one of that name; those measured longest ago go where it has too many.

    Raises:
        ValueError, OSError: as `read`, or it cannot be written.
    """
    tables = stored(read(path), name, table)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with fresh.open("w") as file:
            json.dump({known: [asdict(tier) for tier in rows] for known, rows in tables.items()}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} is not a file of stored tables: {what}; remove it, and links will be measured again")


def _pairs(found: Any) -> list[tuple[str, Any]]:
    if not isinstance(found, Mapping):
        raise ValueError(f"expected an object of tables by name, got {type(found).__name__}")
    return list(found.items())


def _table(name: str, rows: Any) -> tuple[Tier, ...]:
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"table {name!r} must be a list of rows, got {rows!r:.60}")
    table = tuple(_row(name, row) for row in rows)
    limits = [tier.limit for tier in table]
    if limits[-1] != -1 or limits[:-1] != sorted({limit for limit in limits[:-1] if limit > 0}):
        raise ValueError(f"limits of table {name!r} must increase and end with -1, got {limits}")
    return table


def _row(name: str, row: Any) -> Tier:
    wanted = {"algorithm": str, "shards": int, "limit": int, "bytes_per_pack": int}
    if not isinstance(row, dict) or {key: type(value) for key, value in row.items()} != wanted:
        raise ValueError(f"a row of table {name!r} must have {', '.join(wanted)}, got {row!r:.100}")
    tier = Tier(**row)
    if tier.algorithm not in FLAT or not 1 <= tier.shards < 1 << 16 or not 0 <= tier.bytes_per_pack < 1 << 63:
        raise ValueError(f"a row of table {name!r} is none that this release can have made: {row!r:.100}")
    return tier
