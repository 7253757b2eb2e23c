"""Folders of sockets: whom a folder lets in, its sockets let in too."""

from __future__ import annotations

import contextlib
import os
import stat


def shared_with_group(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder of sockets is open to a group and to nobody else, as 0750 says it."""
    return stat.S_IMODE(os.stat(folder).st_mode) & 0o011 == 0o010


def open_to_folder(path: str, names_guests: bool = False) -> None:
    """Lets those knock at a socket whom its folder lets in: the group with which that is shared, else its owner alone.
    Where guests are named one by one, everybody whom the folder lets in may, and is asked who they are.

    The umask says nothing: it is the container's, or systemd's, and nobody thinks of it.
    """
    folder = os.path.dirname(path) or "."
    if names_guests:
        os.chmod(path, 0o666)
    elif shared_with_group(folder):
        with contextlib.suppress(PermissionError):  # a group of which we are no member, that somebody else gave it
            os.chown(path, -1, os.stat(folder).st_gid)
        os.chmod(path, 0o660)
    else:
        os.chmod(path, 0o600)
