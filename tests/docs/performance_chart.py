"""docs/internals/performance.svg: `python -m tests.docs.performance_chart` (`make docs`) draws it again.

Its figures are those of the table in docs/internals/performance.md, which `make bench` writes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.docs.contents import ROOT
from tests.docs.drawing import Drawing

PAGE = ROOT / "docs" / "internals" / "performance.md"
CHART = ROOT / "docs" / "internals" / "performance.svg"
RANKS, SIZE = "4 ranks", "16 MiB"
_UNITS = {"µs": 1e-3, "ms": 1.0, "s": 1e3}
_WIDTH, _LEFT, _BAR, _STEP, _TOP = 780, 370, 16, 24, 44


class Figure(NamedTuple):
    name: str
    text: str
    milliseconds: float

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("collectived")


def figures(page: str) -> list[Figure]:
    """What was measured, in the order of the table; floors are no libraries."""
    found = re.search(rf"^\| {RANKS} \|.*\n\|[-:|]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert found is not None, f"{PAGE.name} has no table of {RANKS}"
    column = [cell.strip() for cell in found[0].splitlines()[0].split("|")].index(SIZE)
    rows = [[cell.strip() for cell in line.split("|")] for line in found[1].splitlines()]
    return [_figure(row[1], row[column]) for row in rows if not row[1].startswith("floor")]


def _figure(name: str, text: str) -> Figure:
    number, unit = text.split()
    return Figure(re.sub(r"[*`]", "", name), text, float(number) * _UNITS[unit])


def measured(page: str) -> str:
    """The day and the machine, from the line above the tables."""
    found = re.search(r"^<!-- compare -->\n\n(\d{4}-\d\d-\d\d), ([^,]*), ", page, re.MULTILINE)
    assert found is not None
    return f"{found[1]}, {found[2]}"


def fresh(page: str) -> str:
    """The chart as the table is now."""
    rows = figures(page)
    longest = max(row.milliseconds for row in rows)
    height = _TOP + _STEP * len(rows) + 8
    drawing = Drawing(_WIDTH, height, f"Milliseconds of an all_reduce of {SIZE} between {RANKS} on one host")
    drawing.text(12, 20, f"all_reduce of {SIZE}, {RANKS} on one host; less is better")
    drawing.text(12, 36, f"measured {measured(page)}", "small soft")
    for place, row in enumerate(rows):
        y = _TOP + _STEP * place
        width = (_WIDTH - _LEFT - 80) * row.milliseconds / longest
        drawing.text(_LEFT - 8, y + 13, row.name, anchor="end")
        drawing.bar(_LEFT, y, width, _BAR, "ours" if row.is_ours else "other")
        drawing.text(_LEFT + width + 6, y + 13, row.text)
    return drawing.svg()


if __name__ == "__main__":
    CHART.write_text(fresh(PAGE.read_text()))
