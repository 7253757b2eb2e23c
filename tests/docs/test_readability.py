"""The first pages that people read are plain English, as far as a formula can tell."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.contents import ROOT
from tests.docs.readability import count_syllables, prose, reading_ease

FIRST_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/start").glob("*.md"))]


@pytest.mark.parametrize("path", FIRST_PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_first_pages_are_easy_to_read(path: Path) -> None:
    assert reading_ease(path.read_text()) >= 50


def test_hard_words_in_a_long_sentence_are_noticed() -> None:
    hard = (
        "Interoperability characteristics necessitate considerable organisational deliberation, notwithstanding that."
    )
    assert reading_ease(hard) < 0 < 90 < reading_ease("The cat sat on the mat. It did not move.")


def test_code_tables_and_targets_of_links_are_no_prose() -> None:
    page = "# Title\n\nA [link](to/some.md) to `code`.\n\n```\nx = 1\n```\n\n| a | b |\n"
    assert prose(page).split() == ["A", "link", "to", "code."]


@pytest.mark.parametrize(("word", "count"), [("rank", 1), ("named", 1), ("table", 2), ("needed", 2), ("collective", 3)])
def test_syllables_are_counted(word: str, count: int) -> None:
    assert count_syllables(word) == count
