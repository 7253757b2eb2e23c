"""The epoch journal: one line, the epoch of the last coordinator that used this file.

An *epoch* is milliseconds since 1970 at start, and never at or below one that was in the journal before: a clock that
was set back gives no old keys again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def next_epoch(journal: Path | None) -> int:
    """A new epoch, written to the journal before it is used.

    Raises:
        ValueError: the journal holds something else than one number.
        OSError: it cannot be read or written.
    """
    epoch = time.time_ns() // 1_000_000
    if journal is None:
        return epoch
    try:
        text = journal.read_text()
    except FileNotFoundError:
        text = "0"
    try:
        epoch = max(epoch, int(text) + 1)
    except ValueError:
        raise ValueError(
            f"{journal} holds {text[:40]!r}, expected one number, the last epoch: remove the file if no coordinator "
            "of this job has run in the future"
        ) from None
    replace(journal, f"{epoch}\n")
    return epoch


def replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all, and onto the disk."""
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
