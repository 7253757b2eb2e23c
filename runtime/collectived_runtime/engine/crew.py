"""A crew: a few threads of a worker that help its lanes to fold what is large.

A lane folds such an array in *pieces*: it takes them from the front, its helpers from the back, until none is left. It
waits for nobody meanwhile: where helpers are still at their last pieces, it is woken when they are done.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from collectived_proto.local.spin import cores

SPREAD_BYTES = 1 << 20  # what is folded by one thread is over before another one has woken
PIECE_BYTES = 512 << 10
STEP_SECONDS = 0.0005  # between two looks of the lane at the world, each of which costs half as much as a piece
MOST_HELPERS = 3  # memory is shared by all cores: more of them add little


class Crew:
    """May be used from any thread.

    Attributes:
        helpers: how many threads help; they start when they are first needed.
    """

    def __init__(self, helpers: int | None = None) -> None:
        self.helpers = min(MOST_HELPERS, cores() - 1) if helpers is None else helpers
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()

    def begin(self, job: Job) -> Job:
        """Gives a job to all helpers."""
        self._start()
        for _ in self._threads:
            self._jobs.put(job)
        return job

    def _start(self) -> None:
        with self._starting:
            while len(self._threads) < self.helpers:
                thread = threading.Thread(target=self._help, name="fold", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _help(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.help()
            del job  # and with it the memory that it looks into

    def close(self) -> None:
        """Ends the threads, after what they are at."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()


class Help:
    """A crew as one lane uses it. `wake` wakes the lane, from any thread."""

    def __init__(self, crew: Crew, wake: Callable[[], object]) -> None:
        self._crew = crew
        self._wake = wake

    @property
    def there(self) -> bool:
        """Whether there is anybody to help."""
        return self._crew.helpers > 0

    def begin(self, length: int, piece: int, work: Callable[[int, int], None]) -> Job:
        """Has `work(start, stop)` done for the range up to `length`, `piece` by `piece`, in any order."""
        return self._crew.begin(Job(length, piece, work, self._wake))


class Job:
    """`work` on one range, by the lane that began it and by helpers. After the last piece a helper calls `over`.

    Attributes:
        failed: what a piece has raised, if one has.
    """

    __slots__ = ("_done", "_hands", "_length", "_over", "_piece", "_pieces", "_starts", "_work", "failed")

    def __init__(self, length: int, piece: int, work: Callable[[int, int], None], over: Callable[[], object]) -> None:
        self.failed: BaseException | None = None
        self._hands: list[threading.Lock] = []  # of each helper that has come, held while it works on a piece
        self._starts = deque(range(0, length, piece))
        self._pieces = len(self._starts)
        self._piece = piece
        self._length = length
        self._work = work
        self._over = over
        self._done: list[int] = []  # appended to by all; its length is all that counts

    @property
    def done(self) -> bool:
        return len(self._done) == self._pieces

    def step(self) -> bool:
        """The lane does pieces for `STEP_SECONDS`; False where all have been taken."""
        until = time.monotonic() + STEP_SECONDS
        while True:
            try:
                start = self._starts.popleft()
            except IndexError:
                return False
            self._do(start)
            if time.monotonic() >= until:
                return True

    def help(self) -> None:
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
            self._over()

    def _do(self, start: int) -> None:
        try:
            self._work(start, min(start + self._piece, self._length))
        except BaseException as error:  # the lane raises it; in a helper nobody would see it
            self.failed = error
        finally:
            self._done.append(start)

    def stop(self) -> None:
        """Returns when nobody works on it any more, within the time that a piece takes."""
        self._starts.clear()
        if not self.done:
            for hand in list(self._hands):  # whoever comes later finds nothing to do
                with hand:
                    pass
