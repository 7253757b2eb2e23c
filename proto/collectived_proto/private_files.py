"""Files of one user: read, unless every user could read a secret in them; written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class PrivateFileError(ValueError):
    """Why such a file is of no use; the text goes on from the file's name."""


class ExposedFileError(PrivateFileError):
    """A file that may hold the secret, and that every user can read. That is worth a warning, needed or not."""


def read_private(path: Path) -> str:
    """Read a text file that only its owner, and perhaps its group, may read.

    Raises:
        PrivateFileError: it cannot be read; ExposedFileError: every user can read it.
    """
    data, mode = _read_regular(path)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise PrivateFileError("cannot be read: it is no text") from None
    if mode & stat.S_IRWXO:
        raise ExposedFileError(
            f"has mode {stat.S_IMODE(mode):04o}, by which all users of the host can read it: chmod 600 {path} (or 640, "
            "for a group that may know it)"
        )
    return text


def read_public(path: Path) -> bytes:
    """Read a file that every user may read, such as a certificate.

    Raises:
        PrivateFileError: it cannot be read.
    """
    return _read_regular(path)[0]


def _read_regular(path: Path) -> tuple[bytes, int]:
    """Return the content and mode of a file. Both are of the same file, even if the name is replaced meanwhile."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise PrivateFileError("is no regular file: a pipe or a device could keep its reader waiting")
            return file.read(), mode
    except OSError as error:
        raise PrivateFileError(f"cannot be read: {error.strerror}") from None


def read_credential(path: Path, needed: bool = True) -> str:
    """Return the secret or token that a file holds: one line of printable ASCII.

    Args:
        needed: False at a Unix socket, where most need none: a file that cannot be read gives ''.

    Raises:
        PrivateFileError: it cannot be read and is needed, every user can read it, or it holds no such line.
    """
    try:
        text = read_private(path).strip()
    except PrivateFileError as error:
        if needed or isinstance(error, ExposedFileError):
            raise
        return ""
    if not text or not text.isascii() or not text.isprintable():
        raise PrivateFileError("holds no secret or token: expected one line of printable ASCII")
    return text


def write_atomically(path: Path, content: str | bytes, mode: int = 0o600, sync: bool = False) -> None:
    """Write a file whole or not at all, and never readable for more than `mode` says, not for a moment.

    Args:
        sync: whether it is to be on the disk before it takes the place of another.

    Raises:
        OSError: it cannot be written.
    """
    draft = draft_path(path)
    draft.unlink(missing_ok=True)  # of a writer that was killed: two at once must lock
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def draft_path(path: Path) -> Path:
    """Return where a file lies until it is whole: what a writer leaves that is killed."""
    return path.with_name(f"{path.name}.new")


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the writer of a pipe, and without making a terminal the controlling one."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
