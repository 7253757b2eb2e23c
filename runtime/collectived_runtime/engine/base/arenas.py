"""Result arenas of a group loop: written once by the worker, mapped read-only by every local rank, reused.

A *slot* holds the results of one instance. It is *held* by the ranks that received it until each has released it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectived_proto.ipc import arena as arenas
from collectived_proto.ipc.arena import Arena
from collectived_proto.ipc.free_list import FreeList
from collectived_runtime.engine.base import aligned
from collectived_runtime.engine.base.lent import LentMemory, MemoryHolder
from collectived_runtime.engine.base.memory_budget import MemoryBudget, MemoryExhausted

SMALLEST_ARENA = 64 << 20  # address space; pages exist only as far as they have been used
MIN_SLOTS_PER_ARENA = (
    8  # a new arena holds this many of the result that asked for it, so that a rank may keep two: `x = f(x)`
)
KEPT_BYTES = 1 << 20  # an arena of which no more has been used is not worth giving back
SPARES = 4  # free slots of one size that are kept as they are,
SPARE_SIZES = 16  # of so many sizes
UNEXPECTED_MEMORY_DIVISOR = 4  # messages that no recv has asked for may take one part in so many of the worker's memory
FREE_BUFFERS = 8  # of scratch memory that are kept for the next caller; as many as tasks run side by side

_numbers = count(1)  # arena numbers are unique in the worker


def next_number() -> int:
    """A number for an arena made elsewhere."""
    return next(_numbers)


def new_arena(size: int, *, readers_only: bool) -> Arena:
    """An arena with a number of its own in this worker."""
    return arenas.create(next(_numbers), size, readers_only=readers_only)


@dataclass(slots=True, eq=False)
class ResultSlot:
    number: int
    arena: Arena
    free_list: FreeList  # of its arena
    offset: int
    size: int
    holders: set[int]
    memory: NDArray[np.uint8]


class ArenaObserver(Protocol):
    """The readers of results, which must know all arenas."""

    def add_arena(self, arena: Arena) -> None: ...

    def remove_arena(self, arena: Arena) -> None: ...

    def list_holders(self) -> Sequence[MemoryHolder]:
        """Sessions to which arenas were handed, also those that have ended: their processes may keep them."""


class ResultArenas:
    """The result slots of a group loop, in arenas that its clients map.

    `readers` is called with each arena before any slot of it is handed out, and when it is given back.

    `grown` is called when more memory has been taken from the system.
    """

    def __init__(self, budget: MemoryBudget, readers: ArenaObserver, grown: Callable[[], None]) -> None:
        self._budget = budget
        self._readers = readers
        self._on_memory_grown = grown
        self._arenas: list[tuple[Arena, FreeList]] = []
        self._slots: dict[int, ResultSlot] = {}
        self._spares: dict[int, list[ResultSlot]] = {}  # by size; the one used last, warm in the caches, stands last
        self._numbers = count(1)
        self._last = True  # the budget has been tried, and is not tried again

    @property
    def arenas(self) -> list[Arena]:
        return [arena for arena, _ in self._arenas]

    def acquire(self, size: int, holders: Iterable[int]) -> ResultSlot:
        """A slot of `size` bytes that these ranks will hold.

        Raises:
            MemoryExhausted: there is no memory for it.
        """
        self._last = False
        try:
            return self._acquire(size, holders)
        except (MemoryExhausted, OSError):
            if not self._arenas:
                raise
        finally:
            self._last = True
        self.trim()  # idle memory may be enough
        return self._acquire(size, holders)

    def _acquire(self, size: int, holders: Iterable[int]) -> ResultSlot:
        spares = self._spares.get(size)
        if spares:
            slot = spares.pop()
            slot.number = next(self._numbers)  # a late release of its last use does not count
            slot.holders.update(holders)
            self._slots[slot.number] = slot
            return slot
        found = self._fit(size, holders)
        if found is None and self._spares:
            self._drop_spares()
            found = self._fit(size, holders)
        if found is not None:
            return found
        arena = new_arena(_rounded(max(SMALLEST_ARENA, MIN_SLOTS_PER_ARENA * size)), readers_only=True)
        slots = FreeList(arena.size)
        self._arenas.append((arena, slots))
        self._readers.add_arena(arena)
        offset = slots.allocate(size)
        assert offset is not None
        return self._create_slot(arena, slots, offset, size, holders)

    def _fit(self, size: int, holders: Iterable[int]) -> ResultSlot | None:
        for arena, slots in self._arenas:
            if arena.size < MIN_SLOTS_PER_ARENA * size:  # in so small a one no reader could keep the result
                continue
            offset = slots.allocate(size)
            if offset is not None:
                return self._create_slot(arena, slots, offset, size, holders)
        return None

    def _create_slot(self, arena: Arena, slots: FreeList, offset: int, size: int, holders: Iterable[int]) -> ResultSlot:
        try:
            self._commit(arena, offset + size)
        except (MemoryExhausted, OSError):
            slots.free(offset)
            raise
        memory = arena.slice_bytes(offset, size)
        slot = ResultSlot(next(self._numbers), arena, slots, offset, size, set(holders), memory)
        self._slots[slot.number] = slot
        return slot

    def _commit(self, arena: Arena, upto: int) -> None:
        need = arena.round_to_page(upto) - arena.committed
        if need > 0:
            self._budget.acquire(need, last=self._last)
            try:
                arena.commit(upto)
            except OSError:
                self._budget.release(need)
                raise
            self._on_memory_grown()

    def release(self, number: int, rank: int) -> None:
        """Release a slot for one rank; releasing what it does not hold changes nothing."""
        slot = self._slots.get(number)
        if slot is None:
            return
        slot.holders.discard(rank)
        if slot.holders:
            return
        del self._slots[number]
        spares = self._spares.get(slot.size)
        if spares is None:
            if len(self._spares) >= SPARE_SIZES:  # the shapes of some caller change with every call
                self._drop_spares()
            spares = self._spares[slot.size] = []
        if len(spares) < SPARES:
            spares.append(slot)
        else:
            slot.free_list.free(slot.offset)

    def is_held(self, number: int, rank: int) -> bool:
        """Whether this rank has not released that slot yet."""
        slot = self._slots.get(number)
        return slot is not None and rank in slot.holders

    def _drop_spares(self) -> None:
        for spares in self._spares.values():
            for slot in spares:
                slot.free_list.free(slot.offset)
        self._spares.clear()

    def release_rank(self, rank: int) -> None:
        """Releases all that a rank holds."""
        for number in [number for number, slot in self._slots.items() if rank in slot.holders]:
            self.release(number, rank)

    def trim(self) -> bool:
        """Gives back arenas in which nothing is in use; whether anything large is left."""
        self._drop_spares()
        kept = []
        for arena, slots in self._arenas:
            if not slots.is_unused or arena.committed <= KEPT_BYTES:
                kept.append((arena, slots))
                continue
            self._readers.remove_arena(arena)
            self._give_back(arena)
        self._arenas = kept
        return any(arena.committed > KEPT_BYTES for arena, _ in kept)

    def held_bytes_by_rank(self) -> dict[int, int]:
        """Bytes held, by rank."""
        bytes_by_rank: dict[int, int] = {}
        for slot in self._slots.values():
            for rank in slot.holders:
                if rank < 0:  # the worker itself keeps it
                    continue
                bytes_by_rank[rank] = bytes_by_rank.get(rank, 0) + slot.size
        return bytes_by_rank

    def close(self) -> None:
        self._slots.clear()
        self._spares.clear()
        for arena, _ in self._arenas:
            self._give_back(arena)
        self._arenas.clear()

    def _give_back(self, arena: Arena) -> None:
        """It counts until the clients that got it have unmapped it."""
        self._budget.release(arena.committed)
        if holders := self._readers.list_holders():
            self._budget.lent.give_back(LentMemory(arena.detach(), holders))
        else:
            arena.close()


def _rounded(size: int) -> int:
    return 1 << (size - 1).bit_length()


class Workspace:
    """Scratch memory of a group loop, which never leaves the worker: buffers that are lent by name, and reused.

    Between `acquire` and `release` of a name all callers that ask for it get the same buffer. `grown` is called when
    memory has been taken from the system.
    """

    def __init__(self, grown: Callable[[], None]) -> None:
        self._on_memory_grown = grown
        self._buffers: dict[Any, NDArray[np.uint8]] = {}
        self._users: dict[Any, int] = {}
        self._free: list[NDArray[np.uint8]] = []

    def acquire(self, name: Any) -> None:
        self._users[name] = self._users.get(name, 0) + 1

    def get_buffer(self, name: Any, size: int) -> NDArray[np.uint8]:
        """`size` bytes under this name; their content is undefined."""
        have = self._buffers.get(name)
        if have is None or len(have) < size:
            fitting = [free for free in self._free if len(free) >= size]
            if fitting:
                have = min(fitting, key=len)
                self._free = [free for free in self._free if free is not have]
            else:
                have = aligned.allocate(_rounded(max(4096, size)))
                self._on_memory_grown()
            self._buffers[name] = have
        return have[:size]

    def release(self, name: Any) -> None:
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
            if (have := self._buffers.pop(name, None)) is not None:
                self._free = sorted([*self._free, have], key=len)[-FREE_BUFFERS:]

    def trim(self) -> None:
        """Free the buffers that are not in use."""
        self._free.clear()
