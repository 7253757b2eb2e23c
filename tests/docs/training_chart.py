"""docs/internals/training.svg: `python -m tests.docs.training_chart` (`make docs`) draws it again.

Its figures are those of the table in docs/internals/performance.md, which `benchmarks.training` writes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.docs.contents import ROOT
from tests.docs.drawing import Drawing

PAGE = ROOT / "docs" / "internals" / "performance.md"
CHART = ROOT / "docs" / "internals" / "training.svg"
_WIDTH, _LEFT, _BAR, _STEP, _TOP = 640, 110, 16, 24, 44


class Trained(NamedTuple):
    compression: str
    seconds: float
    accuracy: str


def trainings(page: str) -> list[Trained]:
    """What was measured, in the order of the table."""
    found = re.search(r"^<!-- training -->$(.*?)^<!-- end of training -->$", page, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{PAGE.name} has no table of trainings"
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) s \| ([\d. to]+) \|$", found[1], re.MULTILINE)
    return [Trained(name, float(seconds), accuracy) for name, seconds, accuracy in rows]


def fresh(page: str) -> str:
    """The chart as the table is now."""
    rows = trainings(page)
    longest = max(row.seconds for row in rows)
    drawing = Drawing(_WIDTH, _TOP + _STEP * len(rows) + 8, "Seconds and test accuracy of a training by compression")
    drawing.text(12, 20, "train_digits.py, 400 steps of two hosts with a link of 100 Mbit/s; less time is better")
    drawing.text(12, 36, "behind each bar: seconds, and test accuracy", "small soft")
    for place, row in enumerate(rows):
        y = _TOP + _STEP * place
        width = (_WIDTH - _LEFT - 190) * row.seconds / longest
        drawing.text(_LEFT - 8, y + 13, row.compression, anchor="end")
        drawing.bar(_LEFT, y, width, _BAR, "other" if row.compression == "none" else "ours")
        drawing.text(_LEFT + width + 6, y + 13, f"{row.seconds:g} s, {row.accuracy}")
    return drawing.svg()


if __name__ == "__main__":
    CHART.write_text(fresh(PAGE.read_text()))
