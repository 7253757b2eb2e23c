"""What docs/operate/status.md, trace.md and watching.md show of a job in which a rank is missing comes out.

The pages do not show the program, which stands here: its lines are those that the pages name.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.docs.blocks import claimed
from tests.docs.sessions import steps
from tests.docs.stage import PATIENCE, Stage, missing, plain, reply, set_stage, until
from tests.forked_launch import start_launcher
from tests.launcher.top.test_top import Terminal

pytestmark = pytest.mark.timeout(150)  # the first one waits for the job
STATUS = claimed(__file__, "docs/operate/status.md")
TRACE = claimed(__file__, "docs/operate/trace.md")
(JSON,) = claimed(__file__, "docs/reference/status.md")
WATCHING = claimed(__file__, "docs/operate/watching.md")
PROGRAM = """\
import time

import numpy as np

import collectived as cd

with cd.connect() as session, session.join() as group:
    gradients = np.ones(1 << 18, np.float32)

    for step in range(300):
        group.all_reduce("mean", gradients)

    if group.rank == 2: time.sleep(3600)
    group.barrier()
"""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Two workers of two ranks each, of which rank 2 does not come to the barrier."""
    folder = tmp_path_factory.mktemp("train")
    command = [sys.executable, "-m", "collectived_launcher", "launch", "--workers", "2", "--clients", "2"]
    with pytest.MonkeyPatch.context() as patch, set_stage(folder, {"train.py": PROGRAM}, patch) as made:
        made.environment["COLUMNS"] = "120"
        with start_launcher([*command, "--", sys.executable, "train.py"], made.environment, folder) as launcher:
            try:
                until(misses_rank_2, "rank 2 was not missing")
                yield made
            finally:
                launcher.terminate()
                launcher.communicate(timeout=PATIENCE)


def misses_rank_2() -> bool:
    seen = reply()
    flights = [flight for group in seen.groups for flight in group.in_flight] if seen else []
    return any(list(flight.missing) == [2] and flight.seconds > 1.2 for flight in flights)


def test_status_says_who_is_missing_first_and_counts_below(stage: Stage) -> None:
    (shown,) = STATUS
    said = stage.run("collectived status")
    assert not missing([without_names(shown.text)], without_names(said)), said


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_the_json_of_status_is_read_by_jq(stage: Stage) -> None:
    ((command, _),) = steps(JSON.text)
    told = json.loads(stage.run(command))
    assert list(told) == ["name", "late"] and told["name"].endswith("/world") and told["late"] == [2]


def test_the_trace_names_the_rank_and_its_slice_is_one_line(stage: Stage) -> None:
    session, event = TRACE
    (launches, _), (traces, shown) = steps(session.text)
    assert launches == "collectived launch --workers 2 --clients 2 -- python train.py &"
    said = stage.run(traces)
    assert not missing(shown, without_names(said)), said
    lines = (stage.folder / "trace.json").read_text().splitlines()
    (found,) = [line for line in lines if '"rank 2 has not arrived"' in line and '"ph":"X"' in line]
    assert same_shape(json.loads(found.rstrip(",")), json.loads(event.text)), found


def same_shape(found: Any, shown: Any) -> bool:
    """The same keys in the same order, and the same words but for what differs from run to run."""
    if isinstance(found, dict) and isinstance(shown, dict):
        return list(found) == list(shown) and all(
            same_shape(found[key], shown[key]) for key in found if key not in ("host", "label")
        )
    if isinstance(found, str):
        return plain(found) == plain(shown)
    return type(found) is type(shown) and (not isinstance(found, list) or found == shown)


def test_top_shows_the_problem_and_the_collective(stage: Stage) -> None:
    command, alerts, in_flight = (block.text for block in WATCHING)
    terminal = Terminal(("/bin/bash", "-c", f"exec {command}"), dict(stage.environment))
    try:
        terminal.resize(120, 30)
        terminal.until("WAITING")
        assert not missing([without_names(alerts)], screen(terminal)), screen(terminal)
        terminal.type("4")
        terminal.until("arriving")
        assert not missing([in_flight], screen(terminal)), screen(terminal)
        terminal.type("q")
        assert terminal.end() == 0
    finally:
        terminal.close()


def screen(terminal: Terminal) -> str:
    return without_names(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.output.decode()))


def without_names(text: str) -> str:
    """Without the job's name, and without the frames below a program that is a fork of the launcher."""
    text = re.sub(r"job [\w-]+", "job J", " ".join(text.split()))
    return re.sub(r" <- forked_launch\.py:\d+ in _live .*?forked_launch\.py:\d+ in __init__", "", text)
