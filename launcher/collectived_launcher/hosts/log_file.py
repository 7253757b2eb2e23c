"""The log of one process: what it has printed, line by line, all of it or the latest."""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from itertools import chain
from pathlib import Path
from typing import IO

KEPT_BYTES = 1 << 20  # of a log in a job's folder, which lies in memory on many machines


class LogFile:
    """Appends lines to a file.

    Args:
        limit: when the file has so many bytes it becomes `<name>.1`, in place of the one before. So at least that many
            of the latest bytes are kept, and at most twice as many.

    Attributes:
        path: of the file.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, limit: float = math.inf) -> None:
        self.path, self._limit = path, limit
        self._file = path.open("ab", buffering=0)

    def write(self, line: bytes) -> None:
        """Append a line.

        Raises:
            OSError: the disk is full, or the file's folder is gone.
        """
        if self._file.tell() >= self._limit:
            os.replace(self.path, _former(self.path))
            self._file.close()
            self._file = self.path.open("ab", buffering=0)
        self._file.write(line + b"\n")

    def close(self) -> None:
        self._file.close()


def read_last_lines(path: Path, count: int) -> list[str]:
    """The latest lines of a log; none where there is no file."""
    with contextlib.ExitStack() as opened:
        files: list[IO[str]] = []
        for one in (path, _former(path)):  # in this order, for the one may become the other meanwhile
            with contextlib.suppress(FileNotFoundError):
                files.insert(0, opened.enter_context(one.open(errors="replace")))
        if len({os.fstat(file.fileno()).st_ino for file in files}) < len(files):
            files.pop()
        return [line.rstrip("\n") for line in deque(chain(*files), count)]


def _former(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
