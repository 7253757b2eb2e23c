"""Results: slots of the worker's result arenas, mapped read-only here, and released when no array looks into them.

All local ranks of a group see the same slot. A rank holds at most a quarter of an arena as views; beyond that it gets
copies, so that a caller who collects results cannot starve the group.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from collectived.calls.buffers import Backing
from collectived.values.leaves import Array
from collectived_proto.ipc import messages
from collectived_proto.ipc.parts import ResultPart
from collectived_proto.ipc.rank_messages import Delivery

if sys.platform == "linux":
    from collectived_proto.ipc import arena as shared

_VIEW_SHARE_DIVISOR = 4  # one part in so many of an arena may be held as views
_MAX_RELEASES = 1024  # in one message


@dataclass(slots=True, eq=False)
class ResultArena:
    number: int
    memory: mmap.mmap
    size: int
    view_bytes: int = 0  # bytes that views of this library keep
    views: dict[tuple[int, int], list[Array]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)  # over `view_bytes`


class MappedResult:
    """The results of one instance; released when collected."""

    __slots__ = ("_released", "arena", "view_bytes", "number", "offset")

    def __init__(
        self, number: int, arena: ResultArena, offset: int, released: deque[tuple[int, ResultArena | None, int]]
    ) -> None:
        self.number = number
        self.arena = arena
        self.offset = offset
        self.view_bytes = 0
        self._released = released

    @property
    def memory(self) -> mmap.mmap:
        return self.arena.memory

    @property
    def views(self) -> dict[tuple[int, int], list[Array]]:
        return self.arena.views

    def __del__(self) -> None:
        self._released.append((self.number, self.arena, self.view_bytes))

    def acquire_backing(self, nbytes: int) -> Backing | None:
        """The slot as a base of views that hold it, asked for once; None where this rank holds too much already."""
        arena = self.arena
        with arena.lock:
            if arena.view_bytes + nbytes > arena.size // _VIEW_SHARE_DIVISOR:
                return None
            self.view_bytes = nbytes
            arena.view_bytes += nbytes
        backing = Backing((nbytes,), np.uint8, arena.memory, self.offset)
        backing.slot = self
        return backing


class MappedResults:
    """The result arenas of one group and the slots that are to be released; its owner has a lock."""

    def __init__(self) -> None:
        self._arenas: dict[int, ResultArena] = {}
        self._released: deque[tuple[int, ResultArena | None, int]] = deque()

    def add_arena(self, message: bytes, descriptor: int) -> None:
        """Maps an arena that the worker handed over."""
        number, size = messages.parse_arena(message)
        mapped = shared.attach(number, size, descriptor, writable=False)
        if mapped.memory is not None:
            self._arenas[number] = ResultArena(number, mapped.memory, size)

    def drop_arena(self, message: bytes) -> None:
        """Lets go of an arena in which no result will lie any more; its mapping ends with the last view of it."""
        arena = self._arenas.pop(messages.parse_arena(message)[0], None)
        if arena is not None:
            arena.views.clear()

    def open_slot(self, done: messages.Completion | ResultPart | Delivery) -> MappedResult:
        """The slot that a completion speaks of, a part of a result, or a message.

        Raises:
            MalformedMessage: it lies in an arena that was never handed over.
        """
        arena = self._arenas.get(done.arena)
        if arena is None or done.offset >= arena.size:
            raise messages.MalformedMessage(f"a result in shared memory {done.arena}, which is not known")
        return MappedResult(done.slot, arena, done.offset, self._released)

    def pop_released(self) -> tuple[int, ...]:
        """Return the slots and events that have become free since the last call.

        The caller must report them to the worker.
        """
        if not self._released:
            return ()
        numbers: list[int] = []
        while self._released and len(numbers) < _MAX_RELEASES:
            number, arena, held = self._released.popleft()
            if held and arena is not None:
                with arena.lock:
                    arena.view_bytes -= held
            numbers.append(number)
        return tuple(numbers)

    def release_event(self, event: int) -> None:
        """Release an event of the worker for which no thread will wait; it is reported with the slots."""
        self._released.append((event, None, 0))

    def clear(self) -> None:
        """Lets go of every arena; a mapping ends with the last view of it."""
        for arena in self._arenas.values():
            arena.views.clear()
        self._arenas.clear()
        self._released.clear()
