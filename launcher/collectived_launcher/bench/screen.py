"""The terminal of `collectived bench`: takes what clients print, keeps what they measured, and shows how far they are.

Standard output is left to the result. On standard error there is progress, as a bar where that is a terminal, and
whatever clients and daemons say that is no event.
"""

from __future__ import annotations

from types import TracebackType

from collectived_launcher.bench.record import Record, apply_event, parse_event
from collectived_launcher.bench.tables import format_number
from collectived_launcher.hosts.output import Terminal
from collectived_proto.report.progress import Progress
from collectived_proto.report.quantities import format_round_bytes


class Screen(Terminal):
    """Stands where `collectived launch` has a terminal that shows all lines of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        # Watched only when something is measured: until then processes are started, by one thread alone.
        self._progress = Progress("collectived bench", "starting", noun="sizes", is_watched=False)

    def __enter__(self) -> Screen:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def show(self, stream: int, who: str, line: bytes, colour: int | None = None) -> None:
        told = parse_event(line) if stream == 1 else None
        if told is not None:
            apply_event(self.record, told)
            self._update_progress()
            self._progress.watch()
        elif self._progress.has_bar:
            self._progress.say(f"[{who}] {line.decode(errors='replace')}")
        else:
            super().show(2, who, line, colour)

    def say(self, text: str, stream: int = 2) -> None:
        """The launcher's own words, but for its opening line: the result says what ran where."""
        if stream == 1:
            return
        if self._progress.has_bar:
            self._progress.say(text)
        else:
            super().say(text)

    def draw_progress(self, what: str, done: int, total: int, noun: str) -> None:
        """While daemons start, in the one bar that there is."""
        self._progress.update(f"{what} {noun}", done, total)

    def erase_progress(self) -> None:
        self._progress.update("starting", 0, None)

    def _update_progress(self) -> None:
        if self.record.conditions is None:
            return
        last = ""
        if self.record.rows:
            row = self.record.rows[-1]
            last = f"{format_round_bytes(row['size_bytes'])}: {format_number(row['p50_seconds'] * 1e6)} µs"
        self._progress.update(describe_current(self.record), len(self.record.rows), len(self.record.sizes), last)


def describe_current(record: Record) -> str:
    """Describe the current measurement: `all_reduce 64 MiB × 130`."""
    if record.conditions is None:
        return "starting"
    operation = str(record.conditions["operation"])
    if record.current is None:
        return operation
    nbytes, iterations = record.current
    return f"{operation} {format_round_bytes(nbytes)} × {iterations}"
