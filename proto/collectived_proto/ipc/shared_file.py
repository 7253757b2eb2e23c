"""Who else has the file of a shared memory open.

What others are given is a file of its own, opened anew. The kernel counts those, and not the memfd itself, nor what is
mapped of it; so one who has the memfd can ask whether anybody still has the other.
"""

from __future__ import annotations

import fcntl
import os

_BLOCK_BYTES = 512  # of st_blocks


def reopen(descriptor: int, flags: int) -> int:
    """Open a memfd anew, with these flags: a file to give to others. -1 where there is no /proc.

    Raises:
        OSError: no descriptor is left.
    """
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1


def is_open_elsewhere(descriptor: int) -> bool:
    """Whether anybody has a file that `reopen` made of this memfd, as a descriptor, mapped, or on its way.

    A write lease is given only for a file that nobody else has open. True where the kernel does not say.
    """
    try:
        probe = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return False
    except OSError:
        return True
    finally:
        os.close(probe)


def measure(descriptor: int) -> int:
    """Bytes of the pages of a memfd that exist."""
    return os.fstat(descriptor).st_blocks * _BLOCK_BYTES
