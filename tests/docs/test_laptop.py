"""docs/start/laptop.md shows what comes out: its program hangs, differs, and the lines of the page are said."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.blocks import claimed
from tests.docs.stage import Stage, missing, reply, set_stage, until

TEXT = (Path(__file__).parents[2] / "docs" / "start" / "laptop.md").read_text()
VENV, PROGRAM, STATUS, ERROR, SUMMARY, DIFFERENCE = (block.text for block in claimed(__file__))
COMMAND = "collectived launch --workers 2 --clients 2 -- python train.py"


def test_the_environment_is_made_and_used(tmp_path: Path) -> None:
    line = VENV.strip().replace(" venv venv ", " venv --without-pip venv ")  # pip takes two seconds
    done = subprocess.run(
        ["bash", "-c", f"{line} && command -v python"], cwd=tmp_path, text=True, capture_output=True, timeout=30
    )
    assert (done.stdout, done.stderr) == (f"{tmp_path}/venv/bin/python\n", "")


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with set_stage(tmp_path, {"train.py": PROGRAM}, monkeypatch) as made:
        yield made


def hangs() -> bool:
    seen = reply()
    flights = [flight for group in seen.groups for flight in group.in_flight] if seen else []
    return any(list(flight.missing) == [3] and flight.seconds > 1.2 for flight in flights)


@pytest.mark.timeout(180)
def test_the_missing_rank_is_named_by_status_by_the_error_and_by_the_launcher(stage: Stage) -> None:
    assert f"`{COMMAND} hang`" in " ".join(TEXT.split())
    stage.start(f"{COMMAND} hang")
    until(hangs, "no rank was missing")
    command, *shown = STATUS.splitlines()
    said = stage.run(command.removeprefix("$ "))
    assert not missing(shown, said), said
    until(stage.has_ended, "it did not end")
    first, *rest = SUMMARY.splitlines()
    assert not missing([*ERROR.splitlines(), *rest], stage.said()), stage.said()
    assert first.startswith("collectived: rank ") and re.search(r"rank [012] \(pid \d+\) failed: exit", stage.said())


@pytest.mark.timeout(180)
def test_the_rank_that_differs_is_named_at_once(stage: Stage) -> None:
    said = stage.run(f"{COMMAND} differ")
    assert not missing(DIFFERENCE.splitlines(), said), said
