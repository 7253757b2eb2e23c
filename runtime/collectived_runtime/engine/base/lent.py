"""Shared memory of groups that clients have: what they may write, and what they keep when the group is over.

A client keeps what it looks into, also when its group is over, and writes as much as it likes of what it may write. So
each such memory counts by what it really takes, of the worker's budget and of the sessions that have it:

- of a segment each session that is in it, by what its own ranks have written;
- of what ranks only read all its living sessions, in equal parts;
- of memory that only processes of ended sessions still have their user, whose limit shrinks by as much.

The kernel reports whether a process still has it, as a descriptor or mapped; the client is not asked.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class MemoryUser:
    """A user of the system: how much its processes keep though their sessions have ended, and of how many groups."""

    def __init__(self) -> None:
        self.orphaned_bytes = self.orphaned_count = 0


class MemoryHolder(Protocol):
    """A session, as far as it has memory of its groups; `expel` ends it, in any thread."""

    is_closed: bool
    lent_bytes: int
    retained_count: int
    user: MemoryUser
    expel: Callable[[], None]

    def is_exceeded(self) -> bool:
        """Whether it has more than it may have."""


class HandedFile(Protocol):
    """A file that was handed out, as its worker keeps it."""

    def measure(self) -> int:
        """Bytes that it really takes."""

    def is_held_elsewhere(self) -> bool | None:
        """Whether a process has it; None: it cannot be found out."""

    def close(self) -> None: ...


class WholeBudget(Protocol):
    """The budget of which all memory counts."""

    def force_acquire(self, size: int) -> None: ...


@dataclass(slots=True, eq=False)
class LentMemory:
    """One memory, and the sessions that were given it: one that is several ranks, several times.

    Attributes:
        allowance: bytes that each holder may write, which are charged to the worker elsewhere until it is given back.
        measure_parts: how much each holder has written of it; None: they only read.
        counted: bytes that count of the worker here. parts: and of each session.
        orphaned: whether they count of users, for all sessions have ended.
        seen: what was last looked at: a memory that is the same is quickly through.
    """

    file: HandedFile
    holders: Sequence[MemoryHolder]
    allowance: int = 0
    measure_parts: Callable[[], Sequence[int]] | None = None
    is_given_back: bool = False
    counted: int = 0
    parts: Counter[MemoryHolder] = field(default_factory=Counter)
    orphaned: bool = False
    seen: tuple[int, int, bool] = (-1, -1, False)

    def list_living(self) -> list[MemoryHolder]:
        return [holder for holder in dict.fromkeys(self.holders) if not holder.is_closed]

    def is_kept(self) -> bool:
        """Whether the worker needs it, or a client has it. Where that is not known, its sessions count as owners."""
        if not self.is_given_back:
            return True
        held = self.file.is_held_elsewhere()
        return bool(self.list_living()) if held is None else held

    def divide(self, size: int) -> tuple[int, Counter[MemoryHolder]]:
        """Divide so many bytes into those that count of the worker, and of each living session."""
        parts: Counter[MemoryHolder] = Counter()
        living = self.list_living()
        if self.measure_parts is None:
            for holder in living:
                parts[holder] = -(-size // len(living))
            return size, parts
        least = 0 if self.is_given_back else self.allowance
        written = [max(least, part) for part in self.measure_parts()]
        for holder, part in zip(self.holders, written, strict=True):
            parts[holder] += part
        total = size if self.is_given_back else sum(written) - least * len(written)
        return total, Counter({holder: parts[holder] for holder in living})


class LentMemories:
    """All of one worker; may be used by several threads.

    Attributes:
        on_kept: called, in any thread, when a process has memory that was given back: `settle` is due in a while.
    """

    def __init__(self, whole: WholeBudget) -> None:
        self._whole = whole
        self._lock = threading.Lock()
        self._all: list[LentMemory] = []
        self.on_kept: Callable[[], None] = lambda: None

    @property
    def has_retained(self) -> bool:
        """Whether clients have anything that the worker has given back, be it without pages."""
        return any(one.is_given_back for one in list(self._all))

    @property
    def retained_bytes(self) -> int:
        """Bytes of what the worker has given back, and clients still have."""
        return sum(one.counted for one in list(self._all) if one.is_given_back)

    def add(self, lent: LentMemory) -> None:
        """Count memory that was given to these sessions."""
        with self._lock:
            self._all.append(lent)
            self._settle(lent)

    def give_back(self, lent: LentMemory) -> None:
        """Give memory back: the worker needs it no more, nor pays for it. It is closed when no process has it."""
        with self._lock:
            lent.is_given_back = True
            if lent not in self._all:
                self._all.append(lent)
            for holder in set(lent.holders):
                holder.retained_count += 1
            self._settle(lent)
            is_kept = lent in self._all
        if is_kept:
            self.on_kept()

    def update(self, lent: LentMemory) -> bool:
        """Count one memory anew, quickly where nothing has changed; whether it takes more than before."""
        with self._lock:
            return self._settle(lent)

    def settle(self) -> None:
        """Count all of them anew, and close memory that no process has any more."""
        with self._lock:
            for lent in list(self._all):
                self._settle(lent)

    def _settle(self, lent: LentMemory) -> bool:
        if not lent.is_kept():
            self._charge(lent, 0, Counter(), orphaned=False)
            self._all = [one for one in self._all if one is not lent]
            for holder in set(lent.holders):
                holder.retained_count -= 1
            lent.file.close()
            return False
        seen = lent.file.measure(), len(lent.list_living()), lent.is_given_back
        if seen == lent.seen:
            return False
        before, parts_before = lent.counted, lent.parts
        total, parts = lent.divide(seen[0])
        self._charge(lent, total, parts, orphaned=lent.is_given_back and not parts)
        lent.seen = seen
        if lent.measure_parts is not None:
            for holder, part in parts.items():
                if part > parts_before[holder] and part > lent.allowance and holder.is_exceeded():
                    holder.expel()
        return total > before

    def _charge(self, lent: LentMemory, total: int, parts: Counter[MemoryHolder], orphaned: bool) -> None:
        self._whole.force_acquire(total - lent.counted)
        for holder in parts.keys() | lent.parts.keys():
            holder.lent_bytes += parts[holder] - lent.parts[holder]
        for user in {holder.user for holder in lent.holders}:
            user.orphaned_bytes += total * orphaned - lent.counted * lent.orphaned
            user.orphaned_count += orphaned - lent.orphaned
        lent.counted, lent.parts, lent.orphaned = total, parts, orphaned
