"""The terminal of `collectived bench`: takes what clients print, keeps what they measured, and shows how far they are.

Standard output is left to the result. On standard error there is progress, as a bar where that is a terminal, and
whatever clients and daemons say that is no event.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from collectived_launcher.bench.record import Record, apply_event, parse_event
from collectived_launcher.bench.tables import format_number
from collectived_launcher.hosts.output import Terminal
from collectived_proto.report.quantities import format_round_bytes

_REFRESH_SECONDS = 10.0  # seconds


class Screen(Terminal):
    """Stands where `collectived launch` has a terminal that shows all lines of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._refresh_thread: threading.Thread | None = None

    def __enter__(self) -> Screen:
        if sys.stderr.isatty():
            # Drawn when something is heard; between that once in ten seconds, which costs the ranks no time.
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[last]}"),
                console=Console(stderr=True),
                auto_refresh=False,
                transient=True,
            )
            self._task = self._progress.add_task("starting", total=None, last="")
            self._progress.start()
            self._progress.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._refresh_thread is not None:
            self._refresh_thread.join()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _refresh_periodically(self) -> None:
        """Shows that it goes on: one size may take minutes."""
        while not self._stop.wait(_REFRESH_SECONDS):
            if self._progress is not None:
                self._progress.refresh()
            else:
                super().say(
                    f"collectived bench: {describe_progress(self.record)}, "
                    f"{time.monotonic() - self._began:.0f} s so far"
                )

    def show(self, stream: int, who: str, line: bytes, colour: int | None = None) -> None:
        told = parse_event(line) if stream == 1 else None
        if told is not None:
            apply_event(self.record, told)
            self._update_progress()
            if self._refresh_thread is None:  # not before: processes are started by one thread alone
                self._refresh_thread = threading.Thread(target=self._refresh_periodically, daemon=True)
                self._refresh_thread.start()
        elif self._progress is not None:
            self._print(f"[{who}] {line.decode(errors='replace')}")
        else:
            super().show(2, who, line, colour)

    def say(self, text: str, stream: int = 2) -> None:
        """The launcher's own words, but for its opening line: the result says what ran where."""
        if stream == 1:
            return
        if self._progress is not None:
            self._print(text)
        else:
            super().say(text)

    def _print(self, text: str) -> None:
        assert self._progress is not None
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _update_progress(self) -> None:
        if self._progress is None or self.record.conditions is None:
            return
        description = describe_current(self.record)
        last = ""
        if self.record.rows:
            row = self.record.rows[-1]
            last = f"{format_round_bytes(row['size_bytes'])}: {format_number(row['p50_seconds'] * 1e6)} µs"
        rows, total = len(self.record.rows), len(self.record.sizes)
        self._progress.update(self._task, description=description, total=total, completed=rows, last=last)
        self._progress.refresh()


def describe_current(record: Record) -> str:
    """What is being measured: `all_reduce 64 MiB × 130`."""
    if record.conditions is None:
        return "starting"
    operation = str(record.conditions["operation"])
    if record.current is None:
        return operation
    nbytes, iterations = record.current
    return f"{operation} {format_round_bytes(nbytes)} × {iterations}"


def describe_progress(record: Record) -> str:
    """The same, and how far it is, in words."""
    done = f", {len(record.rows)} of {len(record.sizes)} sizes done" if record.sizes else ""
    return f"{describe_current(record)}{done}"
