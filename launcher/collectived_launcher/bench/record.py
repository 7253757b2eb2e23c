"""The state of a measurement, from the events of `collectived.bench`, and the JSON made of it. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
_EVENTS = ("begin", "size", "row", "end", "failed")


@dataclass(slots=True)
class Record:
    """The state of a measurement. `conditions`: None before rank 0 has sent them.

    `current`: size in bytes and iterations of the current measurement.

    `sizes`: all that will be measured, in bytes. `failures`: (rank, error, traceback or "", the rank whose failure it
    follows from or None), in the order in which they were reported.
    """

    conditions: dict[str, Any] | None = None
    sizes: list[int] = field(default_factory=list)
    current: tuple[int, int] | None = None
    rows: list[Row] = field(default_factory=list)
    failures: list[tuple[int | None, str, str, int | None]] = field(default_factory=list)
    complete: bool = False

    @property
    def wrong_elements(self) -> int:
        """Wrong elements of all sizes together."""
        return sum(row["errors"] or 0 for row in self.rows)


def parse_event(line: bytes) -> dict[str, Any] | None:
    """A line of a client as an event; None where it is something else that it printed."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("event") in _EVENTS else None


def apply_event(record: Record, told: dict[str, Any]) -> None:
    """Enters an event."""
    match told["event"]:
        case "begin":
            record.conditions, record.sizes = told["conditions"], told["sizes"]
        case "size":
            record.current = told["size_bytes"], told["iterations"]
        case "row":
            record.current = None
            record.rows.append({key: value for key, value in told.items() if key != "event"})
        case "end":
            record.complete = True
        case "failed":
            record.failures.append((told["rank"], told["error"], told["trace"], told.get("follows")))


def group_failures(failures: Sequence[tuple[int | None, str, str, int | None]]) -> list[tuple[list[int], str, str]]:
    """(ranks, error, traceback) of failures, each once; those that follow from another one are left out."""
    began = {rank for rank, _, _, follows in failures if follows is None}
    grouped: dict[str, tuple[list[int], str]] = {}
    for rank, error, trace, follows in failures:
        if follows is not None and follows in began:
            continue
        ranks, _ = grouped.setdefault(error, ([], trace))
        if rank is not None:
            ranks.append(rank)
    return [(sorted(ranks), error, trace) for error, (ranks, trace) in grouped.items()]


def as_json(record: Record) -> dict[str, Any]:
    """Seconds, bytes, and bytes per second; docs/operate/bench.md explains the keys."""
    return {
        "conditions": record.conditions,
        "complete": record.complete,
        "errors": record.wrong_elements,
        "rows": record.rows,
        "failures": [
            {"ranks": ranks, "error": error, "trace": trace} for ranks, error, trace in group_failures(record.failures)
        ],
    }
