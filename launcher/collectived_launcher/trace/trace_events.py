"""Slices of time on tracks, as trace viewers want them: on one track they nest or follow one another. Pure.

A *track* is what a viewer shows as a thread. Slices of a track that overlap without nesting, such as several
collectives of one rank that are under way at once, are put on further *rows* of it, each a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Event = dict[str, Any]


@dataclass(slots=True)
class Slice:
    """`begin` and `end` are seconds of the trace's clock; `children` are cut to lie within, and follow one another.

    args: makes its arguments when it is written, and not before: there are very many slices.
    """

    track: str
    name: str
    category: str
    begin: float
    end: float
    args: Callable[[], dict[str, Any]] = dict
    children: Sequence[Slice] = ()
    colour: str = ""
    tid: int = 0  # where it was put
    begin_ns: int = 0  # nanoseconds since the trace's beginning
    end_ns: int = 0


class TraceProcess:
    """A process in the viewer."""

    def __init__(self, pid: int, name: str, label: str = "") -> None:
        self.pid = pid
        self.name = name
        self.label = label
        self.slices: list[Slice] = []
        self._track_order: dict[str, int] = {}  # of tracks

    def add_track(self, name: str) -> None:
        """Says that a track is there, below those before it, whether something happens on it or not."""
        self._track_order.setdefault(name, len(self._track_order))

    def add_slice(self, piece: Slice) -> None:
        self.add_track(piece.track)
        self.slices.append(piece)

    def events(self, zero: float) -> Iterator[Event]:
        """Metadata, then slices by the time at which they begin; `zero` is the trace's beginning."""
        yield _metadata_event(self.pid, 0, "process_name", name=self.name)
        yield _metadata_event(self.pid, 0, "process_sort_index", sort_index=self.pid)
        if self.label:
            yield _metadata_event(self.pid, 0, "process_labels", labels=self.label)
        rows: dict[str, list[int]] = {name: [] for name in self._track_order}  # when the last slice of each row ends
        threads: dict[tuple[str, int], int] = {(name, 0): number for number, name in enumerate(self._track_order, 1)}
        for piece in self.slices:
            piece.begin_ns, piece.end_ns = _to_nanoseconds(piece.begin, piece.end, zero)
        placed = sorted(self.slices, key=lambda piece: (piece.begin_ns, -piece.end_ns))
        for piece in placed:
            row = _assign_row(rows[piece.track], piece)
            piece.tid = threads.setdefault((piece.track, row), len(threads) + 1)
        for (name, row), tid in threads.items():
            yield _metadata_event(self.pid, tid, "thread_name", name=f"{name} ({row + 1})" if row else name)
            yield _metadata_event(self.pid, tid, "thread_sort_index", sort_index=100 * self._track_order[name] + row)
        for piece in placed:
            yield from self._complete_events(piece, piece.begin_ns, piece.end_ns, piece.tid, zero)

    def _complete_events(self, piece: Slice, first: int, last: int, tid: int, zero: float) -> Iterator[Event]:
        event: Event = {
            "ph": "X",
            "pid": self.pid,
            "tid": tid,
            "ts": first / 1000,
            "dur": (last - first) / 1000,
            "name": piece.name,
            "cat": piece.category,
            "args": piece.args(),
        }
        if piece.colour:
            event["cname"] = piece.colour
        yield event
        at = first
        for inner in sorted(piece.children, key=lambda inner: (inner.begin, inner.end)):
            begin, end = _to_nanoseconds(inner.begin, inner.end, zero)
            begin = min(max(begin, at), last)
            at = min(max(end, begin), last)
            yield from self._complete_events(inner, begin, at, tid, zero)


class FlowEndpoint(NamedTuple):
    """Where a slice was put: all that an arrow needs of it."""

    pid: int
    tid: int
    begin_ns: int
    end_ns: int


def flow_events(number: int, name: str, source: FlowEndpoint, target: FlowEndpoint) -> Iterator[Event]:
    """An arrow from one slice's beginning to another's end; none where the clocks say that it ended before it began."""
    if target.end_ns - 1 < max(source.begin_ns, target.begin_ns):
        return
    common = {"cat": "flow", "name": name, "id": number}
    yield {"ph": "s", "pid": source.pid, "tid": source.tid, "ts": source.begin_ns / 1000, **common}
    yield {"ph": "f", "bp": "e", "pid": target.pid, "tid": target.tid, "ts": (target.end_ns - 1) / 1000, **common}


def _metadata_event(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": args}


def _to_nanoseconds(begin: float, end: float, zero: float) -> tuple[int, int]:
    first = max(0, round((begin - zero) * 1e9))
    return first, max(first, round((end - zero) * 1e9))


def _assign_row(rows: list[int], piece: Slice) -> int:
    """The first row that is free when the slice begins, which takes it."""
    for number, free in enumerate(rows):
        if free <= piece.begin_ns:
            rows[number] = max(piece.end_ns, piece.begin_ns)
            return number
    rows.append(piece.end_ns)
    return len(rows) - 1
