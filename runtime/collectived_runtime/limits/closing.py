"""Closing descriptors that may block the thread that closes them: those in messages that were never read.

A socket with SO_LINGER whose peer does not read blocks the thread that closes it last; so does a socket in whose unread
messages such a one lies. A thread that ends is not held up by it: the kernel lets no ending thread linger. So
descriptors go, in batches, into the descriptor table of a thread of their own; are closed here, which does not block
while that thread has it too; and are closed for good by the end of the thread. The messages stay unread: so they count,
with all that is in them, of what their sender may have on its way (its RLIMIT_NOFILE), and no file is flushed.

Few files block even so, those of a file system that writes back late and whose server is gone or hostile. Threads that
these hold are left alone, up to a number; from then on what comes waits until a batch is full.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
from collections.abc import Sequence

MOST_WAITING = 64  # descriptors that wait while threads are held up; then one more thread takes them all
_MOST_HELD_UP = 8  # threads that are left alone
_LOOK_SECONDS = 0.05  # between two looks whether they have ended
_SYS_CLOSE_RANGE = 436  # the same for all processors
_CLOSE_RANGE_UNSHARE = 2
_MAX_DESCRIPTOR = 2**32 - 1
_LIBC = ctypes.CDLL(None)


class PatientCloser:
    """Closes descriptors beside all else, in threads that start when they are needed and keep no process alive."""

    def __init__(self) -> None:
        self._descriptors: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_running = False
        self._batches: list[_Batch] = []

    def close(self, descriptor: int) -> None:
        """Have a descriptor closed soon, without waiting for that."""
        self._descriptors.put(descriptor)
        with self._lock:
            if self._is_running:
                return
            self._is_running = True
        try:
            threading.Thread(target=self._run, name="closing", daemon=True).start()
        except RuntimeError:  # there is no thread to be had: the next call tries again
            self._is_running = False

    def _run(self) -> None:
        while True:
            batch = [self._descriptors.get()]
            while self._is_held_up(len(batch) + self._descriptors.qsize()):
                threading.Event().wait(_LOOK_SECONDS)
            while len(batch) < MOST_WAITING and not self._descriptors.empty():
                batch.append(self._descriptors.get())
            while not self._start(batch):
                threading.Event().wait(_LOOK_SECONDS)

    def _is_held_up(self, waiting: int) -> bool:
        self._batches = [one for one in self._batches if one.is_open()]
        return must_wait(len(self._batches), waiting)

    def _start(self, descriptors: Sequence[int]) -> bool:
        batch = _Batch(descriptors)
        try:
            batch.close()
        except RuntimeError:  # there is no thread to be had now
            return False
        self._batches.append(batch)
        return True


def must_wait(held_up: int, waiting: int) -> bool:
    """Whether so many descriptors wait on, where so many threads have not ended."""
    return held_up >= _MOST_HELD_UP and waiting < MOST_WAITING


class _Batch:
    """Descriptors that the end of one thread closes."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = sorted(descriptors)
        self._is_ready, self._may_end = threading.Event(), threading.Event()
        self._has_own = False
        self._thread = threading.Thread(target=self._hold, name="closing a batch", daemon=True)

    def close(self) -> None:
        """Raises RuntimeError, and nothing has changed, where there is no thread to be had."""
        self._thread.start()
        self._is_ready.wait()
        if self._has_own:
            for descriptor in self._descriptors:
                with contextlib.suppress(OSError):  # the kernel has closed it, whatever it says
                    os.close(descriptor)
            self._may_end.set()

    def is_open(self) -> bool:
        """Whether its thread has not ended, for the kernel."""
        return os.path.exists(f"/proc/self/task/{self._thread.native_id}")

    def _hold(self) -> None:
        self._has_own = _take_own_table(self._descriptors)
        self._is_ready.set()
        if self._has_own:
            self._may_end.wait()
            return
        for descriptor in self._descriptors:  # of a kernel before Linux 5.9, or where that call is forbidden
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _take_own_table(kept: Sequence[int]) -> bool:
    """Give the calling thread a descriptor table of its own, with these alone, in ascending order; whether it has."""
    if not _close_range(kept[-1] + 1, _MAX_DESCRIPTOR, _CLOSE_RANGE_UNSHARE):
        return False
    first = 0
    for descriptor in kept:
        if descriptor > first:
            _close_range(first, descriptor - 1, 0)
        first = descriptor + 1
    return True


def _close_range(first: int, last: int, flags: int) -> bool:
    return bool(_LIBC.syscall(_SYS_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(last), ctypes.c_uint(flags)) == 0)
