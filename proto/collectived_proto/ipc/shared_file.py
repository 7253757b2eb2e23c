"""Who else has the file of a shared memory open.

What others are given is a file of its own, opened anew. The kernel counts those, and not the memfd itself, nor what is
mapped of it; so one who has the memfd can ask whether anybody still has the other.
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
        """Whether anybody has what was given, as a descriptor, mapped, or on its way. None: nobody can say.

        It is given to nobody any more. A write lease is given only for a file that nobody else has open.
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
