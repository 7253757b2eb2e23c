"""Result arenas of a lane: written once by the worker, mapped read-only by every local rank, reused.

A *slot* holds the results of one instance. It is *held* by the ranks that received it until each has released it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectived_proto.local import arena as arenas
from collectived_proto.local.arena import Arena
from collectived_proto.local.slots import Slots

SMALLEST_ARENA = 64 << 20  # address space; pages exist only as far as they have been used
ROOM = 8  # a new arena holds this many of the result that asked for it, so that a rank may keep two: `x = f(x)`
KEPT_BYTES = 1 << 20  # an arena of which no more has been used is not worth giving back
SPARES = 4  # free slots of one size that are kept as they are,
SPARE_SIZES = 16  # of so many sizes
FREE_BUFFERS = 8  # of scratch memory that are kept for the next who asks; as many as strands run side by side

_numbers = count(1)  # arena numbers are unique in the worker


class Exhausted(Exception):
    """The worker's memory is used up, or a session's share of it; says how."""


class Budget:
    """Bytes of shared memory, or of `what`, that the worker may use in all; shared by its threads.

    Args:
        refused: called where somebody wants too much.
    """

    def __init__(
        self,
        limit: int,
        refused: Callable[[], None] = lambda: None,
        what: str = "shared memory",
        advice: str = "free some, or raise memory_limit of the worker",
    ) -> None:
        self.limit = limit
        self._what = what
        self._advice = advice
        self.used = 0
        self._refused = refused
        self._lock = threading.Lock()
        self._savers: list[Callable[[], None]] = []

    def on_shortage(self, give: Callable[[], None]) -> None:
        """Before anybody is refused `give` is called, in any thread: it gives back what is only kept for later."""
        with self._lock:
            self._savers.append(give)

    def off_shortage(self, give: Callable[[], None]) -> None:
        """It keeps nothing any more; one that is not known is none of our business."""
        with self._lock:
            self._savers = [known for known in self._savers if known != give]

    def take(self, size: int, *, last: bool = True) -> None:
        """Raises Exhausted where this would be too much; with `last` that is a refusal, else it is tried again."""
        if not self._fits(size):
            self._save()
            if self._fits(size):
                return
            used = self.used
            if last:
                self._refused()
            raise Exhausted(
                f"{size} bytes more would exceed the worker's {self.limit} bytes of {self._what}, of which {used} are "
                f"in use: {self._advice}"
            )

    def _fits(self, size: int) -> bool:
        """Takes it where it fits."""
        with self._lock:
            fits = self.used + size <= self.limit
            if fits:
                self.used += size
        return fits

    def _save(self) -> None:
        for give in list(self._savers):
            give()

    def add(self, size: int) -> None:
        """What was taken has become this much, whatever the limit."""
        with self._lock:
            self.used += size

    def give(self, size: int) -> None:
        with self._lock:
            self.used -= size


class Share(Budget):
    """What one session may have of a budget, which is taken from there too.

    Args:
        refused, what: as of `Budget`.
        key: of the worker's configuration, that raises the limit.
    """

    def __init__(
        self,
        whole: Budget,
        limit: int,
        refused: Callable[[], None] = lambda: None,
        what: str = "shared memory",
        key: str = "max_session_memory",
    ) -> None:
        super().__init__(limit, refused, what)
        self._whole = whole
        self._key = key

    def on_shortage(self, give: Callable[[], None]) -> None:
        super().on_shortage(give)
        self._whole.on_shortage(give)

    def off_shortage(self, give: Callable[[], None]) -> None:
        super().off_shortage(give)
        self._whole.off_shortage(give)

    def take(self, size: int, *, last: bool = True) -> None:
        if size > self.limit - self.used:
            self._save()
        if size > self.limit - self.used:
            if last:
                self._refused()
            raise Exhausted(
                f"{size} bytes more would exceed the {self.limit} bytes of {self._what} that one session may have, of "
                f"which {self.used} are in use: close what is not needed, or raise {self._key} of the worker"
            )
        self._whole.take(size, last=last)
        with self._lock:
            self.used += size

    def add(self, size: int) -> None:
        with self._lock:
            self.used += size
        self._whole.add(size)

    def give(self, size: int) -> None:
        with self._lock:
            self.used -= size
        self._whole.give(size)


def next_number() -> int:
    """A number for an arena made elsewhere."""
    return next(_numbers)


def new_arena(size: int, *, readers_only: bool) -> Arena:
    """An arena with a number of its own in this worker."""
    return arenas.create(next(_numbers), size, readers_only=readers_only)


@dataclass(slots=True, eq=False)
class Slot:
    number: int
    arena: Arena
    free: Slots  # of its arena
    offset: int
    size: int
    holders: set[int]
    memory: NDArray[np.uint8]


class Readers(Protocol):
    """Those who are told where results may lie."""

    def announce(self, arena: Arena) -> None: ...

    def withdraw(self, arena: Arena) -> None: ...


class Results:
    """`readers` hear of each arena before any slot of it is handed out, and when it is given back.

    `grown` is called when more memory has been taken from the system.
    """

    def __init__(self, budget: Budget, readers: Readers, grown: Callable[[], None]) -> None:
        self._budget = budget
        self._readers = readers
        self._grown = grown
        self._arenas: list[tuple[Arena, Slots]] = []
        self._slots: dict[int, Slot] = {}
        self._spares: dict[int, list[Slot]] = {}  # by size; the one used last, warm in the caches, stands last
        self._numbers = count(1)
        self._last = True  # what is taken from the budget is not tried again

    @property
    def arenas(self) -> list[Arena]:
        return [arena for arena, _ in self._arenas]

    def take(self, size: int, holders: Iterable[int]) -> Slot:
        """A slot of `size` bytes that these ranks will hold.

        Raises:
            Exhausted: there is no memory for it.
        """
        self._last = False
        try:
            return self._take(size, holders)
        except (Exhausted, OSError):
            if not self._arenas:
                raise
        finally:
            self._last = True
        self.tidy()  # what lies idle may be enough
        return self._take(size, holders)

    def _take(self, size: int, holders: Iterable[int]) -> Slot:
        spares = self._spares.get(size)
        if spares:
            slot = spares.pop()
            slot.holders.update(holders)
            self._slots[slot.number] = slot
            return slot
        found = self._fit(size, holders)
        if found is None and self._spares:
            self._drop_spares()
            found = self._fit(size, holders)
        if found is not None:
            return found
        arena = new_arena(_rounded(max(SMALLEST_ARENA, ROOM * size)), readers_only=True)
        slots = Slots(arena.size)
        self._arenas.append((arena, slots))
        self._readers.announce(arena)
        offset = slots.take(size)
        assert offset is not None
        return self._slot(arena, slots, offset, size, holders)

    def _fit(self, size: int, holders: Iterable[int]) -> Slot | None:
        for arena, slots in self._arenas:
            if arena.size < ROOM * size:  # in so small a one nobody could keep the result
                continue
            offset = slots.take(size)
            if offset is not None:
                return self._slot(arena, slots, offset, size, holders)
        return None

    def _slot(self, arena: Arena, slots: Slots, offset: int, size: int, holders: Iterable[int]) -> Slot:
        try:
            self._commit(arena, offset + size)
        except (Exhausted, OSError):
            slots.give(offset)
            raise
        memory = arena.stretch(offset, size)
        slot = Slot(next(self._numbers), arena, slots, offset, size, set(holders), memory)
        self._slots[slot.number] = slot
        return slot

    def _commit(self, arena: Arena, upto: int) -> None:
        need = arena.rounded(upto) - arena.committed
        if need > 0:
            self._budget.take(need, last=self._last)
            try:
                arena.commit(upto)
            except OSError:
                self._budget.give(need)
                raise
            self._grown()

    def release(self, number: int, rank: int) -> None:
        """This rank needs the slot no longer; releasing what one does not hold changes nothing."""
        slot = self._slots.get(number)
        if slot is None:
            return
        slot.holders.discard(rank)
        if slot.holders:
            return
        del self._slots[number]
        spares = self._spares.get(slot.size)
        if spares is None:
            if len(self._spares) >= SPARE_SIZES:  # somebody's shapes change with every call
                self._drop_spares()
            spares = self._spares[slot.size] = []
        if len(spares) < SPARES:
            spares.append(slot)
        else:
            slot.free.give(slot.offset)

    def _drop_spares(self) -> None:
        for spares in self._spares.values():
            for slot in spares:
                slot.free.give(slot.offset)
        self._spares.clear()

    def drop(self, rank: int) -> None:
        """Releases all that a rank holds."""
        for number in [number for number, slot in self._slots.items() if rank in slot.holders]:
            self.release(number, rank)

    def tidy(self) -> bool:
        """Gives back arenas in which nothing is in use; whether anything large is left."""
        self._drop_spares()
        kept = []
        for arena, slots in self._arenas:
            if slots.used or arena.committed <= KEPT_BYTES:
                kept.append((arena, slots))
                continue
            self._readers.withdraw(arena)
            self._budget.give(arena.committed)
            arena.close()
        self._arenas = kept
        return any(arena.committed > KEPT_BYTES for arena, _ in kept)

    def held(self) -> dict[int, int]:
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
            self._budget.give(arena.committed)
            arena.close()
        self._arenas.clear()


def _rounded(size: int) -> int:
    return 1 << (size - 1).bit_length()


class Workspace:
    """Scratch memory of a lane that never leaves the worker: buffers that are lent by name, and reused.

    Between `begin` and `end` of a name everybody who asks for it gets the same buffer. `grown` is called when memory
    has been taken from the system.
    """

    def __init__(self, grown: Callable[[], None]) -> None:
        self._grown = grown
        self._lent: dict[Any, NDArray[np.uint8]] = {}
        self._users: dict[Any, int] = {}
        self._free: list[NDArray[np.uint8]] = []

    def begin(self, name: Any) -> None:
        self._users[name] = self._users.get(name, 0) + 1

    def buffer(self, name: Any, size: int) -> NDArray[np.uint8]:
        """`size` bytes under this name; what they held before is undefined."""
        have = self._lent.get(name)
        if have is None or len(have) < size:
            fitting = [free for free in self._free if len(free) >= size]
            if fitting:
                have = min(fitting, key=len)
                self._free = [free for free in self._free if free is not have]
            else:
                have = np.empty(_rounded(max(4096, size)), np.uint8)
                self._grown()
            self._lent[name] = have
        return have[:size]

    def end(self, name: Any) -> None:
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
            if (have := self._lent.pop(name, None)) is not None:
                self._free = sorted([*self._free, have], key=len)[-FREE_BUFFERS:]

    def tidy(self) -> None:
        """Lets go of what nobody uses."""
        self._free.clear()
