"""Files that hold a secret: read, and refused where everybody on the host could read them as well."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class PrivateFileError(ValueError):
    """Why such a file is of no use; the text goes on from the file's name."""


class ExposedFileError(PrivateFileError):
    """It holds what may be the secret, and anybody can read it: a reason to say so even where it is not needed."""


def read_private(path: Path) -> str:
    """What it holds.

    Raises:
        PrivateFileError: it cannot be read; ExposedFileError: by this user, and by anybody.
    """
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode  # of what is read, whatever the name stands for a moment later
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise PrivateFileError(f"cannot be read: {why}") from None
    if mode & stat.S_IRWXO:
        raise ExposedFileError(
            f"has mode {stat.S_IMODE(mode):04o}, by which everybody on this host gets at it: chmod 600 {path} (or 640, "
            "for a group that may know it)"
        )
    return text
