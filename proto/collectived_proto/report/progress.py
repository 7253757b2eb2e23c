"""How far long work is, on standard error: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

REFRESH_SECONDS = 10.0


class Progress:
    """Shows that work goes on while its block runs. Short work prints nothing where there is no terminal.

    Args:
        command: that does it, for the lines: `collectived doctor`.
        what: is done, in a few words.
        total: how many parts it has; None: it is not known yet.
        noun: what a part is called, in the plural: `hosts`.
        is_watched: look after it from a thread, from the start; else `watch` begins with that.
    """

    def __init__(
        self, command: str, what: str, total: int | None = None, noun: str = "", *, is_watched: bool = True
    ) -> None:
        self._command, self._what, self._total, self._noun = command, what, total, noun
        self._done, self._detail = 0, ""
        self._is_watched = is_watched
        self._began = time.monotonic()
        self._lock = threading.Lock()  # parts may end in several threads
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._bar = _make_bar()
            self._bar.add_task(self._what, total=self._total, last="")
            self._bar.start()
            self._bar.refresh()
        if self._is_watched:
            self.watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @property
    def has_bar(self) -> bool:
        """Whether it is drawn."""
        return self._bar is not None

    def watch(self) -> None:
        """Say from now on that it goes on, though no part ends."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._refresh_periodically, name="progress", daemon=True)
            self._thread.start()

    def advance(self, detail: str = "") -> None:
        """One more part is done."""
        with self._lock:
            self._done, self._detail = self._done + 1, detail
        self._draw()

    def update(self, what: str, done: int, total: int | None, detail: str = "") -> None:
        """So much is done, and that comes next."""
        with self._lock:
            self._what, self._done, self._total, self._detail = what, done, total, detail
        self._draw()

    def hide(self) -> None:
        """Erase the bar, because something else is printed there. The next step draws it again."""
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def describe(self) -> str:
        """The current work, and how far it is, in words."""
        with self._lock:
            done = f", {self._done} of {self._total} {self._noun} done" if self._total else ""
            return f"{self._what}{done}"

    def _draw(self) -> None:
        if self._bar is not None:
            self._bar.start()
            self._bar.update(
                self._bar.task_ids[0],
                description=self._what,
                completed=self._done,
                total=self._total,
                last=self._detail,
                refresh=True,
            )

    def _refresh_periodically(self) -> None:
        while not self._over.wait(REFRESH_SECONDS):
            if self._bar is not None:
                self._bar.refresh()
            else:
                self.say(f"{self._command}: {self.describe()}, {time.monotonic() - self._began:.0f} s so far")


def _make_bar() -> Bar:
    """Drawn when a part has ended; between that once in ten seconds, which costs the work no time."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
    )
