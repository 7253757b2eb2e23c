"""A study as a picture: time and bus bandwidth against size. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from collectived_runtime.plan.choose import REST
from collectived_runtime.plan.model import bus_factor
from collectived_runtime.simulation.show import costs, heading
from collectived_runtime.simulation.study import Study
from collectived_runtime.simulation.units import duration, rate, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = tuple(f"C{number}" for number in (0, 1, 2, 3, 4, 5, 6, 8, 9))
"""All but the grey, which is AUTO's."""
_STROKES = ("-", (0, (5, 1.5)), "-.", (0, (1, 1)))
"""When the colours are used up, they come again with another stroke."""


def draw(study: Study, path: Path) -> None:
    """Write the picture; the suffix of `path` says which kind.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.2), layout="constrained")
    figure.suptitle(f"all-reduce, {heading(study.question)}\n", fontsize=13)
    figure.text(0.5, 0.925, costs(study.question), ha="center", color="0.4", fontsize=8.5)
    left, right = figure.subplots(1, 2)
    _times(left, study)
    _bandwidths(right, study)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 7), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _times(axes: Axes, study: Study) -> None:
    sizes = [line.nbytes for line in study.lines]
    for number, name in enumerate(study.question.algorithms):
        _line(axes, number, sizes, [line.figures[name].seconds for line in study.lines], name)
    axes.plot(sizes, [line.lower_bound for line in study.lines], "k--", linewidth=1.2, label="lower bound")
    _auto(axes, study, [line.auto.figure.seconds for line in study.lines])
    _name_reigns(axes, study)
    axes.set_title("time")
    _scales(axes, study)
    axes.yaxis.set_major_formatter(lambda value, _: duration(value))


def _bandwidths(axes: Axes, study: Study) -> None:
    sizes = [line.nbytes for line in study.lines]
    for number, name in enumerate(study.question.algorithms):
        _line(axes, number, sizes, [line.figures[name].bus_bandwidth for line in study.lines], name)
    factor = bus_factor(sum(study.question.hosts))
    bound = [line.nbytes * factor / line.lower_bound if line.lower_bound else 0.0 for line in study.lines]
    axes.plot(sizes, bound, "k--", linewidth=1.2)
    _auto(axes, study, [line.auto.figure.bus_bandwidth for line in study.lines])
    axes.set_title("bus bandwidth")
    _scales(axes, study)
    axes.yaxis.set_major_formatter(lambda value, _: rate(value))


def _line(axes: Axes, number: int, sizes: list[int], values: list[float], name: str) -> None:
    again, colour = divmod(number, len(_COLOURS))
    stroke = _STROKES[again % len(_STROKES)]
    axes.plot(sizes, values, color=_COLOURS[colour], linestyle=stroke, linewidth=1.6, label=name)


def _auto(axes: Axes, study: Study, values: list[float]) -> None:
    """What AUTO takes, as a broad band behind the lines, and where it switches, as upright lines."""
    sizes = [line.nbytes for line in study.lines]
    axes.plot(sizes, values, color="0.55", alpha=0.35, linewidth=8, solid_capstyle="round", zorder=1, label="AUTO")
    for begin, _ in _reigns(study)[1:]:
        axes.axvline(begin, color="0.45", linestyle=":", linewidth=1.1)


def _name_reigns(axes: Axes, study: Study) -> None:
    for begin, name in _reigns(study):
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


def _reigns(study: Study) -> list[tuple[int, str]]:
    """What AUTO takes within the picture, with the size from which on."""
    begin, last = study.lines[0].nbytes, study.lines[-1].nbytes
    reigns = []
    for row in study.table:
        if begin < last and (row.limit == REST or row.limit > begin):
            shards = f" × {row.shards} shards" if row.shards > 1 else ""
            reigns.append((begin, f"{row.algorithm}{shards}"))
            begin = last if row.limit == REST else row.limit
    return reigns


def _scales(axes: Axes, study: Study) -> None:
    sizes = [line.nbytes for line in study.lines]
    axes.set_xscale("log", base=2)
    if sum(study.question.hosts) > 1:  # alone, everything takes no time, for which a logarithm has no place
        axes.set_yscale("log")
    axes.set_xticks(sizes[:: -(-len(sizes) // 9)])
    axes.xaxis.set_major_formatter(lambda value, _: size(round(value)))
    axes.tick_params(axis="x", rotation=35)
    axes.minorticks_off()
    axes.grid(True, color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
