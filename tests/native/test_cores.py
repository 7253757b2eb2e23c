"""On how many cores a process runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from collectived_native import cores


def test_the_quota_of_a_cgroup_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_own_cgroups", lambda: [f"{tmp_path}/inner", str(tmp_path)])
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cores.count_cores() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores.count_cores() == len(os.sched_getaffinity(0))
