"""The cluster of one host in docs/operate/clusters.md is started, used and ended as the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.blocks import claimed
from tests.docs.sessions import steps
from tests.docs.stage import plain, set_stage

FILE, PROGRAM, SESSION = (block.text for block in claimed(__file__))


@pytest.mark.timeout(180)
def test_the_session_of_one_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab.toml").write_text(FILE)
    with set_stage(tmp_path, {"mean.py": PROGRAM}, monkeypatch) as stage:
        try:
            for command, shown in steps(SESSION):
                said = stage.run(f"COLUMNS=200 {command}").splitlines()
                assert sorted(map(plain, said)) == sorted(map(plain, shown)), command
        finally:
            stage.run("collectived down lab.toml; rmdir $XDG_RUNTIME_DIR/collectived")
