"""Where running jobs are found."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from collectived_proto.ipc import job_files
from collectived_proto.ipc.job_files import JobFile


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "collectived"


def job(name: str, pid: int = 0) -> JobFile:
    return JobFile(name, pid or os.getpid(), "unix:/c.sock", ("unix:/w.sock",), "python train.py")


def test_a_published_job_is_found_and_private(folder: Path) -> None:
    path = job_files.write_job_file(job("mine"))
    assert job_files.list_running_jobs() == [job("mine")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [entry.name for entry in folder.iterdir()] == ["mine.json"]


def test_the_systems_worker_is_a_socket_in_the_systems_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_files, "SYSTEM_FOLDER", tmp_path)
    assert job_files.find_system_worker() is None
    path = tmp_path / "worker.sock"
    path.write_text("no socket")
    assert job_files.find_system_worker() is None
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        assert job_files.find_system_worker() == f"unix:{path}"


def test_a_system_folder_that_is_closed_to_this_user_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", closed)
    assert job_files.find_system_worker() == "unix:/run/collectived/worker.sock"


def test_a_job_whose_launcher_is_dead_is_passed_over() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    job_files.write_job_file(job("dead", dead.pid))
    assert job_files.list_running_jobs() == []


def test_a_job_with_a_file_for_each_of_its_hosts_is_listed_once() -> None:
    for host in range(2):
        found = replace(job("two"), workers=(f"unix:/{host}.sock",), away=(f"worker {host + 2} (restarting)",))
        job_files.write_job_file(found, f"two.{host}")
    (listed,) = job_files.list_running_jobs()
    assert listed.workers == ("unix:/0.sock", "unix:/1.sock")
    assert listed.away == ("worker 2 (restarting)", "worker 3 (restarting)")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job": 1}', '{"job": "a", "pid": "x"}'])
def test_a_damaged_file_is_passed_over(folder: Path, text: str) -> None:
    job_files.write_job_file(job("good"))
    (folder / "bad.json").write_text(text)
    assert [found.job for found in job_files.list_running_jobs()] == ["good"]


def test_a_folder_that_others_may_enter_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="0700.*0755"):
        job_files.ensure_runtime_folder()


def test_a_socket_path_that_is_too_long_says_how_long_it_may_be() -> None:
    assert job_files.check_socket_path("/tmp/short") == "/tmp/short"
    with pytest.raises(ValueError, match="107"):
        job_files.check_socket_path("/tmp/" + "x" * 110)
