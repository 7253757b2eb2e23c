"""What pages say about variables of the environment, derived from the code that reads them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs import environment_page
from tests.docs.contents import ROOT
from tests.docs.environment_page import NAME, Variable, list_read_variables, list_set_variables

from collectived.connection import launch_env
from collectived.connection.launch_env import read_launch_env

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in PAGES if page.name not in ("CHANGELOG.md", "CONTRIBUTING.md")]
DENIALS = re.compile(r"\b(?:not|never)\b(?: yet)? (?:read|used|understood|looked at)\b|\bfor now\b|\bno longer read\b")


REFUSED = {"COLLECTIVED_COORDINATOR_PORT"}  # which Kubernetes makes of a service's name
READ, SET = list_read_variables(), list_set_variables()


def sentences(page: Path) -> Iterator[str]:
    """Sentences and rows of tables, without code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?=[|#*-])", text):
        line = " ".join(paragraph.split())
        yield from [line] if line.startswith("|") else re.split(r"(?<=[.:;])\s", line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_denies_a_variable_that_is_read(page: Path) -> None:
    wrong = [
        sentence
        for sentence in sentences(page)
        if DENIALS.search(sentence) and {*re.findall(rf"`({NAME})`", sentence)} & READ
    ]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_variable_of_ours_that_a_page_names_is_read_or_set(page: Path) -> None:
    named = set(re.findall(r"\bCOLLECTIVED_[A-Z0-9_]*[A-Z0-9]\b", page.read_text()))
    assert not {name for name in named if not any(known.startswith(name) for known in {*READ, *SET, *REFUSED})}


def test_each_variable_has_one_row_of_a_table() -> None:
    page = (ROOT / "docs/reference/environment.md").read_text()
    for section in page.split("\n## "):
        first_cells = re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)
        counts = Counter(name for cell in first_cells for name in re.findall(rf"`({NAME})`", cell))
        assert not [name for name, count in counts.items() if count > 1], section.partition("\n")[0]


def test_the_page_for_mpi_names_the_variables_by_which_mpi_launchers_are_understood() -> None:
    page = (ROOT / "docs/guide/from-mpi.md").read_text()
    for rank, size in (*launch_env._MPI, launch_env._SLURM):
        assert read_launch_env({rank: "1", size: "4"}).rank == 1
        assert f"`{rank}`" in page and f"`{size}`" in page


def test_the_page_for_tensorflow_says_that_tf_config_is_read() -> None:
    said = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    assert read_launch_env({"TF_CONFIG": said}).rank == 1
    assert "`TF_CONFIG` is read" in (ROOT / "docs/guide/from-tensorflow.md").read_text()


def test_the_tables_are_what_the_code_has() -> None:
    page = environment_page.PAGE.read_text()
    assert page.count("<!-- made:") == 2
    assert environment_page.fresh(page) == page, "run `make docs` and commit the result"


def test_a_variable_without_a_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = environment_page.PAGE.read_text()
    monkeypatch.setattr(environment_page, "READ", environment_page.READ[1:])
    with pytest.raises(ValueError, match="COLLECTIVED_WORKER$"):
        environment_page.fresh(page)
    monkeypatch.undo()
    monkeypatch.setattr(environment_page, "READ", [*environment_page.READ, Variable(("COLOUR",), "", "")])
    with pytest.raises(ValueError, match="nothing reads COLOUR"):
        environment_page.fresh(page)
    monkeypatch.undo()
    monkeypatch.setattr(environment_page, "SET", environment_page.SET[1:])
    with pytest.raises(ValueError, match="COLLECTIVED_WORKER"):
        environment_page.fresh(page)
