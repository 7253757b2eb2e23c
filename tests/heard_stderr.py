"""Standard error of work that shows how far it is: a pipe or a terminal, read while the work goes on."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator

import pytest

from collectived_proto.report import progress

LINE_SECONDS = 0.01  # between two lines over a pipe, in place of ten seconds
BAR = "━"  # stands for a bar of any length and colour
_PATIENCE = 30.0
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_DRAWN_BAR = re.compile("[━╸╺]+")


class HeardStderr:
    """What has been written so far. A thread reads all of it at once, so that nobody waits who writes."""

    def __init__(self, descriptor: int) -> None:
        self.text = ""
        self._descriptor = descriptor
        self._has_come = threading.Condition()

    def read(self) -> None:
        """Read until nobody can write any more."""
        with contextlib.suppress(OSError):  # EIO: the end of a terminal
            while part := os.read(self._descriptor, 1 << 16):
                with self._has_come:
                    self.text += part.decode(errors="replace")
                    self._has_come.notify_all()

    def hear(self, pattern: str) -> None:
        """Wait until a line has been written, or a bar drawn, that begins like this."""
        wanted = re.compile(pattern)
        with self._has_come:
            has_come = self._has_come.wait_for(lambda: any(map(wanted.match, self.shown())), _PATIENCE)
            assert has_come, f"{pattern!r} did not come; what came ends with {self.shown()[-5:]}"

    def shown(self) -> list[str]:
        """Lines, and bars as often as they were drawn, without colours."""
        return _DRAWN_BAR.sub(BAR, _COLOUR.sub("", self.text)).replace("\r", "\n").splitlines()


@contextlib.contextmanager
def heard_stderr(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> Iterator[HeardStderr]:
    """Have this process write there. Lines come every few milliseconds; a terminal is one of 120 columns."""
    monkeypatch.setattr(progress, "REFRESH_SECONDS", LINE_SECONDS)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    ours, theirs = pty.openpty() if terminal else os.pipe()
    heard = HeardStderr(ours)
    reader = threading.Thread(target=heard.read)
    reader.start()
    try:
        with os.fdopen(theirs, "w", buffering=1) as stream, monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", stream)
            yield heard
    finally:
        reader.join()
        os.close(ours)
