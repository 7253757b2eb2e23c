"""The thread that goes on with asynchronous calls of a segment that need it, while no caller waits for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from collectived.shared.segment_letters import Announcements
from collectived.shared.segment_repeats import RUN_SECONDS
from collectived_native import core

_COLLECT_SECONDS = 1.0


class Describer:
    """Of one channel; there is a thread as long as there are calls to look after.

    Args:
        mutex: the channel's lock.
        find_engine: where such calls are, or soon may be if it is given True; else None; called under that lock.
        collect: goes on with what comes there within so many nanoseconds.
        fail: ends the generation with an error of this process.
    """

    def __init__(
        self,
        mutex: threading.Lock,
        announcements: Announcements,
        find_engine: Callable[[bool], core.Engine | None],
        collect: Callable[[core.Engine, int], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._mutex = mutex
        self._announcements = announcements
        self._find_engine = find_engine
        self._collect = collect
        self._fail = fail
        self._is_running = False  # under the mutex

    def start(self) -> bool:
        """Have a thread go on with them; whether there was none yet."""
        with self._mutex:
            was_running, self._is_running = self._is_running, True
        if was_running:
            return False
        try:
            threading.Thread(target=self._run, name="collectived-describer", daemon=True).start()
        except BaseException:
            self._is_running = False
            raise
        return True

    def _run(self) -> None:
        """Whatever happens in this thread, the calls that it looks after go on or end."""
        try:
            while self._go_on():
                pass
        except Exception as error:
            self._is_running = False
            self._fail(error)

    def _go_on(self) -> bool:
        """Look after what is there; whether there may be more later."""
        is_busy = self._announcements.announce_old(RUN_SECONDS)
        with self._mutex:
            engine = self._find_engine(is_busy)
            if engine is None:
                self._is_running = False
                return False
        with contextlib.suppress(RuntimeError):  # it has been detached since
            self._collect(engine, int((RUN_SECONDS if is_busy else _COLLECT_SECONDS) * 1e9))
        return True
