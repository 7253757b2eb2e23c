"""`collectived config`: what a daemon would be told, and where each value comes from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from collectived_launcher.__main__ import run
from collectived_proto.config.daemons import DAEMONS
from collectived_proto.config.resolve import resolve_values
from collectived_proto.config.sources import load_config_file

SECRET = "s3cret-of-these-tests"
TEXT = 'job = "train"\n[worker]\nmemory_limit = "8GiB"\n[coordinator]\nlisten = ["unix:/c", "head:7450"]\n'


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("COLLECTIVED_SECRET", "COLLECTIVED_COORDINATOR", "COLLECTIVED_JOB"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "c.toml"
    path.write_text(TEXT)
    monkeypatch.setenv("COLLECTIVED_CONFIG", str(path))
    return path


def test_the_table(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLLECTIVED_SECRET", SECRET)
    monkeypatch.setenv("COLLECTIVED_WORKER_TASK", "3")
    assert run(["config", "worker", "--drain-seconds", "250ms"]) == 0
    out = capsys.readouterr().out
    first, _, *rows = out.splitlines()
    assert first == f"file: {file}"
    found = {row.split()[0]: row.split()[1:] for row in rows}
    assert found["worker.memory_limit"] == ["8GiB", f"{file}:3"]
    assert found["worker.task"] == ["3", "COLLECTIVED_WORKER_TASK"]
    assert found["worker.drain_seconds"] == ["250ms", "--drain-seconds"]
    assert found["worker.folder"] == ["needed"]
    assert found["worker.secret"] == ["set,", "not", "shown", "COLLECTIVED_SECRET"]
    assert SECRET not in out and "coordinator.listen" not in out


def test_json(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLLECTIVED_SECRET", SECRET)
    assert run(["config", "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert found["file"] == str(file) and SECRET not in out
    assert found["worker"]["memory_limit"] == {"value": 8 << 30, "from": f"{file}:3"}
    assert found["coordinator"]["listen"] == {"value": ["unix:/c", "head:7450"], "from": f"{file}:5"}
    assert found["worker"]["folder"] == {"value": None, "from": "needed"}


def test_toml_says_the_same_when_it_is_read_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLLECTIVED_SECRET", SECRET)
    assert run(["config", "--toml"]) == 0
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out)
    assert SECRET not in again.read_text()
    for settings in DAEMONS.values():
        assert (
            resolve_values(settings, {}, {}, load_config_file(again)).values
            == resolve_values(settings, {}, {}, load_config_file(file)).values
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["worker", "--memory-limt", "3"], "did you mean '--memory-limit'?"),
        (["worker", "--memory-limit", "3MB"], "worker.memory_limit, from --memory-limit: '3MB' is not"),
        (["--config", "/nowhere.toml"], "/nowhere.toml cannot be read"),
        (["wurker"], "wurker"),
        (["--json", "--toml"], "exclude each other"),
    ],
)
def test_what_is_wrong_is_said(
    file: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert run(["config", *arguments]) == 2
    except SystemExit as end:
        assert end.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_a_home_that_is_somebody_elses_is_passed_over(tmp_path: Path) -> None:
    program = (
        "import os, sys; from collectived_proto.config.sources import find_config_file; os.setuid(65534); "
        "print(find_config_file(None, {'HOME': sys.argv[1]}))"
    )
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    done = subprocess.run([sys.executable, "-c", program, str(home)], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")
