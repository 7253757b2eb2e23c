"""What commands write into the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.page import PAGE, between, write

MARKED = "before\n<!-- compare -->\nold\n<!-- end of compare -->\nafter\n"


def test_only_what_lies_between_the_marks_is_replaced() -> None:
    assert between(MARKED, "compare", "new") == ("before\n<!-- compare -->\n\nnew\n\n<!-- end of compare -->\nafter\n")


def test_writing_twice_is_writing_once() -> None:
    once = between(MARKED, "compare", "new \\1 text")
    assert between(once, "compare", "new \\1 text") == once


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one"):
        between(MARKED, "coordinator", "new")


def test_the_file_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(MARKED)
    write("compare", "new", page)
    assert "new" in page.read_text()


@pytest.mark.parametrize("name", ["compare", "coordinator"])
def test_the_page_has_a_place_for_every_table(name: str) -> None:
    assert "x" in between(PAGE.read_text(), name, "x")
