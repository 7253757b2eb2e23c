"""Charts of figures against size. They need matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def style_axes(
    axes: Axes,
    title: str,
    sizes: Sequence[int],
    logarithmic: bool,
    size_text: Callable[[int], str],
    value_text: Callable[[float], str],
) -> None:
    """Give a drawn picture its title, scales and grid; `logarithmic`: upwards, as sizes always are."""
    axes.set_title(title)
    axes.set_xscale("log", base=2)
    if logarithmic:
        axes.set_yscale("log")
    axes.set_xticks(sizes[:: -(-len(sizes) // 9)])
    axes.xaxis.set_major_formatter(lambda value, _: size_text(round(value)))
    axes.tick_params(axis="x", rotation=35)
    axes.minorticks_off()
    axes.grid(True, color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_formatter(lambda value, _: value_text(value))
