"""Limits of the memory that a worker, and each session of it, may use. A request beyond them is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from collectived_runtime.engine.base.lent import LentMemories, MemoryUser


class MemoryExhausted(Exception):
    """The worker's memory is used up, or a session's share of it; says how."""


class MemoryBudget:
    """Bytes of shared memory, or of `what`, that the worker may use in all; shared by its threads.

    Args:
        refused: called at each request beyond the limit.
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
        self.lent = LentMemories(self)
        self._refused = refused
        self._lock = threading.Lock()
        self._shrinkers: list[Callable[[], None]] = []

    def register_shrinker(self, give: Callable[[], None]) -> None:
        """Have `give` called, in any thread, before a request is refused. It gives spare memory back."""
        with self._lock:
            self._shrinkers.append(give)

    def unregister_shrinker(self, give: Callable[[], None]) -> None:
        """Forget a shrinker; one that is not known is ignored."""
        with self._lock:
            self._shrinkers = [known for known in self._shrinkers if known != give]

    def acquire(self, size: int, *, last: bool = True) -> None:
        """Take bytes; raise MemoryExhausted where this would be too much: with `last` a refusal, else it is retried."""
        if not self._try_acquire(size):
            self._shrink()
            if self._try_acquire(size):
                return
            used = self.used
            if last:
                self._refused()
            raise MemoryExhausted(
                f"{size} bytes more would exceed the worker's {self.limit} bytes of {self._what}, of which {used} are "
                f"in use: {self._advice}"
            )

    def _try_acquire(self, size: int) -> bool:
        """Take bytes if they fit; whether they did."""
        with self._lock:
            fits = self.used + size <= self.limit
            if fits:
                self.used += size
        return fits

    def _shrink(self) -> None:
        self.lent.settle()
        for give in list(self._shrinkers):
            give()

    def force_acquire(self, size: int) -> None:
        """Take bytes whatever the limit: they are in use already."""
        with self._lock:
            self.used += size

    def release(self, size: int) -> None:
        with self._lock:
            self.used -= size


class SessionBudget(MemoryBudget):
    """The part of a budget that one session may have. Its memory counts of the whole budget too.

    Args:
        refused, what: as of `MemoryBudget`.
        key: of the worker's configuration, that raises the limit.
        kept_by: the owner of `kept_bytes`, for messages.

    Attributes:
        user: whose it is, for what his processes keep of sessions that have ended.
        lent_bytes: of memory of its groups: what it has written into their segments, and keeps when they are over.
        retained_count: of groups that are over; each takes a descriptor of the worker.
        is_closed: its session has ended, and answers for nothing any more.
        expel: ends its session, in any thread, for it has written more than it may have.
    """

    def __init__(
        self,
        whole: MemoryBudget,
        limit: int,
        refused: Callable[[], None] = lambda: None,
        what: str = "shared memory",
        key: str = "max_session_memory",
        user: MemoryUser | None = None,
        kept_by: str = "by its groups, also by those that are over",
    ) -> None:
        super().__init__(limit, refused, what)
        self._kept_by = kept_by
        self.lent_bytes = 0
        self._pledged = 0
        self.retained_count = 0
        self.is_closed = False
        self.user = MemoryUser() if user is None else user
        self.expel: Callable[[], None] = lambda: None
        self._parent = whole
        self.lent = whole.lent
        self._key = key

    def register_shrinker(self, give: Callable[[], None]) -> None:
        super().register_shrinker(give)
        self._parent.register_shrinker(give)

    def unregister_shrinker(self, give: Callable[[], None]) -> None:
        super().unregister_shrinker(give)
        self._parent.unregister_shrinker(give)

    def acquire(self, size: int, *, last: bool = True) -> None:
        self._check_room(size, last)
        self._parent.acquire(size, last=last)
        with self._lock:
            self.used += size

    def _check_room(self, size: int, last: bool) -> None:
        if size > self._room:
            self._shrink()
        if size > self._room:
            if last:
                self._refused()
            lent = f" and {self.kept_bytes} {self._kept_by}" if self.kept_bytes else ""
            raise MemoryExhausted(
                f"{size} bytes more would exceed the {self.limit} bytes of {self._what} that one session may have, of "
                f"which {self.used} are in use{lent}: close what is not needed, or raise {self._key} of the worker"
            )

    def pledge(self, size: int) -> Callable[[], None]:
        """Set bytes aside for a place in a segment that may be made. Call the result once that is known.

        Raises:
            MemoryExhausted: its session would have more than it may.
        """
        if size:
            self._check_room(size, last=True)
        self._add_pledged(size)
        return partial(self._add_pledged, -size)

    def _add_pledged(self, size: int) -> None:
        with self._lock:
            self._pledged += size

    @property
    def _room(self) -> int:
        return self.limit - self.used - self.kept_bytes

    def force_acquire(self, size: int) -> None:
        with self._lock:
            self.used += size
        self._parent.force_acquire(size)

    def release(self, size: int) -> None:
        with self._lock:
            self.used -= size
        self._parent.release(size)

    def close(self) -> None:
        """Its session has ended."""
        self.is_closed = True
        self.lent.settle()

    def is_exceeded(self) -> bool:
        """Whether its session has more than it may have."""
        return self._room < 0

    def is_used_up_by_groups(self) -> bool:
        """Whether its groups, also those that are over, take as much as its session may have."""
        if self.kept_bytes or self.retained_count:
            self.lent.settle()
        return self.kept_bytes >= self.limit

    @property
    def kept_bytes(self) -> int:
        """Of memory of its groups, and of those of its user's sessions that have ended."""
        return self.lent_bytes + self._pledged + self.user.orphaned_bytes
