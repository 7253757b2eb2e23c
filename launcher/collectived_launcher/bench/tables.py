"""A measurement as a table in the manner of nccl-tests. Pure: a record in, what to print out."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from collectived_launcher.bench.record import Record, Row
from collectived_proto.report.phrases import pluralize

_COLUMNS = ("size B", "count", "type", "op", "root", "iter", "p50 µs", "p99 µs", "algbw GB/s", "busbw GB/s", "errors")
_LEFT_ALIGNED = ("type", "op")
_EMPTY_CELL = "-"


def build_table(record: Record) -> Table:
    """All rows that there are."""
    conditions = record.conditions or {}
    shown = Table(
        title=heading(conditions),
        title_justify="left",
        title_style="bold",
        caption=_caption(record),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for name in _COLUMNS:
        shown.add_column(name, justify="left" if name in _LEFT_ALIGNED else "right", no_wrap=True)
    for row in record.rows:
        shown.add_row(*format_cells(conditions, row), style="bold red" if row["errors"] else "")
    return shown


def format_cells(conditions: dict[str, Any], row: Row) -> list[str]:
    """One size, column by column."""
    root, errors = conditions["root"], row["errors"]
    return [
        str(row["size_bytes"]),
        str(row["count"]),
        conditions["dtype"] or _EMPTY_CELL,
        conditions["reduce_op"] or _EMPTY_CELL,
        _EMPTY_CELL if root is None else str(root),
        str(row["iterations"]),
        format_number(row["p50_seconds"] * 1e6),
        format_number(row["p99_seconds"] * 1e6),
        _bandwidth(row["algorithm_bandwidth"]),
        _bandwidth(row["bus_bandwidth"]),
        _EMPTY_CELL if errors is None else str(errors),
    ]


def heading(conditions: dict[str, Any]) -> str:
    """`all_reduce: 4 ranks on 2 workers, shared memory, worker memory`."""
    ranks, workers = pluralize(conditions["ranks"], "rank"), pluralize(conditions["workers"], "worker")
    memory = "arrays of the worker" if conditions["memory"] == "worker" else "ordinary arrays"
    words = [f"{conditions['operation']}: {ranks} on {workers}", conditions["transport"], memory]
    if conditions["in_flight"]:
        words.append(f"{conditions['in_flight']} in flight")
    return ", ".join(words)


def format_number(value: float) -> str:
    """Two digits after the point, and fewer where there are three before it."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:.1f}" if value >= 99.95 else f"{value:.2f}"


def _bandwidth(bytes_per_second: float | None) -> str:
    return _EMPTY_CELL if bytes_per_second is None else f"{bytes_per_second / 1e9:.3f}"


def _caption(record: Record) -> str:
    words = ["time: of the slowest rank; bandwidths: of p50, as in nccl-tests"]
    measured = [row["bus_bandwidth"] for row in record.rows if row["bus_bandwidth"] is not None]
    if measured:
        words.append(f"average bus bandwidth: {sum(measured) / len(measured) / 1e9:.3f} GB/s")
    if not record.complete:
        words.append(f"incomplete: {len(record.rows)} of {len(record.sizes)} sizes")
    return "\n".join(words)
