"""What pages say about variables of the environment, derived from the code that reads them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.contents import ROOT

from collectived.connection import launch_env
from collectived.connection.failure_file import VARIABLE
from collectived.connection.launch_env import read_launch_env
from collectived_launcher.launch.job import Addresses, client_environment, make_local_job
from collectived_proto.config.daemons import DAEMONS
from collectived_proto.config.settings import list_settings

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in PAGES if page.name not in ("CHANGELOG.md", "CONTRIBUTING.md")]
SOURCES = [
    path for part in ("proto", "client", "runtime", "launcher", "native") for path in (ROOT / part).rglob("*.py")
]
NAME = r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*"
DENIALS = re.compile(r"\b(?:not|never)\b(?: yet)? (?:read|used|understood|looked at)\b|\bfor now\b|\bno longer read\b")


def list_read_variables() -> set[str]:
    """Every name that the code looks up in an environment, or makes of a setting."""
    quoted = {name for path in SOURCES for name in re.findall(rf'"({NAME})"', path.read_text())}
    launchers = {name for pair in (*launch_env._MPI, launch_env._SLURM) for name in pair}
    settings = {setting.variable for kind in DAEMONS.values() for setting in list_settings(kind)}
    found = {name for name in quoted if name.startswith(("COLLECTIVED_", "SLURM_", "XDG_", "OTEL_"))}
    return {*found, *launchers, *launch_env._JOBS, *settings, "RANK", "WORLD_SIZE", "TF_CONFIG"}


REFUSED = {"COLLECTIVED_COORDINATOR_PORT"}  # which Kubernetes makes of a service's name
READ = list_read_variables()
SET = {*client_environment(make_local_job("j", 1, 1, ("true",), 1.0), Addresses("c", ("w",), 1), 0, 0), VARIABLE}


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


def test_the_table_of_what_launch_sets_is_what_it_sets() -> None:
    page = (ROOT / "docs/reference/environment.md").read_text()
    section = page[page.index("## Set by `collectived launch`") :]
    cells = re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(rf"`({NAME})`", cell)} == SET
