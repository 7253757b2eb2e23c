"""Memory of a GPU that a worker gave to clients by a file, and let go of: whether a process has the file.

The driver keeps the memory for as long as the file is open. The kernel shows whether it is: a file that a process polls
stays on the list of its poll until the last descriptor of that file is closed, wherever that is, be it in a message on
its way. A process that has mapped the memory needs the file no more. But a process that can map it can also take as
much of the GPU by itself, so that it gets nothing here that it could not have.
"""

from __future__ import annotations

import os
import select
import weakref


class ExportedMemory:
    """Memory as it is left by its worker.

    Args:
        descriptor: by which it was handed out; taken over.
        memory: what is alive for as long as anything here looks into it.
    """

    def __init__(self, descriptor: int, size: int, memory: object) -> None:
        self._size = size
        self._memory = weakref.ref(memory)
        self._poll: select.epoll | None = None
        try:
            self._poll = select.epoll()
            self._poll.register(descriptor, 0)
        except OSError:  # a file that cannot be polled, or no descriptor: it cannot be found out
            self.close()
        finally:
            os.close(descriptor)

    def measure(self) -> int:
        """Bytes that it takes of the GPU while a process has it."""
        return self._size

    def is_held_elsewhere(self) -> bool:
        """Whether this process looks into it, or another has the file. False where it cannot be found out."""
        if self._memory() is not None:
            return True
        if self._poll is None:
            return False
        try:
            with open(f"/proc/self/fdinfo/{self._poll.fileno()}") as told:
                return any(line.startswith("tfd:") for line in told)
        except OSError:
            return False

    def close(self) -> None:
        """Ask no more."""
        if self._poll is not None:
            self._poll.close()
            self._poll = None
