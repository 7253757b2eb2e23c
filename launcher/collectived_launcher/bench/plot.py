"""A measurement as a picture: bus bandwidth and time against size. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from collectived_launcher.bench.record import Record
from collectived_launcher.bench.tables import format_size, heading

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
    axes.set_title("bus bandwidth")
    _set_scales(axes, sizes, logarithmic=any(values))  # one rank alone sends nothing
    axes.yaxis.set_major_formatter(lambda value, _: _format_rate(value))


def _plot_times(axes: Axes, record: Record) -> None:
    sizes = [row["size_bytes"] for row in record.rows]
    axes.plot(sizes, [row["p50_seconds"] for row in record.rows], "C0o-", linewidth=1.6, markersize=4, label="p50")
    axes.plot(sizes, [row["p99_seconds"] for row in record.rows], "C1o--", linewidth=1.2, markersize=3, label="p99")
    axes.set_title("time of the slowest rank")
    axes.legend(frameon=False)
    _set_scales(axes, sizes, logarithmic=True)
    axes.yaxis.set_major_formatter(lambda value, _: _format_duration(value))


def _format_duration(seconds: float) -> str:
    for unit, worth in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= worth:
            return f"{seconds / worth:g} {unit}"
    return f"{seconds * 1e6:g} µs"


def _format_rate(bytes_per_second: float) -> str:
    for unit, worth in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_second >= worth:
            return f"{bytes_per_second / worth:g} {unit}"
    return f"{bytes_per_second / 1e3:g} kB/s"


def _set_scales(axes: Axes, sizes: list[int], logarithmic: bool) -> None:
    axes.set_xscale("log", base=2)
    if logarithmic:
        axes.set_yscale("log")
    axes.set_xticks(sizes[:: -(-len(sizes) // 9)])
    axes.xaxis.set_major_formatter(lambda value, _: format_size(round(value)))
    axes.tick_params(axis="x", rotation=35)
    axes.minorticks_off()
    axes.grid(True, color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
