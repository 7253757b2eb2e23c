"""Where running jobs are found."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from collectived_proto.local import jobs
from collectived_proto.local.jobs import JobFile


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "collectived"


def job(name: str, pid: int = 0) -> JobFile:
    return JobFile(name, pid or os.getpid(), "unix:/c.sock", ("unix:/w.sock",), "python train.py")


def test_a_published_job_is_found_and_private(folder: Path) -> None:
    path = jobs.publish(job("mine"))
    assert jobs.running() == [job("mine")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [entry.name for entry in folder.iterdir()] == ["mine.json"]


def test_a_job_whose_launcher_is_dead_is_passed_over() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    jobs.publish(job("dead", dead.pid))
    assert jobs.running() == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job": 1}', '{"job": "a", "pid": "x"}'])
def test_a_damaged_file_is_passed_over(folder: Path, text: str) -> None:
    jobs.publish(job("good"))
    (folder / "bad.json").write_text(text)
    assert [found.job for found in jobs.running()] == ["good"]


def test_a_folder_that_others_may_enter_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="0700.*0755"):
        jobs.runtime_folder()


def test_a_socket_path_that_is_too_long_says_how_long_it_may_be() -> None:
    assert jobs.check_socket_path("/tmp/short") == "/tmp/short"
    with pytest.raises(ValueError, match="107"):
        jobs.check_socket_path("/tmp/" + "x" * 110)
