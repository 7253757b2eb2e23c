"""`examples/tutorial.ipynb` runs, and prints what is stored in it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from tests.docs.contents import ROOT
from tests.docs.tutorial import NOTEBOOK

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


def read_outputs(path: Path) -> dict[str, str]:
    """What each cell of code prints, by the cell's identifier."""
    notebook: Any = nbformat.read(path, as_version=4)
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.id: "".join(output.text for output in cell.outputs) for cell in codes}


def without_chance(text: str) -> str:
    """Without times, process numbers, line breaks, and the frames of Python's own library."""
    text = " ".join(text.split())
    text = re.sub(r"(now: |<- )thread(ing)?\.py:\d+ in \w+( <- )?", r"\1", text)
    return re.sub(r"\d+(\.\d+)?", "N", text)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    target = tmp_path_factory.mktemp("notebook") / "tutorial.ipynb"
    ran = subprocess.run(
        [sys.executable, "-m", "tests.docs.tutorial", str(target)], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return read_outputs(target)


def test_every_cell_prints_what_is_stored_in_the_notebook(outputs: dict[str, str]) -> None:
    stored = read_outputs(NOTEBOOK)
    assert {name: without_chance(text) for name, text in outputs.items()} == {
        name: without_chance(text) for name, text in stored.items()
    }


def test_status_and_error_name_the_stuck_rank_and_the_line_at_which_it_is(outputs: dict[str, str]) -> None:
    for name in ("missing", "error"):
        assert re.search(r"rank 3 \(host.*in load_batch", outputs[name], re.DOTALL), outputs[name]


def test_all_ranks_end_together_with_the_same_weights(outputs: dict[str, str]) -> None:
    assert "ended at step {400}\nsame bits on all ranks: True" in outputs["rejoin"]
    assert "rank 3 of 4 goes on from step 1" in outputs["rejoin"]


def test_the_trace_shows_who_was_missing(outputs: dict[str, str]) -> None:
    assert "ABSENT" in outputs["trace"] and "rank 3 had not arrived" in outputs["events"]
