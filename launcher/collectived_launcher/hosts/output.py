"""The output of processes: bytes from their pipes, cut into lines, each with the name of its process."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Callable
from typing import IO

from collectived_proto.report.progress import Progress

MAX_LINE = 1 << 16  # a longer line is shown in pieces
_CHUNK = 1 << 16
_MAX_PIPE_SIZE = 1 << 20  # bytes; Linux lets users have no larger ones
_PIPE_BUF = 4096  # bytes that a pipe takes without a wait, if it takes any
_LINE_END = re.compile(rb"\r\n|\n|\r(?!$)")  # a \r at the very end may be half of \r\n: wait for more
_COLOURS = (36, 33, 35, 32, 34, 31)


class LineSplitter:
    """Cuts a stream of bytes into lines without their ends. Progress bars end theirs with a bare carriage return."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = _LINE_END.split(self._rest + data)
        while len(self._rest) > MAX_LINE:
            lines.append(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]
        return lines

    def flush(self) -> list[bytes]:
        """Return the rest, which has no end of line."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [rest] if rest else []


class PipeReader:
    """The readable end of a process' output; hands each line to `hear`."""

    def __init__(self, file: IO[bytes], hear: Callable[[bytes], None]) -> None:
        self._file = file
        self.descriptor = file.fileno()
        os.set_blocking(self.descriptor, False)
        self.is_open = True
        self._lines = LineSplitter()
        self._on_line = hear

    def read(self) -> None:
        """One read's worth; closes at the end of the stream."""
        try:
            data = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return
        for line in self._lines.feed(data):
            self._on_line(line)
        if not data:
            self.close()

    def read_remaining(self) -> None:
        """Read all that is there now, then close: the processes that should write have ended.

        Bounded, for a process that has left the process group may still hold the other end.
        """
        for _ in range(_MAX_PIPE_SIZE // _CHUNK):
            try:
                data = os.read(self.descriptor, _CHUNK)
            except BlockingIOError:
                data = b""
            for line in self._lines.feed(data):
                self._on_line(line)
            if not data:
                break
        self.close()

    def close(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        for line in self._lines.flush():
            self._on_line(line)
        self._file.close()


class Terminal:
    """The launcher's own standard output and error, written line by line."""

    def __init__(self) -> None:
        self.is_broken = False  # its reader is gone
        self.blocked_callback: Callable[[], None] | None = None  # called every second while its reader does not read
        self._coloured = {1: sys.stdout.isatty(), 2: sys.stderr.isatty()}
        self._bar: Progress | None = None

    def show(self, stream: int, who: str, line: bytes, colour: int | None = None) -> None:
        """Writes `[who] line` to stream 1 or 2; `colour` is a small number, the same for all lines of one rank."""
        prefix = f"[{who}]"
        if colour is not None and self._coloured[stream]:
            prefix = f"\x1b[{_COLOURS[colour % len(_COLOURS)]}m{prefix}\x1b[0m"
        self._write(stream, prefix.encode() + b" " + line + b"\n")

    def say(self, text: str, stream: int = 2) -> None:
        """The launcher's own words."""
        self._write(stream, text.encode(errors="replace") + b"\n")

    def draw_progress(self, what: str, done: int, total: int, noun: str) -> None:
        """Show on standard error, if that is a terminal, how far a long wait is: a bar below all lines."""
        if not self._coloured[2] or self.is_broken:
            return
        try:
            if self._bar is None:
                self._bar = Progress("collectived", what, total, noun, is_watched=False).__enter__()
            self._bar.update(what, done, total)
        except OSError:  # the next line finds out what has become of the terminal
            self._bar = None

    def erase_progress(self) -> None:
        """The wait is over."""
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None

    def _write(self, stream: int, data: bytes) -> None:
        if self.is_broken:
            return
        if self._bar is not None:
            self._bar.hide()
        while data:
            try:
                if self.blocked_callback is not None:
                    self._wait(stream, self.blocked_callback)
                data = data[os.write(stream, data[:_PIPE_BUF]) :]
            except BlockingIOError:  # another program made the terminal non-blocking
                select.select([], [stream], [])
            except OSError:
                self.is_broken = True
                return

    def _wait(self, stream: int, call: Callable[[], None]) -> None:
        """Until the stream takes something."""
        while not select.select([], [stream], [], 1.0)[1]:
            call()


class LogsOnly(Terminal):
    """A terminal without a reader: output of processes goes to their logs alone. The launcher's lines are written."""

    def show(self, stream: int, who: str, line: bytes, colour: int | None = None) -> None:
        return
