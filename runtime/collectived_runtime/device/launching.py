"""The thread that gives one GPU its work: everything that is launched there is launched by it, in one order.

Whoever wants something done submits it and goes on; a lane waits for the `Launch` in its one poll, as it waits for
links. The thread waits for nothing but more work and the end of what it has launched: between looks at the device it
sleeps a moment, shorter for what has just begun.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from collectived_runtime.device.cuda.driver import Cuda

log = logging.getLogger("collectived.device")

LONGEST_LOOK = 0.0005  # seconds between two looks at what is under way
CLOSE_WITHIN = 5.0  # seconds in which what was launched comes to its end when the worker ends

Work = Callable[[int], None]  # puts work on a stream


class Launch:
    """Work on a GPU.

    Attributes:
        failed: why it has failed, if it has; read it when `done`, or for why it was refused once it has begun.
        event: that it ends with; 0: it has not begun.
        wanted: whether it is to begin. waits_only: whether there is nothing to launch.
        what: it is, for people.
    """

    what = "a copy or fold"

    __slots__ = (
        "_begun", "_check", "_ended", "_over", "_work", "event", "failed", "since", "waits", "waits_only", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        work: Work | None,
        over: Callable[[], object],
        waits: tuple[int, ...] = (),
        begun: Callable[[], object] = lambda: None,
        check: Callable[[], object] | None = None,
    ) -> None:
        self._check = check
        self.failed: BaseException | None = None
        self.waits = waits
        self.event = 0
        self.since = 0.0
        self.wanted = True
        self.waits_only = work is None
        self._work = work
        self._begun = begun
        self._over = over
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has ended, or has failed, when it may still be under way until it has `ended`."""
        return self._ended.is_set() or self.failed is not None

    @property
    def ended(self) -> bool:
        """Whether it neither reads nor writes any more."""
        return self._ended.is_set()

    def begin(self, stream: int) -> None:
        """Puts the work on the stream."""
        if (work := self._work) is not None:
            work(stream)

    def begun(self) -> None:
        """It is on the stream."""
        self._begun()

    def look(self) -> None:
        """While it is under way: whether it will come to its end."""
        if self._check is None or self.failed is not None:
            return
        try:
            self._check()
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """It has failed, and may never come to its end."""
        self.failed = error
        self._over()

    def end(self, failed: BaseException | None = None) -> None:
        self.failed = failed
        self._work = None
        self._ended.set()
        self._over()

    def stop(self) -> None:
        """What has not begun will not. What has keeps what it reads and writes until it ends, and nobody waits."""
        self.wanted = False

    def wait(self, within: float) -> bool:
        """Whether it has ended within so many seconds."""
        return self._ended.wait(within)


class Launching:
    """One GPU's thread and stream; the thread starts with the first work."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        self._cuda = cuda
        self._device = device
        self._stream = 0
        # No SimpleQueue: one of CPython 3.11 may wait for ever where its time is over before it has begun to wait.
        self._submitted: queue.Queue[Launch | None] = queue.Queue()
        self._parked: list[Launch] = []  # until their events are over
        self._under_way: deque[Launch] = deque()  # in the order of the stream
        self._events: list[int] = []  # that serve again
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(
        self,
        work: Work | None,
        over: Callable[[], object],
        waits: tuple[int, ...] = (),
        begun: Callable[[], object] = lambda: None,
        check: Callable[[], object] | None = None,
    ) -> Launch:
        """Has `work(stream)` called in the thread; it only puts work there. None: the events alone are waited for.

        Args:
            over: called from the thread when all of it is done on the device, or has failed.
            waits: events that come first. They may be another process's, which may never come: so they are looked at
                here, and nobody else's work on the stream waits for them.
            begun: called from the thread when it is on the stream, behind all that was submitted before with no events
                to wait for.
            check: called from the thread now and then while it is under way; raises where it has failed, for of what
                waits for other ranks the device does not know.
        """
        launch = Launch(work, over, waits, begun, check)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"gpu {self._device}", daemon=True)
                self._thread.start()
        self._submitted.put(launch)
        return launch

    def close(self) -> None:
        """Ends the thread after what is under way, or leaves it behind where that does not end."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._submitted.put(None)
            thread.join(CLOSE_WITHIN)

    def _run(self) -> None:
        going_on = True
        while going_on or self._under_way:
            asked: Launch | None
            try:
                busy = self._under_way or self._parked
                asked = self._submitted.get(timeout=self._pause()) if busy else self._submitted.get()
            except queue.Empty:
                pass
            else:
                if asked is None:
                    going_on = False
                    self._let_go()
                else:
                    asked.since = time.monotonic()
                    self._parked.append(asked)
            self._begin_ready()
            self._look()
        for event in self._events:
            self._cuda.end_event(event)
        if self._stream:
            self._cuda.end_stream(self._stream)

    def _let_go(self) -> None:
        parked, self._parked = self._parked, []
        for launch in parked:
            launch.end()

    def _pause(self) -> float:
        """What has run for long is likely to run for longer."""
        oldest = self._under_way[0] if self._under_way else self._parked[-1]
        return min(LONGEST_LOOK, max(0.00001, (time.monotonic() - oldest.since) / 8))

    def _begin_ready(self) -> None:
        parked, self._parked = self._parked, []
        for launch in parked:
            try:
                if not launch.wanted:
                    launch.end()
                elif not all(self._cuda.over(event) for event in launch.waits):
                    self._parked.append(launch)
                elif launch.waits_only:
                    launch.end()
                else:
                    self._begin(launch)
            except Exception as error:
                launch.end(error)

    def _begin(self, launch: Launch) -> None:
        if not self._stream:
            self._cuda.use(self._device)
            self._stream = self._cuda.stream(self._device)
        launch.event = self._events.pop() if self._events else self._cuda.event(self._device)
        try:
            launch.begin(self._stream)
        except Exception as error:  # whoever waits for it raises it; some of it may be under way
            launch.fail(error)
        self._cuda.record(launch.event, self._stream)
        launch.since = time.monotonic()
        self._under_way.append(launch)
        launch.begun()

    def _look(self) -> None:
        while self._under_way:
            launch = self._under_way[0]
            failed = launch.failed
            try:
                if not self._cuda.over(launch.event):
                    launch.look()
                    return
            except Exception as error:
                failed = failed or error
            self._under_way.popleft()
            self._events.append(launch.event)
            launch.end(failed)
            del launch  # and with it the memory that it looks into
