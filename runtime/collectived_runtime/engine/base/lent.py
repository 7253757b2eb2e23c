"""Shared memory of groups that clients have: what they may write, and what they keep when the group is over.

A client keeps what it looks into, also when its group is over, and writes as much as it likes of what it may write. So
each such memory counts by what it really takes: of the worker's budget, and of each living session that has it. Whether
anybody still has it, as a descriptor or mapped, is the kernel's word, not the client's. What only processes hold whose
sessions have ended is theirs, and does not count here.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class MemoryHolder(Protocol):
    """A session, as far as it has memory of its groups."""

    is_closed: bool
    lent_bytes: int
    retained_count: int

    def is_exceeded(self) -> bool:
        """Whether it has more than it may have."""

    def expel(self) -> None:
        """End the session, which has written more than it may have: `is_closed` from now on."""


class GroupMemory(Protocol):
    """Memory of a group, as its worker holds it."""

    def measure(self) -> int:
        """Bytes that it takes."""

    def is_held_elsewhere(self) -> bool:
        """Whether a client has it; asked only when it will be given to nobody any more."""

    def close(self) -> None: ...


class WholeBudget(Protocol):
    """What all of it counts of."""

    limit: int
    used: int

    def force_acquire(self, size: int) -> None: ...

    def release(self, size: int) -> None: ...


@dataclass(slots=True, eq=False)
class LentMemory:
    """One memory, and the sessions that were given it: one that is several ranks, several times.

    Attributes:
        prepaid: bytes of it that are not counted, until it is given back: they are charged elsewhere.
        allowance: bytes that each holder may write in any case.
        measure_parts: how much each holder has written of it; None: they only read.
        counted: bytes that are charged here.
    """

    memory: GroupMemory
    holders: Sequence[MemoryHolder]
    prepaid: int = 0
    allowance: int = 0
    measure_parts: Callable[[], Sequence[int]] | None = None
    counted: int = 0
    is_given_back: bool = False

    def has_living_holder(self) -> bool:
        return not all(holder.is_closed for holder in self.holders)

    def find_writer(self) -> MemoryHolder | None:
        """The living holder that has written most of it, and more than was prepaid for it."""
        if self.measure_parts is None:
            return None
        written: Counter[MemoryHolder] = Counter()
        for holder, size in zip(self.holders, self.measure_parts(), strict=True):
            if size > self.allowance and not holder.is_closed:
                written[holder] += size
        return written.most_common(1)[0][0] if written else None


class LentMemories:
    """All of one worker; may be used by several threads."""

    def __init__(self, whole: WholeBudget) -> None:
        self._whole = whole
        self._lock = threading.Lock()
        self._all: list[LentMemory] = []

    @property
    def retained_bytes(self) -> int:
        """Bytes of what the worker has given back, and clients still have."""
        return sum(one.counted for one in list(self._all) if one.is_given_back)

    def add(self, lent: LentMemory) -> None:
        """Count memory that was given to these sessions."""
        with self._lock:
            self._all.append(lent)

    def give_back(self, lent: LentMemory) -> None:
        """The worker needs it no more, nor pays for it; it is closed when no session has it."""
        with self._lock:
            lent.prepaid = 0
            lent.is_given_back = True
            if lent not in self._all:
                self._all.append(lent)
            for holder in set(lent.holders):
                holder.retained_count += 1
            self._settle(lent)

    def update(self, lent: LentMemory) -> None:
        """Settle if this memory takes more than is counted; quick where it does not."""
        if lent.memory.measure() > lent.prepaid + lent.counted:
            self.settle()

    def settle(self) -> None:
        """Count what each memory takes by now, and close what nobody has any more.

        A session that has written more than it may have is ended. So is the one that has written most, where all of
        them together exceed the worker's memory.
        """
        with self._lock:
            for lent in [lent for lent in self._all if self._settle(lent) > 0]:
                writer = lent.find_writer() if lent in self._all else None
                if writer is not None and writer.is_exceeded():
                    self._expel(writer)
                while self._whole.used > self._whole.limit and (writer := self._find_largest_writer()) is not None:
                    self._expel(writer)

    def _settle(self, lent: LentMemory) -> int:
        """Count one memory; by how many bytes it has grown beyond what its worker knew."""
        is_kept = lent.has_living_holder()
        if lent.is_given_back and is_kept:
            is_kept = lent.memory.is_held_elsewhere()
        size = max(0, lent.memory.measure() - lent.prepaid) if is_kept else 0
        grown, lent.counted = size - lent.counted, size
        if grown:
            self._whole.force_acquire(grown)
            for holder in set(lent.holders):
                holder.lent_bytes += grown
        if lent.is_given_back and not is_kept:
            self._all = [one for one in self._all if one is not lent]
            for holder in set(lent.holders):
                holder.retained_count -= 1
            lent.memory.close()
        return grown

    def _find_largest_writer(self) -> MemoryHolder | None:
        for lent in sorted(self._all, key=lambda lent: lent.counted, reverse=True):
            if lent.counted and (writer := lent.find_writer()) is not None:
                return writer
        return None

    def _expel(self, writer: MemoryHolder) -> None:
        """What it has written counts no more: groups that still need it end with its session, and give it back."""
        writer.expel()
        for lent in [lent for lent in self._all if writer in lent.holders]:
            if not lent.is_given_back:
                lent.prepaid = lent.memory.measure()
            self._settle(lent)
