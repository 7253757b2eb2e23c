"""Receives from whoever sends first, made of receives from each rank."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from collectived.integrations.c10d.errors import translate
from collectived.work import Work
from collectived_proto.errors import CollectiveError

Post = Callable[[int, int], Work[Any]]  # starts a receive from a source, by its tag


class PostedReceives:
    """Receives that were posted before anybody asked for what they bring: one per source and tag. Thread-safe.

    Those that nobody has answered serve whoever receives next, from any source or from that one.
    """

    def __init__(self, sources: list[int], post: Post) -> None:
        self._sources = sources
        self._post = post
        self._posted: dict[tuple[int, int], deque[Work[Any]]] = {}
        self._changed = threading.Condition()

    def pop(self, source: int, tag: int) -> Work[Any] | None:
        """The receive from that source that is to be served next, if one was posted."""
        with self._changed:
            posted = self._posted.get((source, tag))
            return posted.popleft() if posted else None

    def post_all(self, tag: int) -> None:
        """Have a receive posted for every source."""
        with self._changed:
            for source in self._sources:
                posted = self._posted.setdefault((source, tag), deque())
                if not posted:
                    posted.append(self._post(source, tag))
                    posted[0].add_done_callback(self._on_ended)

    def try_pop(self, tag: int) -> tuple[int, Work[Any]] | None:
        """A receive that has ended, and its source."""
        with self._changed:
            for source in self._sources:
                posted = self._posted.get((source, tag))
                if posted and posted[0].done():
                    return source, posted.popleft()
        return None

    def wait(self, tag: int, until: float) -> tuple[int, Work[Any]] | None:
        """The same, waiting until then by the monotonic clock."""
        while True:
            self.post_all(tag)
            found = self.try_pop(tag)
            left = until - time.monotonic()
            if found is not None or left <= 0:
                return found
            with self._changed:
                if not any(posted and posted[0].done() for (_, other), posted in self._posted.items() if other == tag):
                    self._changed.wait(min(left, 1.0))

    def has_open(self) -> bool:
        """Whether there are some that nobody has answered."""
        with self._changed:
            return any(not work.done() for posted in self._posted.values() for work in posted)

    def _on_ended(self, _: Work[Any]) -> None:
        with self._changed:
            self._changed.notify_all()


class AnySourceWork(dist._Work):  # type: ignore[misc]  # torch is not there for the type checker
    """A receive from any source; `source_rank` says whose it was."""

    def __init__(self, receives: PostedReceives, tag: int, place: Callable[[Any], None], timeout: timedelta) -> None:
        """`place` is given what came."""
        super().__init__()
        self._receives = receives
        self._tag = tag
        self._place = place
        self._timeout = timeout
        self._source = -1
        receives.post_all(tag)

    def is_completed(self) -> bool:
        return self._source >= 0 or self._take(self._receives.try_pop(self._tag))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._source < 0:
            limit = (timeout or self._timeout).total_seconds()
            if not self._take(self._receives.wait(self._tag, time.monotonic() + limit)):
                raise dist.DistBackendError(
                    f"Timed out: no rank has sent anything under tag {self._tag} in {limit:g} s"
                )
        return True

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank

    def _take(self, found: tuple[int, Work[Any]] | None) -> bool:
        if found is None:
            return False
        source, work = found
        try:
            self._place(work.result())
        except CollectiveError as error:
            raise translate(error) from error
        self._source = source
        return True
