"""Who waits long is told that it goes on: while daemons come up, and while something is measured."""

from __future__ import annotations

import json
import re
import time
from functools import partial

import pytest

from collectived_launcher.bench import screen
from collectived_launcher.bench.record import Record
from collectived_launcher.hosts.loop import Loop, run_until_with_progress
from collectived_proto.report import progress

PATIENCE = 20.0


def nothing() -> None:
    """Draws no bar."""


def test_a_wait_says_how_long_it_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectived_launcher.hosts.loop.PROGRESS_INTERVAL", 0.02)
    said: list[str] = []
    with Loop() as loop:
        assert run_until_with_progress(loop, lambda: len(said) == 3, PATIENCE, said.append, nothing)
    assert len(said) == 3 and all(re.fullmatch(r"\d+ of 20 s", line) for line in said)


def test_a_long_wait_is_drawn_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectived_launcher.hosts.loop.DRAW_INTERVAL", 0.01)
    said: list[str] = []
    drawn: list[None] = []
    with Loop() as loop:
        draw = partial(drawn.append, None)
        assert run_until_with_progress(loop, lambda: len(drawn) == 3, PATIENCE, said.append, draw)
    assert said == []


def test_a_wait_that_is_over_in_time_says_nothing() -> None:
    said: list[str] = []
    with Loop() as loop:
        assert run_until_with_progress(loop, lambda: True, PATIENCE, said.append, nothing)
        assert not run_until_with_progress(loop, lambda: False, 0.01, said.append, nothing)
    assert said == []


def test_a_signal_ends_a_wait() -> None:
    with Loop() as loop:
        loop.signals.append(15)
        assert not run_until_with_progress(loop, lambda: False, PATIENCE, lambda passed: None, nothing)


def test_bench_says_over_a_pipe_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.02)
    said = ""
    with screen.Screen() as shown:
        shown.show(1, "rank 0", b"not measured yet")
        assert "so far" not in capfd.readouterr().err
        begin = {"event": "begin", "conditions": {"operation": "all_reduce"}, "sizes": [1 << 20, 2 << 20]}
        for told in (begin, {"event": "size", "size_bytes": 1 << 20, "iterations": 130}):
            shown.show(1, "rank 0", json.dumps(told).encode())
        deadline = time.monotonic() + PATIENCE
        while "1 MiB × 130" not in said and time.monotonic() < deadline:
            said += capfd.readouterr().err
            time.sleep(0.01)
    assert re.search(r"collectived bench: all_reduce 1 MiB × 130, 0 of 2 sizes done, \d+ s so far\n", said)


def test_how_far_bench_is() -> None:
    record = Record()
    assert screen.describe_current(record) == "starting"
