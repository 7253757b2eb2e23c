"""Bytes from pipes become lines, however they are cut."""

from __future__ import annotations

import os
import pty
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectived_launcher.hosts.log_file import LogFile
from collectived_launcher.hosts.output import MAX_LINE, LineSplitter, LogsOnly, Terminal
from collectived_launcher.launch.child import Client, Daemon


def cut(*pieces: bytes) -> list[bytes]:
    lines = LineSplitter()
    return [line for piece in pieces for line in lines.feed(piece)] + lines.flush()


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a", b"b\nc"], [b"ab", b"c"]),
        ([b"\n\n"], [b"", b""]),
        ([b"10%\r20%\r", b"done\n"], [b"10%", b"20%", b"done"]),
        ([b"dos\r", b"\nline\r\n"], [b"dos", b"line"]),
        ([b""], []),
    ],
)
def test_lines_are_found_across_pieces(pieces: list[bytes], expected: list[bytes]) -> None:
    assert cut(*pieces) == expected


def test_a_line_without_end_is_shown_in_pieces_and_not_kept() -> None:
    assert cut(b"x" * (MAX_LINE + 1)) == [b"x" * MAX_LINE, b"x"]


@given(st.lists(st.binary(max_size=8).map(lambda data: data.replace(b"\r", b"."))))
def test_how_the_stream_is_cut_does_not_matter(pieces: list[bytes]) -> None:
    assert cut(*pieces) == cut(b"".join(pieces))


class Shown(Terminal):
    """Keeps what is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[bytes] = []

    def show(self, stream: int, who: str, line: bytes, colour: int | None = None) -> None:
        self.lines.append(line)


def test_what_daemons_tell_does_not_steer_the_terminal_and_ranks_may_colour_theirs() -> None:
    shown = Shown()
    Daemon("worker 0", shown, None).on_output(2, "group \x1b[31m\x9b2Jx".encode())
    Client(0, shown, None).on_output(1, b"\x1b[31mred")
    assert shown.lines == ["group \ufffd[31m\ufffd2Jx".encode(), b"\x1b[31mred"]


def test_a_log_that_cannot_be_written_ends_nothing_and_is_told_once(tmp_path: Path) -> None:
    class Said(Shown):
        def say(self, text: str, stream: int = 2) -> None:
            self.lines.append(text.encode())

    shown, folder = Said(), tmp_path / "job"
    folder.mkdir()
    daemon = Daemon("worker 0", shown, LogFile(folder / "log", limit=4))
    daemon.on_output(2, b"first")
    shutil.rmtree(folder)
    for line in (b"second", b"third"):
        daemon.on_output(2, line)
    daemon.on_exit()
    told = f"collectived: {folder}/log is written no more: No such file or directory".encode()
    assert shown.lines == [b"first", told, b"second", b"third"]


def test_where_nobody_looks_only_our_own_words_are_written(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = LogsOnly()
    Daemon("worker 0", terminal, None).on_output(2, b"a line")
    terminal.say("a word")
    assert capfd.readouterr() == ("", "a word\n")


def test_lines_stand_above_the_bar_of_a_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        terminal = Terminal()
        terminal.draw_progress("starting", 1, 3, "daemons")
        patch.setattr(os, "write", lambda stream_number, data, write=os.write: write(theirs, data))
        terminal.say("collectived: a line")
        terminal.draw_progress("starting", 2, 3, "daemons")
        terminal.erase_progress()
    said = os.read(ours, 1 << 16).decode()
    os.close(ours)
    first, line, second = said.index("1/3"), said.index("collectived: a line"), said.index("2/3")
    assert first < line < second
    assert "\x1b[2K" in said[first:line] and "\x1b[2K" in said[second:], "the bar is erased each time"


def test_elsewhere_there_is_no_bar(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal.draw_progress("starting", 1, 3, "daemons")
    terminal.erase_progress()
    assert capfd.readouterr() == ("", "")
