"""The log of one process: what it has printed, line by line, all of it or the latest."""

from __future__ import annotations

import math
import os
from collections import deque
from itertools import chain
from pathlib import Path

KEPT_BYTES = 1 << 20  # of a log in a job's folder, which lies in memory on many machines


class LogFile:
    """Appends lines to a file.

    Args:
        limit: when the file has so many bytes it becomes `<name>.1`, in place of the one before. So at least that many
            of the latest bytes are kept, and at most twice as many.
    """

    def __init__(self, path: Path, limit: float = math.inf) -> None:
        self._path, self._limit = path, limit
        self._file = path.open("ab")

    def write(self, line: bytes) -> None:
        """Append a line."""
        if self._file.tell() >= self._limit:
            self._file.close()
            os.replace(self._path, _former(self._path))
            self._file = self._path.open("ab")
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_last_lines(path: Path, count: int) -> list[str]:
    """The latest lines of a log."""
    files = [one.open(errors="replace") for one in (_former(path), path) if one.exists()]
    try:
        return [line.rstrip("\n") for line in deque(chain(*files), count)]
    finally:
        for file in files:
            file.close()


def _former(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
