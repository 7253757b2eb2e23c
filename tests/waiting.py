"""Waiting for what others bring about, without taking from them the processor that they need for it."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

LOOK_SECONDS = 0.01  # between two looks
Found = TypeVar("Found")


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def settle(fact: Callable[[], Found | None], seconds: float = 30.0) -> Found:
    """Looks until `fact` gives something true; what that is."""
    end = time.monotonic() + seconds
    while not (found := fact()):
        assert time.monotonic() < end, f"it did not come about within {seconds:g} s"
        threading.Event().wait(LOOK_SECONDS)
    return found


def is_readable(file: HasFileno, seconds: float | None) -> bool:
    """Whether there is something to read within so many seconds; None: in the end. Unlike select() with any number."""
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(None if seconds is None else seconds * 1000))
