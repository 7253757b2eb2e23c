"""`make lint` refuses words of the inside on pages for users, and names the word of the field."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.house.test_prose import PROTO_FILES, read_prose
from tests.house.test_rules import ROOT

WORDS = dict(line.split("->") for line in (ROOT / ".vocabulary").read_text().splitlines())
GLOSSARY = (ROOT / "docs/internals/glossary.md").read_text()


def check(path: Path) -> list[str]:
    """What codespell says of a page."""
    command = [sys.executable, "-m", "codespell_lib", "--toml", ".vocabulary.toml", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert not done.stderr
    return [line.partition(": ")[2] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("text", ["One lane has two strands.", "The Porter of the crew"])
def test_a_word_of_the_inside_is_refused_with_the_word_of_the_field(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{text}\n")
    said = check(page)
    assert len(said) == 2 and all(re.match(r"\w+ ==> \w+", line) for line in said)


def test_code_is_left_out(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`lanes` is an algorithm, as in lanes/ring; comm.Allreduce(x) is of mpi4py.\n")
    assert check(page) == []


def test_no_word_of_the_glossary_is_refused() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", GLOSSARY, re.MULTILINE)
    field = {word.strip() for row in rows for word in row.split(",")}
    assert {"worker", "rank", "group loop", "verdict"} <= field
    assert not field & set(WORDS)


def test_every_old_word_that_the_code_may_not_have_is_refused_on_pages_too() -> None:
    assert {"bell", "crew", "lane", "ledger", "porter", "seat", "strand", "workshop", "errand"} <= set(WORDS)


@pytest.mark.parametrize("path", PROTO_FILES, ids=lambda path: str(path.name))
def test_the_protocol_explains_itself_in_words_of_the_field(path: Path) -> None:
    inside = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
    assert not [(line, found[0]) for line, text in read_prose(path) if (found := inside.search(text))]


def test_make_lint_asks_for_it() -> None:
    assert "codespell --toml .vocabulary.toml $(USER_PAGES)" in (ROOT / "Makefile").read_text()
