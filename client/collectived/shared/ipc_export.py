"""Memory of this process's own on a GPU, lent to the worker: opened there once, then read where it lies.

An allocation is handed over by CUDA's legacy IPC handle when a collective first reads an array in it, and stays open
until it is used least of all, or is seen to have been freed. The driver says which allocation an address lies in, by a
number that it never gives twice: an address that has been freed and allocated again is another one.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from time import monotonic

from collectived.calls.timeout import Timeout
from collectived.errors import UnavailableError
from collectived.gpu.array import DeviceArray
from collectived.gpu.driver import Allocation, Cuda, CudaError
from collectived.shared.memory import SessionSocket
from collectived_proto.ipc import messages

log = logging.getLogger("collectived")

_FREED_CHECK_INTERVAL = 1.0  # seconds between two looks at what has been freed
_OPEN_TIMEOUT = (
    1.0  # seconds in which the worker opens memory; a collective that waits longer is sooner done with a copy
)
_RETRY_DELAY = 10.0  # seconds in which it is not asked again then
_MAX_REFUSED = 1024  # allocations that are remembered as not to be opened


class IpcExport:
    """An allocation that the worker has open as an arena. Readers keep this object: its end gives the arena back."""

    __slots__ = ("_released", "allocation", "number", "used")

    def __init__(self, allocation: Allocation, number: int, returned: deque[int]) -> None:
        self.allocation = allocation
        self.number = number
        self.used = 0
        self._released = returned

    def __del__(self) -> None:
        self._released.append(self.number)


class IpcExports:
    """Of one GPU. Thread-safe.

    Args:
        source: over which the worker is asked, under `lock`. index: of the GPU in the worker, `device` in this process.
        most: allocations that the worker has open at a time; 0: it opens none.
    """

    def __init__(
        self, source: SessionSocket, lock: threading.Lock, index: int, cuda: Cuda, device: int, most: int
    ) -> None:
        self._session_socket = source
        self._lock = lock
        self._index = index
        self._cuda = cuda
        self._device = device
        self._max_open = most
        self._exports: dict[int, IpcExport] = {}  # by identity of the allocation
        self._refused: set[int] = set()
        self._released: deque[int] = deque()
        self._open_count = 0  # in the worker
        self._clock = itertools.count(1)
        self._next_freed_check = 0.0
        self._retry_at = 0.0

    def acquire(self, array: DeviceArray, patience: float) -> IpcExport | None:
        """That of an array's memory; None where it has to be copied.

        Args:
            patience: seconds in which the worker opens it, where that is new; a second at most.

        Raises:
            CollectiveError: the worker refuses.
        """
        elsewhere = array.device != self._device or not array.nbytes
        if not self._max_open or elsewhere or array.address % array.dtype.itemsize:
            return None
        try:
            allocation = self._cuda.find_allocation(array.address)
        except CudaError:
            return None  # of an allocator of which the driver does not know
        if array.address + array.nbytes > allocation.address + allocation.size:
            return None
        if monotonic() >= self._next_freed_check:
            self._check_freed()
        loan = self._exports.get(allocation.buffer_id)
        if loan is None:
            loan = self._export(allocation, patience)
        if loan is not None:
            loan.used = next(self._clock)
        return loan

    def _check_freed(self) -> None:
        """Look for freed allocations, unless a thread waits for the worker just now."""
        if self._exports and self._lock.acquire(blocking=False):
            try:
                self._discard_freed()
                self._close_released()
            finally:
                self._lock.release()

    def _export(self, allocation: Allocation, patience: float) -> IpcExport | None:
        if not allocation.exportable or allocation.device != self._device or allocation.buffer_id in self._refused:
            return None
        if monotonic() < self._retry_at:
            return None
        limit = Timeout.of(min(patience, _OPEN_TIMEOUT))
        if not self._lock.acquire(timeout=limit.remaining):
            return None
        try:
            known = self._exports.get(allocation.buffer_id)  # another thread was quicker
            return known if known is not None else self._open_in_worker(allocation, limit)
        finally:
            self._lock.release()

    def _open_in_worker(self, allocation: Allocation, limit: Timeout) -> IpcExport | None:
        self._discard_freed()
        self._close_released()
        while self._open_count >= self._max_open and (loans := list(self._exports.values())):
            oldest = min(loans, key=lambda loan: loan.used)
            self._exports.pop(oldest.allocation.buffer_id, None)
            del oldest, loans  # by which it is given back, unless a collective reads it
            self._close_released()
        if self._open_count >= self._max_open:
            return None  # collectives read all of them
        try:
            handle = self._cuda.get_ipc_handle(self._device, allocation.address)
        except CudaError as error:
            self._refuse(allocation, str(error))
            return None
        try:
            answer = self._session_socket.export_allocation(
                messages.IpcOpen(self._index, allocation.buffer_id, handle), limit
            )
        except UnavailableError as error:  # a lost worker shows elsewhere; a late answer is given back
            log.debug("memory is copied for collectives for %g s, not lent: %s", _RETRY_DELAY, error)
            self._retry_at = monotonic() + _RETRY_DELAY
            return None
        if not answer.number:
            self._refuse(allocation, answer.reason)
            return None
        self._open_count += 1
        loan = IpcExport(allocation, answer.number, self._released)
        if answer.size < allocation.size:
            self._refuse(allocation, f"it was opened with {answer.size} bytes of {allocation.size}")
            return None  # and it is given back
        self._exports[allocation.buffer_id] = loan
        return loan

    def _refuse(self, allocation: Allocation, why: str) -> None:
        """From here on arrays in it are copied."""
        log.debug("memory at %#x is copied for collectives, not lent: %s", allocation.address, why)
        if len(self._refused) >= _MAX_REFUSED:
            self._refused.clear()
        self._refused.add(allocation.buffer_id)

    def _discard_freed(self) -> None:
        """Memory that has been freed stays taken on the GPU as long as the worker has it open."""
        self._next_freed_check = monotonic() + _FREED_CHECK_INTERVAL
        for loan in list(self._exports.values()):
            try:
                freed = self._cuda.find_allocation(loan.allocation.address).buffer_id != loan.allocation.buffer_id
            except CudaError:
                freed = True
            if freed:
                self._exports.pop(loan.allocation.buffer_id, None)

    def _close_released(self) -> None:
        while self._released:
            self._session_socket.release_arena(self._released.popleft())
            self._open_count -= 1

    def clear(self) -> None:
        """The session is over, and with it all loans."""
        self._max_open = 0
        self._exports.clear()
