"""A study as a picture: time and bus bandwidth against size. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from collectived_proto.config.units import format_size
from collectived_proto.report.plot import style_axes
from collectived_proto.report.quantities import format_measured_rate, format_measured_time
from collectived_runtime.plan.auto import ANY_SIZE
from collectived_runtime.plan.cost_model import bus_factor
from collectived_runtime.simulation.show import describe_model, heading
from collectived_runtime.simulation.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = tuple(f"C{number}" for number in (0, 1, 2, 3, 4, 5, 6, 8, 9))
"""All but the grey, which is AUTO's."""
_LINE_STYLES = ("-", (0, (5, 1.5)), "-.", (0, (1, 1)))
"""When the colours are used up, they come again with another stroke."""


def draw(study: Study, path: Path) -> None:
    """Write the picture; the suffix of `path` says which kind.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.2), layout="constrained")
    figure.suptitle(f"all-reduce, {heading(study.spec)}\n", fontsize=13)
    figure.text(0.5, 0.925, describe_model(study.spec), ha="center", color="0.4", fontsize=8.5)
    left, right = figure.subplots(1, 2)
    _plot_times(left, study)
    _plot_bandwidths(right, study)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 7), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _plot_times(axes: Axes, study: Study) -> None:
    sizes = [line.nbytes for line in study.results]
    for number, name in enumerate(study.spec.algorithms):
        _plot_line(axes, number, sizes, [line.costs[name].seconds for line in study.results], name)
    axes.plot(sizes, [line.lower_bound for line in study.results], "k--", linewidth=1.2, label="lower bound")
    _plot_auto(axes, study, [line.auto.cost.seconds for line in study.results])
    _label_auto_ranges(axes, study)
    style_axes(axes, "time", sizes, _takes_time(study), format_size, format_measured_time)


def _plot_bandwidths(axes: Axes, study: Study) -> None:
    sizes = [line.nbytes for line in study.results]
    for number, name in enumerate(study.spec.algorithms):
        _plot_line(axes, number, sizes, [line.costs[name].bus_bandwidth for line in study.results], name)
    factor = bus_factor(sum(study.spec.hosts))
    bound = [line.nbytes * factor / line.lower_bound if line.lower_bound else 0.0 for line in study.results]
    axes.plot(sizes, bound, "k--", linewidth=1.2)
    _plot_auto(axes, study, [line.auto.cost.bus_bandwidth for line in study.results])
    style_axes(axes, "bus bandwidth", sizes, _takes_time(study), format_size, format_measured_rate)


def _plot_line(axes: Axes, number: int, sizes: list[int], values: list[float], name: str) -> None:
    again, colour = divmod(number, len(_COLOURS))
    stroke = _LINE_STYLES[again % len(_LINE_STYLES)]
    axes.plot(sizes, values, color=_COLOURS[colour], linestyle=stroke, linewidth=1.6, label=name)


def _plot_auto(axes: Axes, study: Study, values: list[float]) -> None:
    """Plot the time of AUTO as a broad band behind the lines, and its switches as upright lines."""
    sizes = [line.nbytes for line in study.results]
    axes.plot(sizes, values, color="0.55", alpha=0.35, linewidth=8, solid_capstyle="round", zorder=1, label="AUTO")
    for begin, _ in _auto_ranges(study)[1:]:
        axes.axvline(begin, color="0.45", linestyle=":", linewidth=1.1)


def _label_auto_ranges(axes: Axes, study: Study) -> None:
    for begin, name in _auto_ranges(study):
        axes.annotate(
            f"AUTO: {name}",
            xy=(begin, 0.985),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            rotation=90,
            va="top",
            fontsize=8,
            color="0.35",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1},
        )


def _auto_ranges(study: Study) -> list[tuple[int, str]]:
    """The choices of AUTO within the chart, each with its smallest size."""
    begin, last = study.results[0].nbytes, study.results[-1].nbytes
    reigns = []
    for row in study.table:
        if begin < last and (row.limit == ANY_SIZE or row.limit > begin):
            shards = f" × {row.shards} shards" if row.shards > 1 else ""
            reigns.append((begin, f"{row.algorithm}{shards}"))
            begin = last if row.limit == ANY_SIZE else row.limit
    return reigns


def _takes_time(study: Study) -> bool:
    """Alone, everything takes no time, for which a logarithm has no place."""
    return sum(study.spec.hosts) > 1
