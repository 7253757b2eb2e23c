"""What holds for all tests: examples are generated without a clock, for no test may fail because a machine is busy."""

from __future__ import annotations

import functools
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.file_scheduling import pytest_xdist_make_scheduler

__all__ = ["pytest_xdist_make_scheduler"]  # a hook

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

TRIES = 5
STARVED = 0.2  # seconds of room beyond which whoever has a quarter of a second for something may not do it
LAST = ("runtime", "proto")  # folders of many quick files
WAKES = 10  # of threads and processes, one after another, until a rank hears of a verdict or a deadline


def pytest_configure() -> None:
    """Undo what a shell does to jobs in the background: they, and all that they start, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files are dealt out whole to processes side by side: quick ones come last, so that these end together."""
    root = Path(__file__).parent

    @functools.cache  # thousands of tests are in hundreds of files
    def place(file: Path) -> int:
        folder = file.relative_to(root).parts[0]
        return LAST.index(folder) if folder in LAST else -1

    items.sort(key=lambda item: place(item.path))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What was collected stays: whoever collects garbage in a test need not look through thousands of tests for it."""
    gc.collect()
    gc.freeze()


class Delays:
    """How late this machine lets threads run while a test does: looked at all the time by one that only sleeps.

    A promise in milliseconds holds on a machine that gives its processes processor time. On one that does not, whatever
    happens in a chain of processes may come that much later at every link of the chain.
    """

    def __init__(self) -> None:
        self.worst = 0.0  # seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @property
    def room(self) -> float:
        """Seconds by which something may come later than promised, for want of a processor alone."""
        return WAKES * self.worst

    def hold(self, story: Callable[[], None]) -> None:
        """Plays a story; one that ends badly while the machine starved its processes is played again, a few times."""
        for left in reversed(range(TRIES)):
            self.worst = 0.0
            try:
                story()
                return
            except KeyboardInterrupt:
                raise
            except BaseException:  # what pytest raises is no Exception
                if not left or self.room < STARVED:
                    raise

    def _look(self) -> None:
        due = time.monotonic() + 0.005
        while not self._over.wait(max(0.0, due - time.monotonic())):
            now = time.monotonic()
            self.worst = max(self.worst, now - due)
            due = now + 0.005

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def delays() -> Iterator[Delays]:
    """How late threads run while this test does."""
    measured = Delays()
    yield measured
    measured.close()
