"""The session of docs/operate/operations.md is what happens where a rank does not come, and its worker is drained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.docs.blocks import claimed
from tests.docs.sessions import differs, steps
from tests.docs.stage import PATIENCE, reply, set_stage, until
from tests.forked_launch import start_launcher

(SESSION,) = (block.text for block in claimed(__file__))
PROGRAM = """\
import time

import collectived as cd

with cd.connect() as session, session.join() as group:
    for step in range(4):
        if group.rank == 1 and step == 3:
            time.sleep(3600)

        group.all_reduce("mean", 1.0)
"""


def misses_rank_1() -> bool:
    seen = reply()
    return seen is not None and any(list(one.missing) == [1] for group in seen.groups for one in group.in_flight)


@pytest.mark.timeout(120)
def test_what_is_cut_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (drains, shown), (asks, status) = steps(SESSION)
    command = [sys.executable, "-m", "collectived_launcher", "launch", "--clients", "2", "--", sys.executable]
    with (
        set_stage(tmp_path, {"late.py": PROGRAM}, monkeypatch) as stage,
        start_launcher([*command, "late.py"], stage.environment, tmp_path) as launcher,
    ):
        try:
            until(misses_rank_1, "rank 1 was not missing")
            said = stage.run(f"COLUMNS=200 {drains}; {asks}").splitlines()
        finally:
            launcher.terminate()
            launcher.communicate(timeout=PATIENCE)
    assert not differs([*shown, *status], said), said
