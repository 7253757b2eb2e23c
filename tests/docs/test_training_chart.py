"""docs/internals/training.svg shows the figures of docs/internals/performance.md, and no others."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tests.docs.training_chart import CHART, PAGE, fresh, trainings

TEXT = PAGE.read_text()


def test_the_chart_is_of_the_table() -> None:
    assert fresh(TEXT) == CHART.read_text(), "run `make docs` and commit the result"


def test_every_bar_is_as_long_as_its_figure() -> None:
    tree = ElementTree.fromstring(CHART.read_text())
    bars = [float(one.attrib["width"]) for one in tree if one.attrib.get("class") in ("ours", "other")]
    rows = trainings(TEXT)
    assert len(bars) == len(rows) == 4
    assert all(abs(bar / row.seconds - bars[0] / rows[0].seconds) < 0.1 for bar, row in zip(bars, rows, strict=True))


def test_a_figure_that_is_not_in_the_table_is_noticed() -> None:
    assert fresh(re.sub(r"\d+\.\d+ s ", "1.00 s ", TEXT)) != fresh(TEXT)
