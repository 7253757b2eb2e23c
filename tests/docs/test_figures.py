"""The figures of docs/internals are what the script draws, and are shown on a page."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.docs.drawing import Drawing
from tests.docs.figures import FIGURES, FOLDER


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_what_the_script_draws(name: str) -> None:
    assert FIGURES[name]() == (FOLDER / f"{name}.svg").read_text(), "run `make docs` and commit the result"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.svg")), ids=lambda path: str(path.name))
def test_a_figure_says_what_it_shows_and_has_colours_for_dark_pages(path: Path) -> None:
    text = path.read_text()
    title = ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title")
    assert title is not None and title.text
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_on_a_page(name: str) -> None:
    assert any(f"]({name}.svg)" in page.read_text() for page in FOLDER.glob("*.md"))


def test_text_that_leaves_its_box_or_the_drawing_is_noticed() -> None:
    drawing = Drawing(100, 100, "a small one")
    with pytest.raises(AssertionError, match="leaves its box"):
        drawing.labelled(0, 0, 50, ["too long for its box"])
    with pytest.raises(AssertionError, match="leaves the drawing"):
        drawing.text(60, 20, "too long")
    with pytest.raises(AssertionError, match="leaves the drawing"):
        drawing.box(60, 60, 50, 10)
