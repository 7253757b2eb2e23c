"""A measurement as a picture: bus bandwidth and time against size. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from collectived_launcher.bench.record import Record
from collectived_launcher.bench.tables import heading
from collectived_proto.report.plot import style_axes
from collectived_proto.report.quantities import format_round_bytes, format_tick_rate, format_tick_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_plot(record: Record, path: Path) -> None:
    """Write the picture; the suffix of `path` says which kind.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    conditions = record.conditions or {}
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    reduces = f" ({conditions['reduce_op']})" if conditions["reduce_op"] else ""
    figure.suptitle(f"{heading(conditions)}, {conditions['dtype']}{reduces}", fontsize=13)
    left, right = figure.subplots(1, 2)
    _plot_bandwidth(left, record)
    _plot_times(right, record)
    figure.savefig(path, dpi=130)


def _plot_bandwidth(axes: Axes, record: Record) -> None:
    sizes = [row["size_bytes"] for row in record.rows]
    values = [row["bus_bandwidth"] for row in record.rows]
    axes.plot(sizes, values, color="C0", linewidth=1.6, marker="o", markersize=4)
    # One rank alone sends nothing.
    style_axes(axes, "bus bandwidth", sizes, any(values), format_round_bytes, format_tick_rate)


def _plot_times(axes: Axes, record: Record) -> None:
    sizes = [row["size_bytes"] for row in record.rows]
    axes.plot(sizes, [row["p50_seconds"] for row in record.rows], "C0o-", linewidth=1.6, markersize=4, label="p50")
    axes.plot(sizes, [row["p99_seconds"] for row in record.rows], "C1o--", linewidth=1.2, markersize=3, label="p99")
    axes.legend(frameon=False)
    style_axes(axes, "time of the slowest rank", sizes, True, format_round_bytes, format_tick_time)
