"""How far long work is: a line every ten seconds, or a bar on a terminal."""

from __future__ import annotations

import os
import pty
import re
import sys
import threading
from typing import IO

import pytest
from tests.waiting import settle

from collectived_proto.report import progress
from collectived_proto.report.progress import Progress


def test_work_that_is_over_soon_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress("collectived doctor", "asking hosts", 2, "hosts") as shown:
        shown.advance("a")
    assert capfd.readouterr().err == ""


def test_over_a_pipe_a_line_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.02)
    said: list[str] = []

    def hear(pattern: str) -> None:
        def heard() -> bool:
            said.append(capfd.readouterr().err)
            return re.search(pattern, "".join(said)) is not None

        settle(heard)

    with Progress("collectived doctor", "asking hosts", 3, "hosts") as shown:
        hear(r"collectived doctor: asking hosts, 0 of 3 hosts done, \d+ s so far\n")
        shown.advance("a")
        hear("1 of 3 hosts done")
        shown.update("measuring", 2, 5)
        hear("measuring, 2 of 5 hosts done")
        shown.say("a word between")
        hear("a word between\n")
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_where_no_total_is_known_only_the_time_is_said() -> None:
    assert Progress("collectived trace", "asking workers").describe() == "asking workers"


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    terminal: IO[str] = os.fdopen(theirs, "w")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("collectived doctor", "asking hosts", 2, "hosts") as shown:
        assert shown.has_bar
        shown.advance("host a")
        shown.say("a word between")
    assert not shown.has_bar
    terminal.flush()
    drawn = ""
    while not all(word in drawn for word in ("asking hosts", "1/2", "host a", "a word between")):
        drawn += os.read(ours, 1 << 16).decode(errors="replace")  # it comes in pieces; a word that never does: timeout
    terminal.close()
    os.close(ours)
