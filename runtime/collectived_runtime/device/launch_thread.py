"""The thread that gives one GPU its work: everything that is launched there is launched by it, in one order.

A thread submits work and goes on; a group loop waits for the `Launch` in its one poll, as it waits
for links. The thread waits for nothing but more work and the end of what it has launched: between looks at the device
it sleeps a moment, shorter for work that has just begun.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from collectived_runtime.device.cuda.driver import Cuda

log = logging.getLogger("collectived.device")

MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.00001, 0.0005  # between two looks at what is under way
_PR_SET_TIMERSLACK = 29  # of Linux: how much later than asked for a thread may wake up; usually 50 microseconds
_libc = ctypes.CDLL(None)
CLOSE_WITHIN = 5.0  # seconds in which what was launched comes to its end when the worker ends

Work = Callable[[int], None]  # puts work on a stream


def _nothing() -> None:
    pass


class Launch:
    """Work on a GPU.

    Attributes:
        error: why it has failed, if it has; read it when `done`, or for why it was refused once it has begun.
        event: that it ends with; 0: it has not begun.
        wanted: whether it is to begin. is_wait_only: whether there is nothing to launch.
        description: it is, for people.
    """

    description = "a copy or fold"

    __slots__ = (
        "_on_enqueued", "_check", "_ended", "_on_done", "_work", "event", "error", "started_at", "wait_events",
        "is_wait_only", "wanted",
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
        self.error: BaseException | None = None
        self.wait_events = waits
        self.event = 0
        self.started_at = 0.0
        self.wanted = True
        self.is_wait_only = work is None
        self._work = work
        self._on_enqueued = begun
        self._on_done = over
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has ended, or has failed, when it may still be under way until it has `has_ended`."""
        return self._ended.is_set() or self.error is not None

    @property
    def has_ended(self) -> bool:
        """Whether it neither reads nor writes any more."""
        return self._ended.is_set()

    def enqueue(self, stream: int) -> None:
        """Put the work on the stream."""
        if (work := self._work) is not None:
            work(stream)

    def notify_enqueued(self) -> None:
        self._on_enqueued()

    def poll(self) -> None:
        """While it is under way: whether it will come to its end."""
        if self._check is None or self.error is not None:
            return
        try:
            self._check()
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """It has failed, and may never come to its end."""
        self.error = error
        self._on_done()

    def finish(self, failed: BaseException | None = None) -> None:
        self.error = failed
        self._work = self._check = None
        self._ended.set()
        over, self._on_done = self._on_done, _nothing  # a task that has ended is not kept by what it has launched
        self._on_enqueued = _nothing
        over()

    def cancel(self) -> None:
        """Give up work that has not begun.

        Work that has begun keeps its memory until it ends, and no thread waits for it.
        """
        self.wanted = False

    def wait(self, within: float) -> bool:
        """Return whether it has ended within so many seconds."""
        return self._ended.wait(within)


class LaunchThread:
    """One GPU's thread and stream; the thread starts with the first work."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        self._cuda = cuda
        self._device = device
        self._stream = 0
        # No SimpleQueue: one of CPython 3.11 may wait forever where its time is over before it has begun to wait.
        self._submitted: queue.Queue[Launch | None] = queue.Queue()
        self._waiting: list[Launch] = []  # until their events are over
        self._in_flight: deque[Launch] = deque()  # in the order of the stream
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
                here, and no other work on the stream waits for them.
            begun: called from the thread when it is on the stream, behind all that was submitted before with no events
                to wait for.
            check: called from the thread now and then while it is under way; raises where it has failed, for the device
                does not know of work that waits for other ranks.
        """
        launch = Launch(work, over, waits, begun, check)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"gpu {self._device}", daemon=True)
                self._thread.start()
        self._submitted.put(launch)
        return launch

    def close(self) -> None:
        """End the thread after what is under way, or leaves it behind where that does not end."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._submitted.put(None)
            thread.join(CLOSE_WITHIN)

    def _run(self) -> None:
        _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)  # nanoseconds, of this thread
        going_on = True
        while going_on or self._in_flight:
            asked: Launch | None
            try:
                busy = self._in_flight or self._waiting
                asked = self._submitted.get(timeout=self._poll_interval()) if busy else self._submitted.get()
            except queue.Empty:
                pass
            else:
                if asked is None:
                    going_on = False
                    self._finish_waiting()
                else:
                    asked.started_at = time.monotonic()
                    self._waiting.append(asked)
                    asked = None  # with it goes the memory that it looks into, when it has ended
            self._launch_ready()
            self._poll_in_flight()
        for event in self._events:
            self._cuda.destroy_event(event)
        if self._stream:
            self._cuda.destroy_stream(self._stream)

    def _finish_waiting(self) -> None:
        parked, self._waiting = self._waiting, []
        for launch in parked:
            launch.finish()

    def _poll_interval(self) -> float:
        """Seconds until the next look: work that has run for long is likely to run for longer."""
        oldest = self._in_flight[0] if self._in_flight else self._waiting[-1]
        return min(MAX_POLL_SECONDS, max(MIN_POLL_SECONDS, (time.monotonic() - oldest.started_at) / 16))

    def _launch_ready(self) -> None:
        parked, self._waiting = self._waiting, []
        for launch in parked:
            try:
                if not launch.wanted:
                    launch.finish()
                elif not all(self._cuda.is_event_done(event) for event in launch.wait_events):
                    self._waiting.append(launch)
                elif launch.is_wait_only:
                    launch.finish()
                else:
                    self._launch(launch)
            except Exception as error:
                launch.finish(error)

    def _launch(self, launch: Launch) -> None:
        if not self._stream:
            self._cuda.set_device(self._device)
            self._stream = self._cuda.create_stream(self._device)
        launch.event = self._events.pop() if self._events else self._cuda.create_event(self._device)
        try:
            launch.enqueue(self._stream)
        except Exception as error:  # the waiting thread raises it; some of it may be under way
            launch.fail(error)
        try:
            self._cuda.record(launch.event, self._stream)
        except Exception as error:  # its end will not be known: the GPU is given up where that matters
            launch.fail(error)
            return
        launch.started_at = time.monotonic()
        self._in_flight.append(launch)
        launch.notify_enqueued()

    def _poll_in_flight(self) -> None:
        while self._in_flight:
            launch = self._in_flight[0]
            failed = launch.error
            try:
                if not self._cuda.is_event_done(launch.event):
                    launch.poll()
                    return
            except Exception as error:
                failed = failed or error
            self._in_flight.popleft()
            self._events.append(launch.event)
            launch.finish(failed)
            del launch  # and with it the memory that it looks into
