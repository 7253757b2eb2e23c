"""Logs of processes, whole or only their latest lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from collectived_launcher.hosts.log_file import LogFile, read_last_lines


def test_a_log_has_all_lines(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    path.write_text("before\n")
    log = LogFile(path)
    for number in range(1000):
        log.write(b"%d" % number)
    log.close()
    assert path.read_text().splitlines() == ["before", *map(str, range(1000))]
    assert read_last_lines(path, 2) == ["998", "999"]
    assert read_last_lines(path, 5000)[0] == "before"


def test_a_log_with_a_limit_keeps_at_least_that_many_of_the_latest_bytes(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    log = LogFile(path, limit=1000)
    written = 0
    for number in range(2000):
        log.write(b"line %04d" % number)
        written += 10
        kept = sum(file.stat().st_size for file in tmp_path.iterdir())
        assert min(written, 1000) <= kept <= 2020
    log.close()
    last = read_last_lines(path, 100)
    assert last == [f"line {number:04d}" for number in range(1900, 2000)]


def test_a_log_that_becomes_the_former_one_while_it_is_read_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    log = LogFile(path, limit=5)
    log.write(b"first")
    opened = Path.open

    def open_and_rotate(self: Path, *words: Any, **options: Any) -> Any:
        file = opened(self, *words, **options)
        if self == path and not words:  # somebody reads it
            log.write(b"second")
        return file

    monkeypatch.setattr(Path, "open", open_and_rotate)
    assert read_last_lines(path, 9) == ["first"]
    log.close()


def test_what_is_no_utf_8_is_read_nevertheless(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    log.write(b"\xff\xfe")
    log.close()
    assert read_last_lines(tmp_path / "log", 1) == ["\ufffd\ufffd"]
    assert read_last_lines(tmp_path / "nowhere", 1) == []
