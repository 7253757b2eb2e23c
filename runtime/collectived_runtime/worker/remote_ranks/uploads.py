"""Uploads: memory of this worker for values that come over gRPC, laid out as a staging slot.

Each has a number, by which the rank's rings name it as a doorbell's name an arena. Memory that is given back is kept
for the next upload of about that size, for the first touch of a page costs ten times a copy; but not where another part
of the worker is short of memory, and not by a rank that is idle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

import numpy as np
from numpy.typing import NDArray

from collectived_proto.ipc import messages
from collectived_runtime.engine.base.memory_budget import MemoryBudget, MemoryExhausted

NO_UPLOAD = 0  # the number of an upload that will not be read
MAX_SPARE_BYTES = 64 << 20  # the most that a rank keeps for later,
SPARE_IDLE_SECONDS = 10.0  # and for how long, where it uploads nothing
_SPARE_RATIO = 4  # an upload takes no spare that is larger than this many times what it needs
_PAGE = 4096
_MAX_NUMBERS = (1 << 32) - 1  # numbers, as many as addresses have

Memory = NDArray[np.uint8]


class Uploads:
    """Of one rank. `resolve_memory` is called by its group loop, everything else in the event loop.

    Args:
        kept: called when something is kept for later, for `release_idle` to be called after a while.
    """

    def __init__(self, budget: MemoryBudget, kept: Callable[[], None] = lambda: None) -> None:
        self._budget = budget
        self._on_spare = kept
        self._numbers = count()
        self._used: dict[int, Memory] = {}
        self._spare: list[Memory] = []  # taken away, in any thread, where memory is short
        self._spare_lock = threading.Lock()
        self._busy = False  # something has been taken since `release_idle` was called last
        budget.register_shrinker(self._drop_spares)

    def acquire(self, nbytes: int) -> tuple[int, Memory]:
        """A number and at least `nbytes` of memory.

        Raises:
            MemoryExhausted: the worker has no more.
        """
        memory = self._take_spare(nbytes)
        if memory is None:
            size = max(1, -(-nbytes // _PAGE)) * _PAGE
            self._budget.acquire(size)
            try:
                memory = np.empty(size, np.uint8)
            except MemoryError as error:
                self._budget.release(size)
                raise MemoryExhausted(f"{size} bytes of memory: {error}") from None
        self._busy = True
        number = NO_UPLOAD + 1 + next(self._numbers) % _MAX_NUMBERS
        self._used[number] = memory
        return number, memory

    def release(self, number: int) -> None:
        """Give back an upload that is not read or written any more. An unknown number changes nothing."""
        memory = self._used.pop(number, None)
        if memory is None:
            return
        with self._spare_lock:
            self._spare.append(memory)
            while sum(spare.nbytes for spare in self._spare) > MAX_SPARE_BYTES:
                self._budget.release(self._spare.pop(0).nbytes)
        self._on_spare()

    def release_idle(self) -> bool:
        """Give back what is kept for later, where nothing was taken since it was called last; whether some is left."""
        busy, self._busy = self._busy, False
        if not busy:
            self._drop_spares()
        return bool(self._spare)

    def resolve_memory(self, number: int, offset: int, length: int) -> Memory:
        """Those bytes of an upload.

        Raises:
            messages.MalformedMessage: there is none of that number.
        """
        if number == NO_UPLOAD:
            return _EMPTY
        known = self._used.get(number)
        if known is None or offset + length > known.nbytes:
            raise messages.MalformedMessage(
                f"bytes {offset} to {offset + length} of upload {number}, which are not there"
            )
        return known[offset : offset + length]

    @property
    def nbytes(self) -> int:
        """Bytes of the budget that it has."""
        return sum(memory.nbytes for memory in (*self._used.values(), *self._spare))

    def close(self) -> None:
        """Give everything back; a reader of an upload keeps its memory alive. Idempotent."""
        for number in list(self._used):
            self._budget.release(self._used.pop(number).nbytes)
        self._budget.unregister_shrinker(self._drop_spares)
        self._drop_spares()

    def _take_spare(self, nbytes: int) -> Memory | None:
        with self._spare_lock:
            fitting = [spare for spare in self._spare if nbytes <= spare.nbytes <= max(_SPARE_RATIO * nbytes, _PAGE)]
            if not fitting:
                return None
            best = min(fitting, key=lambda spare: spare.nbytes)
            self._spare = [spare for spare in self._spare if spare is not best]
        return best

    def _drop_spares(self) -> None:
        with self._spare_lock:
            while self._spare:
                self._budget.release(self._spare.pop().nbytes)


_EMPTY: Memory = np.empty(0, np.uint8)
