"""Shared memory files, and whether other processes still have them open.

Other processes get a file of its own, opened anew for the same memory. The kernel counts users of that file apart from
users and mappings of the memfd. So the owner of the memfd can ask whether another process still has the other file.
"""

from __future__ import annotations

import fcntl
import os

_BLOCK_BYTES = 512  # of st_blocks


class SharedFile:
    """A memfd of which others are given a file of its own.

    Attributes:
        given: the descriptor that others are given.

    Args:
        descriptor: of the memfd; taken over.
        flags: with which the other is opened.

    Raises:
        OSError: no descriptor is left.
    """

    def __init__(self, descriptor: int, flags: int) -> None:
        self._descriptor = descriptor
        self._own = _reopen(descriptor, flags)
        self.given = descriptor if self._own < 0 else self._own

    def measure(self) -> int:
        """Bytes of the pages that exist."""
        return os.fstat(self._descriptor).st_blocks * _BLOCK_BYTES

    def is_held_elsewhere(self) -> bool | None:
        """Whether a process has the given file: as a descriptor, mapped, or in a message. None: it cannot be found out.

        The file must not be given away afterwards. The kernel grants a write lease only on a file that is not open
        elsewhere.
        """
        if self.given == self._descriptor:
            return None
        if self._own >= 0:
            os.close(self._own)
            self._own = -1
        try:
            probe = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            return False
        except OSError:
            return True
        finally:
            os.close(probe)

    def close(self) -> None:
        """Close the descriptors; idempotent."""
        for descriptor in (self._descriptor, self._own):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._own = -1


def _reopen(descriptor: int, flags: int) -> int:
    """Open a memfd anew; -1 where there is no /proc."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
