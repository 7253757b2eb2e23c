"""A fold pool: a few threads of a worker that help its group loops to fold what is large.

A group loop folds such an array in *pieces*: it takes them from the front, its helpers from the back, until none is
left. It waits for no helper meanwhile: where helpers are still at their last pieces, it is woken when they are done.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from collectived_native.cores import count_cores

MIN_PARALLEL_BYTES = 1 << 20  # one thread folds less before another one has woken
PIECE_BYTES = 512 << 10
STEP_SECONDS = 0.0005  # between two looks of the group loop at the world, each of which costs half as much as a piece
MOST_HELPERS = 3  # memory is shared by all cores: more of them add little


class FoldPool:
    """May be used from any thread.

    Attributes:
        helpers: how many threads help; they start when they are first needed.
    """

    def __init__(self, helpers: int | None = None) -> None:
        self.helpers = min(MOST_HELPERS, count_cores() - 1) if helpers is None else helpers
        self._jobs: queue.SimpleQueue[ParallelFold | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()

    def submit(self, job: ParallelFold) -> ParallelFold:
        """Gives a job to all helpers."""
        self._start()
        for _ in self._threads:
            self._jobs.put(job)
        return job

    def _start(self) -> None:
        with self._starting:
            while len(self._threads) < self.helpers:
                thread = threading.Thread(target=self._run_thread, name="fold", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _run_thread(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run_as_helper()
            del job  # and with it the memory that it looks into

    def close(self) -> None:
        """Ends the threads, after what they are at."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()


class PoolClient:
    """A fold pool as one group loop uses it. `wake` wakes the group loop, from any thread."""

    def __init__(self, fold_pool: FoldPool, wake: Callable[[], object]) -> None:
        self._fold_pool = fold_pool
        self._wake = wake

    @property
    def has_helpers(self) -> bool:
        """Whether there are helpers."""
        return self._fold_pool.helpers > 0

    def submit(self, length: int, piece: int, work: Callable[[int, int], None]) -> ParallelFold:
        """Has `work(start, stop)` done for the range up to `length`, `piece` by `piece`, in any order."""
        return self._fold_pool.submit(ParallelFold(length, piece, work, self._wake))


class ParallelFold:
    """`work` on one range, by the group loop that began it and by helpers. After the last piece a helper calls `over`.

    Attributes:
        error: what a piece has raised, if one has.
    """

    __slots__ = ("_done", "_hands", "_length", "_on_done", "_piece", "_pieces", "_starts", "_work", "error")

    def __init__(self, length: int, piece: int, work: Callable[[int, int], None], over: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._hands: list[threading.Lock] = []  # of each helper that has come, held while it works on a piece
        self._starts = deque(range(0, length, piece))
        self._pieces = len(self._starts)
        self._piece = piece
        self._length = length
        self._work = work
        self._on_done = over
        self._done: list[int] = []  # appended to by all; its length is all that counts

    @property
    def done(self) -> bool:
        return len(self._done) == self._pieces

    def step(self) -> bool:
        """The group loop does pieces for `STEP_SECONDS`; False where all have been taken."""
        until = time.monotonic() + STEP_SECONDS
        while True:
            try:
                start = self._starts.popleft()
            except IndexError:
                return False
            self._do(start)
            if time.monotonic() >= until:
                return True

    def run_as_helper(self) -> None:
        """A helper does pieces until all have been taken."""
        hand = threading.Lock()
        self._hands.append(hand)
        while True:
            with hand:
                try:
                    start = self._starts.pop()
                except IndexError:
                    break
                self._do(start)
        if self.done:
            self._on_done()

    def _do(self, start: int) -> None:
        try:
            self._work(start, min(start + self._piece, self._length))
        except BaseException as error:  # the group loop raises it; in a helper it would be lost
            self.error = error
        finally:
            self._done.append(start)

    def stop(self) -> None:
        """Return when no thread works on it any more, within the time that a piece takes."""
        self._starts.clear()
        if not self.done:
            for hand in list(self._hands):  # a later helper finds nothing to do
                with hand:
                    pass
