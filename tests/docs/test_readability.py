"""Pages are plain English, as far as a formula and a list of words can tell."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.docs.contents import ROOT
from tests.docs.readability import count_syllables, prose, reading_ease
from tests.house.test_prose import RIDDLES

PLAIN_PAGES = [
    ROOT / name
    for name in subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True).split()
    if (ROOT / name).exists()
]
GENERATED = re.compile(r"^<!-- ([\w ]+) -->$.*?^<!-- end of \1 -->$", re.MULTILINE | re.DOTALL)
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


def riddles(page: str) -> list[str]:
    """Subjects of which a reader must guess what they stand for, in sentences and in cells of tables."""
    text = re.sub(r"^```.*?^```$", "", GENERATED.sub("", page), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`|\*\*What[^*]*\*\*", "code", re.sub(r"^#.*$", "", text, flags=re.MULTILINE))
    text = re.sub(r"\]\([^)]*\)", "]", text)
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=[|-] ?)", text)]
    return [found[0] for part in paragraphs for found in RIDDLES.finditer(part)]


@pytest.mark.parametrize("path", PLAIN_PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_subjects_are_named(path: Path) -> None:
    assert not riddles(path.read_text())


@pytest.mark.parametrize(
    "sentence", ["Whoever comes late waits.", "It waits. What is drained ends.", "Nobody is blamed.", "A rank is told."]
)
def test_a_subject_without_a_name_is_noticed(sentence: str) -> None:
    assert riddles(sentence)


@pytest.mark.parametrize(
    "text", ["What is a rank?", "## What it costs", "`nobody`", "It says what was done.", "[a](#who-may)"]
)
def test_questions_headings_and_code_are_no_riddles(text: str) -> None:
    assert not riddles(text)
