"""Memory of workers that this process has mapped on a GPU, and when it can be unmapped again.

Unmapping waits for all that the process has under way on the device, of whichever session. A stream that waits for an
event of a worker which has died may wait forever: CUDA does not promise that such an event is ever over. So nothing is
unmapped while any stream of the process waits for a worker; it is tried again when more is mapped, and at the end of
every session.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque

from collectived.gpu.driver import Cuda, CudaError

_LOCK_TIMEOUT = 0.05  # seconds; while a thread waits for the lock it does not read from its worker
_PER_THREAD_STREAM = 2  # the driver's handle of a stream that is another one in every thread


class Mapping:
    """Memory at `address`, mapped as long as this object lives."""

    __slots__ = ("__weakref__", "address")

    def __init__(self, address: int) -> None:
        self.address = address


class Mappings:
    """Memory of workers on one GPU. Thread-safe."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        self._cuda = cuda
        self._device = device
        self._process = os.getpid()  # in a forked child, which knows nothing of the device, nothing is unmapped
        self._lock = threading.Lock()
        self._sessions = 0
        self._wait_events: dict[tuple[int, int], int] = {}  # by stream, an event behind its last wait for a worker
        self._pending_unmaps: deque[tuple[int, int]] = deque()  # address and size

    def add_session(self) -> None:
        with self._lock:
            self._sessions += 1

    def remove_session(self) -> None:
        with self._lock:
            self._sessions -= 1
        self.unmap_unused()

    def map(self, descriptor: int, size: int) -> Mapping:
        """Maps what a worker has handed over; the descriptor is taken over.

        Raises:
            CudaError: the driver refuses.
        """
        self.unmap_unused()
        mapping = Mapping(self._cuda.map(self._device, descriptor, size))
        weakref.finalize(mapping, self._discard, mapping.address, size).atexit = False
        return mapping

    def wait_event(self, event: int, stream: int) -> bool:
        """Makes a stream wait for an event of a worker. False: not now, because another thread unmaps memory.

        Raises:
            CudaError: the driver refuses.
        """
        named = stream, threading.get_ident() if stream == _PER_THREAD_STREAM else 0
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT):
            return False
        try:
            self._cuda.wait_event(self._device, event, stream)
            behind = self._wait_events.get(named)
            if behind is None:
                behind = self._wait_events[named] = self._acquire_event()
            self._cuda.record_event(self._device, behind, stream)  # work before it comes earlier on the stream
            return True
        finally:
            self._lock.release()

    def _acquire_event(self) -> int:
        """Return an event that stands behind nothing any more, or a new one."""
        for named, event in list(self._wait_events.items()):
            if self._is_event_done(event):
                del self._wait_events[named]
                return event
        return self._cuda.create_event(self._device)[0]

    def _discard(self, address: int, size: int) -> None:
        """Called by the collector, in any thread and at any time: the next call that maps memory unmaps it.

        Where all sessions are closed no such call comes, and it is unmapped now if that is possible.
        """
        self._pending_unmaps.append((address, size))
        if not self._sessions:
            self.unmap_unused()

    def unmap_unused(self) -> None:
        """Unmap memory that is no longer held, if that is possible now. Never waits for a worker."""
        if os.getpid() != self._process or not self._lock.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(CudaError):  # which does not matter any more
                for named, event in list(self._wait_events.items()):
                    if self._is_event_done(event):
                        del self._wait_events[named]
                        self._cuda.destroy_event(event)
                while self._pending_unmaps and not self._wait_events:
                    self._cuda.unmap(self._device, *self._pending_unmaps.popleft())
        finally:
            self._lock.release()

    def _is_event_done(self, event: int) -> bool:
        """Whether the event is over. False where the device has failed, because it may still read."""
        try:
            return self._cuda.is_event_done(event)
        except CudaError:
            return False


_lock = threading.Lock()
_mappings_by_device: dict[tuple[Cuda, int], Mappings] = {}


def get_mappings(cuda: Cuda, device: int) -> Mappings:
    """Those of a GPU of this process, as long as it lives."""
    with _lock:
        return _mappings_by_device.setdefault((cuda, device), Mappings(cuda, device))
