"""The number of each host's worker, for workers that bring none (a DaemonSet cannot number its pods).

A host keeps its number for as long as this file beside the journal is kept, over restarts of the coordinator too. So
ranks keep their order. Numbers are small and none is given twice, not even one whose host has gone for good.

The epoch journal: one line, the epoch of the last coordinator that used this file.

An *epoch* is milliseconds since 1970 at start, and never at or below one that was in the journal before: a clock that
was set back gives no old keys again.

The file of stored tables: JSON, from `world 2,2` (a group's name and the ranks on each of its workers) to rows.

A row is a `Tier`: algorithm, shards, limit in bytes (-1 in the last: any size) and bytes per pack. The file is written
whole or not at all, and what other coordinators have stored in it meanwhile is kept.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from collectived_proto.private_files import write_atomically
from collectived_proto.types import Tier
from collectived_runtime.coordinator.core.tuning import add_stored_table
from collectived_runtime.plan.catalog import FLAT_ALGORITHMS


def choose_task_id(host: str, known: Mapping[str, int], attached: Mapping[int, str]) -> int:
    """The number for a host's worker.

    Args:
        known: numbers by host that were given before. attached: hosts by number of the workers that are here.
    """
    task = known.get(host)
    if task is not None and attached.get(task, host) == host:
        return task
    taken = {*known.values(), *attached}
    return next(task for task in itertools.count() if task not in taken)


class TaskIdFile:
    """Args: path: of the file, which is made at the first entry; None: kept in memory alone.

    Raises:
        ValueError: the file is none. OSError: it cannot be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._task_by_host = _read(path) if path else {}

    def assign_task_id(self, host: str, attached: Mapping[int, str]) -> int:
        """The number for a host's worker, which is on file before it is given.

        Raises:
            OSError: the file cannot be written.
        """
        task = choose_task_id(host, self._task_by_host, attached)
        if self._task_by_host.get(host) != task:
            known = {**self._task_by_host, host: task}
            if self._path:
                write_atomically(self._path, json.dumps(known, indent=1) + "\n", 0o644, sync=True)
            self._task_by_host = known
        return task


def _read(path: Path) -> dict[str, int]:
    try:
        read = json.loads(path.read_text())
        return {str(host): int(task) for host, task in read.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{path} does not hold the numbers of workers, JSON such as {{"host": 0}} ({error}): remove it if '
            "hosts may get other numbers"
        ) from None


def next_epoch(journal: Path | None) -> tuple[int, bool]:
    """A new epoch, written to the journal before it is used; and whether there was one before.

    Raises:
        ValueError: the journal holds something else than one number.
        OSError: it cannot be read or written.
    """
    epoch = time.time_ns() // 1_000_000
    if journal is None:
        return epoch, False
    try:
        text = journal.read_text()
    except FileNotFoundError:
        text = "0"
    try:
        epoch = max(epoch, int(text) + 1)
    except ValueError:
        raise ValueError(
            f"{journal} holds {text[:40]!r}, expected one number, the last epoch: remove the file if no coordinator "
            "of this job has run in the future"
        ) from None
    write_atomically(journal, f"{epoch}\n", 0o644, sync=True)
    return epoch, text != "0"


Tables = dict[str, tuple[Tier, ...]]


def default_table_path() -> Path:
    """Return `$XDG_STATE_HOME/collectived/tables.json`, by default below `~/.local/state`."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local/state") / "collectived" / "tables.json"


def read_tables(path: Path) -> Tables:
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
        raise _damaged_file_error(path, str(error)) from None
    try:
        return {name: _table(name, rows) for name, rows in _pairs(json.loads(text))}
    except (ValueError, RecursionError) as error:
        raise _damaged_file_error(path, str(error)) from None


def store_table(path: Path, name: str, table: tuple[Tier, ...]) -> None:
    """Add one table to a file, or replaces the one of that name; those measured longest ago go where it has too many.

    Raises:
        ValueError, OSError: as `read`, or it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # coordinators of other jobs store theirs in the same file
        tables = add_stored_table(read_tables(path), name, table)
        rows = {known: [asdict(tier) for tier in rows] for known, rows in tables.items()}
        write_atomically(path, json.dumps(rows, indent=1) + "\n", 0o644, sync=True)
    finally:
        os.close(descriptor)


def _damaged_file_error(path: Path, what: str) -> ValueError:
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
    if (
        tier.algorithm not in FLAT_ALGORITHMS
        or not 1 <= tier.shards < 1 << 16
        or not 0 <= tier.bytes_per_pack < 1 << 63
    ):
        raise ValueError(f"a row of table {name!r} is none that this release can have made: {row!r:.100}")
    return tier
