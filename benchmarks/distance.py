"""How far apart the two processors of a small machine are at this moment.

A hypervisor may move the processors of a virtual machine whenever they have slept. Two that share a cache hand a value
of 1 MiB over in a third of the time that two others need, and they stay where they are for longer than a turn lasts.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType

import numpy as np

NBYTES = 1 << 20
_TRIES = 6
_APART = 2.5
"""Times the least that was ever seen: measured were 1.0 to 1.9 near each other, and 3.9 to 5.7 apart."""
_PATIENCE = 0.2
_PAUSE = 0.005
_END_SECONDS = 5.0

_WRITE, _WRITTEN = 1, 2


class Distance:
    """Two processes, pinned to a processor each, that sleep until they are asked.

    Args:
        processors: their numbers; None: those that this process may use.

    Attributes:
        least: the fewest seconds measured so far.
    """

    def __init__(self, processors: Sequence[int] | None = None) -> None:
        self.least = float("inf")
        self._memory = mmap.mmap(-1, NBYTES + mmap.PAGESIZE)
        self._asking, self._processes = self._start(processors or sorted(os.sched_getaffinity(0)))

    def _start(self, processors: Sequence[int]) -> tuple[Connection | None, list[BaseProcess]]:
        if len(processors) != 2:
            return None, []  # of more, it is not known which ones the ranks will use
        fork = multiprocessing.get_context("fork")
        asking, asked = fork.Pipe()
        waking, woken = fork.Pipe()
        processes = [
            fork.Process(target=_read, args=(self._memory, processors[0], asked, waking), daemon=True),
            fork.Process(target=_write, args=(self._memory, processors[1], woken), daemon=True),
        ]
        for process in processes:
            process.start()
        return asking, list[BaseProcess](processes)

    def measure(self) -> float:
        """Seconds in which one writes 1 MiB and the other copies it; 0 if the machine has not two of them."""
        if self._asking is None:
            return 0.0
        self._asking.send(_TRIES)
        seconds: float = self._asking.recv()
        self.least = min(self.least, seconds)
        return seconds

    def is_near(self) -> bool:
        """Whether the processors are now about as near each other as they ever were."""
        return self.is_near_in(self.measure())

    def is_near_in(self, seconds: float) -> bool:
        """Whether two processors are near each other if they need so many seconds."""
        return seconds <= self.least * _APART

    def wait(self) -> None:
        """Return when they are, or after 0.2 seconds in which they were not."""
        until = time.monotonic() + _PATIENCE
        while not self.is_near() and time.monotonic() < until:
            time.sleep(_PAUSE)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join(_END_SECONDS)

    def __enter__(self) -> Distance:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _read(memory: mmap.mmap, processor: int, asked: Connection, waking: Connection) -> None:
    os.sched_setaffinity(0, {processor})
    flag, value = _layout(memory)
    mine = np.ones(NBYTES, np.uint8)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while tries := asked.recv():
            waking.send(tries)
            found = []
            for _ in range(tries):
                begin = time.perf_counter()
                flag[0] = _WRITE
                while flag[0] != _WRITTEN:
                    pass
                mine[...] = value
                found.append(time.perf_counter() - begin)
            asked.send(min(found))


def _write(memory: mmap.mmap, processor: int, woken: Connection) -> None:
    os.sched_setaffinity(0, {processor})
    flag, value = _layout(memory)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while tries := woken.recv():
            for number in range(tries):
                while flag[0] != _WRITE:
                    pass
                value.fill(number)
                flag[0] = _WRITTEN


def _layout(memory: mmap.mmap) -> tuple[np.ndarray, np.ndarray]:
    """The flag in a page of its own, and the value in the others."""
    whole = np.frombuffer(memory, np.uint8)
    return whole[:1], whole[mmap.PAGESIZE :]
