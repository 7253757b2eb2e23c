"""Result arenas that the worker has given back, and that clients still have.

A client keeps what it looks into, also when its group is over. As long as it does, the memory is in use, and counts: of
the worker's budget, and of each living session to which the arena was handed. Whether anybody still has it, by a
descriptor or a mapping, is the kernel's word (`Arena.is_held_elsewhere`), not the client's. What only processes hold
whose sessions have ended is theirs, and not counted here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from collectived_proto.ipc.arena import Arena


class ArenaHolder(Protocol):
    """A session, as far as it holds arenas."""

    is_closed: bool
    retained_bytes: int


@dataclass(frozen=True, slots=True)
class _Retained:
    arena: Arena
    size: int  # of its pages
    holders: Sequence[ArenaHolder]

    def is_held(self) -> bool:
        return not all(holder.is_closed for holder in self.holders) and self.arena.is_held_elsewhere()


class RetainedArenas:
    """Those of one worker; may be used by several threads. `release` takes bytes that nobody holds any more."""

    def __init__(self, release: Callable[[int], None]) -> None:
        self._release = release
        self._lock = threading.Lock()
        self._arenas: list[_Retained] = []

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(one.size for one in list(self._arenas))

    def add(self, arena: Arena, holders: Sequence[ArenaHolder]) -> None:
        """Take an arena over that was handed to these sessions, and whose pages are still charged."""
        kept = _Retained(arena, arena.committed, holders)
        arena.unmap()
        with self._lock:
            for holder in holders:
                holder.retained_bytes += kept.size
            self._arenas.append(kept)
        self.collect()

    def collect(self) -> None:
        """Give back what nobody holds any more."""
        with self._lock:
            gone = [one for one in self._arenas if not one.is_held()]
            self._arenas = [one for one in self._arenas if one not in gone]
            for one in gone:
                for holder in one.holders:
                    holder.retained_bytes -= one.size
        for one in gone:
            one.arena.close()
            self._release(one.size)
