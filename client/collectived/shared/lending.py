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

from collectived.calls.limit import Limit
from collectived.errors import UnavailableError
from collectived.gpu.array import DeviceArray
from collectived.gpu.driver import Allocation, Cuda, CudaError
from collectived.shared.memory import SessionSocket
from collectived_proto.local import wire

log = logging.getLogger("collectived")

_LOOK_EVERY = 1.0  # seconds between two looks at what has been freed
_PATIENCE = 1.0  # seconds in which the worker opens memory; a collective that waits longer is sooner done with a copy
_AGAIN_AFTER = 10.0  # seconds in which it is not asked again then
_MOST_REFUSED = 1024  # allocations that are remembered as not to be opened


class Loan:
    """An allocation that the worker has open as an arena; given back when collected: so whoever reads it holds this."""

    __slots__ = ("_returned", "allocation", "number", "used")

    def __init__(self, allocation: Allocation, number: int, returned: deque[int]) -> None:
        self.allocation = allocation
        self.number = number
        self.used = 0
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append(self.number)


class Lending:
    """Of one GPU. Thread-safe.

    Args:
        source: over which the worker is asked, under `lock`. index: of the GPU in the worker, `device` in this process.
        most: allocations that the worker has open at a time; 0: it opens none.
    """

    def __init__(
        self, source: SessionSocket, lock: threading.Lock, index: int, cuda: Cuda, device: int, most: int
    ) -> None:
        self._source = source
        self._lock = lock
        self._index = index
        self._cuda = cuda
        self._device = device
        self._most = most
        self._loans: dict[int, Loan] = {}  # by identity of the allocation
        self._refused: set[int] = set()
        self._returned: deque[int] = deque()
        self._open = 0  # in the worker
        self._clock = itertools.count(1)
        self._look_at = 0.0
        self._ask_at = 0.0

    def loan(self, array: DeviceArray, patience: float) -> Loan | None:
        """That of an array's memory; None where it has to be copied.

        Args:
            patience: seconds in which the worker opens it, where that is new; a second at most.

        Raises:
            CollectiveError: the worker refuses.
        """
        elsewhere = array.device != self._device or not array.nbytes
        if not self._most or elsewhere or array.address % array.dtype.itemsize:
            return None
        try:
            allocation = self._cuda.allocation(array.address)
        except CudaError:
            return None  # of an allocator of which the driver does not know
        if array.address + array.nbytes > allocation.address + allocation.size:
            return None
        if monotonic() >= self._look_at:
            self._look()
        loan = self._loans.get(allocation.identity)
        if loan is None:
            loan = self._lend(allocation, patience)
        if loan is not None:
            loan.used = next(self._clock)
        return loan

    def _look(self) -> None:
        """Looks for what has been freed, unless somebody waits for the worker just now."""
        if self._loans and self._lock.acquire(blocking=False):
            try:
                self._forget_freed()
                self._give_back()
            finally:
                self._lock.release()

    def _lend(self, allocation: Allocation, patience: float) -> Loan | None:
        if not allocation.exportable or allocation.device != self._device or allocation.identity in self._refused:
            return None
        if monotonic() < self._ask_at:
            return None
        limit = Limit.of(min(patience, _PATIENCE))
        if not self._lock.acquire(timeout=limit.remaining):
            return None
        try:
            known = self._loans.get(allocation.identity)  # another thread was quicker
            return known if known is not None else self._ask(allocation, limit)
        finally:
            self._lock.release()

    def _ask(self, allocation: Allocation, limit: Limit) -> Loan | None:
        self._forget_freed()
        self._give_back()
        while self._open >= self._most and (loans := list(self._loans.values())):
            oldest = min(loans, key=lambda loan: loan.used)
            self._loans.pop(oldest.allocation.identity, None)
            del oldest, loans  # by which it is given back, unless a collective reads it
            self._give_back()
        if self._open >= self._most:
            return None  # collectives read all of them
        try:
            handle = self._cuda.handle(self._device, allocation.address)
        except CudaError as error:
            self._refuse(allocation, str(error))
            return None
        try:
            answer = self._source.lend(wire.Lent(self._index, allocation.identity, handle), limit)
        except UnavailableError as error:  # what is lost shows without us; a late answer is given back
            log.debug("memory is copied for collectives for %g s, not lent: %s", _AGAIN_AFTER, error)
            self._ask_at = monotonic() + _AGAIN_AFTER
            return None
        if not answer.number:
            self._refuse(allocation, answer.why)
            return None
        self._open += 1
        loan = Loan(allocation, answer.number, self._returned)
        if answer.size < allocation.size:
            self._refuse(allocation, f"it was opened with {answer.size} bytes of {allocation.size}")
            return None  # and it is given back
        self._loans[allocation.identity] = loan
        return loan

    def _refuse(self, allocation: Allocation, why: str) -> None:
        """From here on arrays in it are copied."""
        log.debug("memory at %#x is copied for collectives, not lent: %s", allocation.address, why)
        if len(self._refused) >= _MOST_REFUSED:
            self._refused.clear()
        self._refused.add(allocation.identity)

    def _forget_freed(self) -> None:
        """Memory that has been freed stays taken on the GPU as long as the worker has it open."""
        self._look_at = monotonic() + _LOOK_EVERY
        for loan in list(self._loans.values()):
            try:
                freed = self._cuda.allocation(loan.allocation.address).identity != loan.allocation.identity
            except CudaError:
                freed = True
            if freed:
                self._loans.pop(loan.allocation.identity, None)

    def _give_back(self) -> None:
        while self._returned:
            self._source.drop(self._returned.popleft())
            self._open -= 1

    def forget(self) -> None:
        """The session is over, and with it all loans."""
        self._most = 0
        self._loans.clear()
