"""The report about GPUs: every step is run, ends in time, and leaves what it said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks import gpu_report
from benchmarks.gpu_report import Step
from tests.waiting import settle


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_step_that_fails_does_not_keep_the_next_from_being_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {
        "bad": Step("ends badly", ("-c", "print('one'); raise SystemExit(3)")),
        "good": Step("ends well", ("-c", "print('two')")),
    }
    monkeypatch.setattr(gpu_report, "STEPS", steps)
    assert gpu_report.main([str(tmp_path)]) == 1
    assert (tmp_path / "bad.txt").read_text() == "one\n" and (tmp_path / "good.txt").read_text() == "two\n"
    told = (tmp_path / "summary.txt").read_text()
    assert told.startswith("bad (ends badly): failed with status 3 after ") and "\ngood (ends well): passed" in told
    assert capsys.readouterr().out == told
    assert gpu_report.main([str(tmp_path), "good"]) == 0


def test_a_step_is_broken_off_at_its_limit_with_all_that_it_has_started(tmp_path: Path) -> None:
    program = (
        "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); __import__('time').sleep(600)"
    )
    assert gpu_report.run(("-c", program), tmp_path / "long.txt", 2.0) == gpu_report.TIMED_OUT
    child = int((tmp_path / "long.txt").read_text())
    settle(lambda: not is_running(child))


def test_an_unknown_step_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_report.main([str(tmp_path / "none"), "nonsense"])
    assert f"unknown step 'nonsense': expected one of {', '.join(gpu_report.STEPS)}" in capsys.readouterr().err
    assert not os.path.exists(tmp_path / "none")
