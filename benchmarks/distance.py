"""How far apart the two processors of a small machine are at this moment.

A hypervisor may move the processors of a virtual machine whenever they have slept. Two that share a cache hand a value
of 1 MiB over in a quarter of the time that two others need, and they stay where they are for longer than a turn lasts.
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

NBYTES = 1 << 20
_TRIES = 6
_APART = 2.5
"""Times the least that was ever seen: measured were 1.0 to 1.9 near each other, and 3.9 to 5.7 apart."""
_CALIBRATIONS = 60
_PAUSE = 0.02
_PATIENCE = 0.2
_ANSWER_SECONDS = 5.0
_SPINS = 10_000_000

_WRITE, _WRITTEN = 1, 2

Bytes = NDArray[np.uint8]


class Distance:
    """Two processes, pinned to a processor each, that sleep until they are asked. Makes itself a scale at first.

    Args:
        processors: their numbers; None: those that this process may use.

    Attributes:
        is_measured: whether there are two of them. Of more, it is not known which ones the ranks will use.
        least: the fewest seconds in which a value was handed over.
    """

    def __init__(self, processors: Sequence[int] | None = None) -> None:
        used = processors or sorted(os.sched_getaffinity(0))
        self.is_measured = len(used) == 2
        self.least = 0.0
        self._processes: list[BaseProcess] = []
        if self.is_measured:
            self._asking = self._start(*used)
            self.least = min(self._measure_again() for _ in range(_CALIBRATIONS))

    def _start(self, reader: int, writer: int) -> Connection:
        memory = mmap.mmap(-1, NBYTES + mmap.PAGESIZE)
        fork = multiprocessing.get_context("fork")
        asking, asked = fork.Pipe()
        waking, woken = fork.Pipe()
        # Each end is closed where it is not used, so that the death of this process ends both.
        reading = fork.Process(target=_read, args=(memory, reader, asked, waking, (asking, woken)), daemon=True)
        writing = fork.Process(target=_write, args=(memory, writer, woken, (asking, asked, waking)), daemon=True)
        self._processes = [reading, writing]
        for process in self._processes:
            process.start()
        for end in (asked, waking, woken):
            end.close()
        return asking

    def measure(self) -> float:
        """Seconds in which one writes 1 MiB and the other copies it; 0 where nothing is measured."""
        if not self.is_measured:
            return 0.0
        self._asking.send(_TRIES)
        if not self._asking.poll(_ANSWER_SECONDS):
            raise RuntimeError(f"the processes that hand values over have not answered for {_ANSWER_SECONDS:g} s")
        seconds: float = self._asking.recv()
        return seconds

    def _measure_again(self) -> float:
        time.sleep(_PAUSE)  # in which the processors may be moved
        return self.measure()

    def is_near(self) -> bool:
        """Whether the processors are about as near each other as they were at best."""
        return self.measure() <= self.least * _APART

    def wait(self) -> bool:
        """Wait until they are, for 0.2 seconds at most; whether they are."""
        until = time.monotonic() + _PATIENCE
        while not (near := self.is_near()) and time.monotonic() < until:
            time.sleep(_PAUSE)
        return near

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join(_ANSWER_SECONDS)

    def __enter__(self) -> Distance:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _read(memory: mmap.mmap, processor: int, asked: Connection, waking: Connection, others: Sequence[Any]) -> None:
    flag, value = _settle(memory, processor, others)
    mine = np.ones(NBYTES, np.uint8)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while tries := asked.recv():
            waking.send(tries)
            found = []
            for _ in range(tries):
                begin = time.perf_counter()
                flag[0] = _WRITE
                if not _await(flag, _WRITTEN):
                    return
                mine[...] = value
                found.append(time.perf_counter() - begin)
            asked.send(min(found))


def _write(memory: mmap.mmap, processor: int, woken: Connection, others: Sequence[Any]) -> None:
    flag, value = _settle(memory, processor, others)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while tries := woken.recv():
            for number in range(tries):
                if not _await(flag, _WRITE):
                    return
                value.fill(number)
                flag[0] = _WRITTEN


def _settle(memory: mmap.mmap, processor: int, others: Sequence[Connection]) -> tuple[Bytes, Bytes]:
    """Begin a process. Return the flag, in a page of its own, and the value, in the others."""
    os.sched_setaffinity(0, {processor})
    for end in others:
        end.close()
    whole = np.frombuffer(memory, np.uint8)
    return whole[:1], whole[mmap.PAGESIZE :]


def _await(flag: Bytes, wanted: int) -> bool:
    """Look until the other process has set the flag; False where it does not for seconds."""
    return any(flag[0] == wanted for _ in range(_SPINS))
