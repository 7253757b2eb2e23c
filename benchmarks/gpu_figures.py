"""Measurements on a GPU: figures, tables and goals. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cases import Case
from benchmarks.gpu_values import ITEM
from benchmarks.peers import COPY, OWNED
from benchmarks.tables import duration
from benchmarks.verdicts import Line, number, table, worst

ONE_GPU, NCCL = "one GPU", "NCCL"  # places
OURS, RAW, TORCH, DEVICE = "collectived", "raw NCCL", "PyTorch's NCCL", "the GPU alone"
TRAFFIC_GOAL, LATENCY_GOAL, SPEED_GOAL = 0.8, 50e-6, 0.97
FAST_FROM = 8 << 20  # bytes from which NCCL's speed is to be reached
_NOT_YET = "Nothing was measured."


@dataclass(frozen=True, slots=True)
class Figure:
    """
    place, ranks: where it was measured, and by how many ranks.
    name, variant: of the library, and of the place of its arrays.
    bytes: of the array of a rank.
    seconds: the median of all calls. fastest, slowest: the tenth and the ninetieth percentile. calls: how many.
    """

    place: str
    ranks: int
    name: str
    variant: str
    bytes: int
    seconds: float
    fastest: float
    slowest: float
    calls: int

    @classmethod
    def of(cls, place: str, ranks: int, name: str, variant: str, nbytes: int, times: Sequence[float]) -> Figure:
        ordered = sorted(times)
        fastest, slowest = (ordered[round(part * (len(ordered) - 1))] for part in (0.1, 0.9))
        return cls(place, ranks, name, variant, nbytes, statistics.median(times), fastest, slowest, len(times))

    def __str__(self) -> str:
        return f"{self.name} {self.variant}".strip() + f" {duration(self.seconds)}"


def report(figures: Sequence[Figure], heading: str, failures: Iterable[str] = ()) -> str:
    """The text that is printed, and written into the page."""
    parts = [heading, *(f"Not measured: {one}." for one in failures)]
    if not figures:
        return "\n\n".join([*parts, _NOT_YET])
    for ranks in sorted({one.ranks for one in figures if one.place == ONE_GPU}):
        parts.append(one_gpu_table([one for one in figures if (one.place, one.ranks) == (ONE_GPU, ranks)], ranks))
    if limit := traffic_limit(figures):
        parts.append(
            f"A copy on the GPU moves {number(limit / 1e12)} TB/s, bytes read plus written. In brackets: which part of"
            " that is what every rank's value read once and every result written once come to."
        )
    by_nccl = [one for one in figures if one.place == NCCL]
    if by_nccl:
        parts.append(nccl_table(by_nccl))
        parts.append("In brackets: how many times as long raw NCCL and PyTorch's NCCL take.")
    goals = list(lines(figures))
    if goals:
        parts += [table(goals), f"{sum(line.met for line in goals)} of {len(goals)} goals are met."]
    return "\n\n".join(parts)


def traffic_limit(figures: Iterable[Figure], ranks: int | None = None) -> float | None:
    """Bytes per second that a copy reads and writes, while so many ranks were measured; None: over all of them."""
    found = [
        2 * one.bytes / one.seconds
        for one in figures
        if one.name == DEVICE and one.variant == COPY and ranks in (None, one.ranks)
    ]
    return statistics.median(found) if found else None


def traffic_part(figure: Figure, limit: float) -> float:
    """Which part of the limit it is when each rank's value is read once, and each result written once."""
    return 2 * figure.ranks * figure.bytes / figure.seconds / limit


def one_gpu_table(figures: Sequence[Figure], ranks: int) -> str:
    """A row for each kind of arrays and for the kernel alone; times, and parts of the traffic limit."""
    limit = traffic_limit(figures, ranks)
    rows: dict[str, dict[int, str]] = {}
    for one in figures:
        if one.variant == COPY:
            continue
        row = "the kernel alone" if one.name == DEVICE else f"**{OURS}**, {_arrays(one.variant)}"
        part = f" ({traffic_part(one, limit):.2f})" if limit else ""
        rows.setdefault(row, {})[one.bytes] = duration(one.seconds) + part
    return _table(f"{ranks} ranks of one GPU", rows)


def nccl_table(figures: Sequence[Figure]) -> str:
    """A row for each contestant; beside ours, how many times as long the others take."""
    rows: dict[str, dict[int, str]] = {}
    for one in figures:
        beside = ""
        if one.name == OURS:
            ratios = [
                theirs.seconds / one.seconds
                for theirs in (find(figures, RAW, one.bytes), find(figures, TORCH, one.bytes))
                if theirs
            ]
            beside = f" ({' / '.join(map(number, ratios))})" if ratios else ""
        row = f"**{OURS}**, {_arrays(one.variant)}" if one.name == OURS else one.name
        rows.setdefault(row, {})[one.bytes] = duration(one.seconds) + beside
    return _table("2 workers of one GPU, NCCL by sockets", rows)


def find(figures: Iterable[Figure], name: str, nbytes: int, variant: str = "") -> Figure | None:
    return next((one for one in figures if (one.name, one.bytes, one.variant) == (name, nbytes, variant)), None)


def lines(figures: Sequence[Figure]) -> Iterable[Line]:
    """The figures that are compared with the goals."""
    for ranks in sorted({one.ranks for one in figures if one.place == ONE_GPU}):
        limit = traffic_limit(figures, ranks)
        ours = [one for one in figures if (one.place, one.ranks, one.name) == (ONE_GPU, ranks, OURS)]
        if not limit or not ours:
            continue
        largest = max(one.bytes for one in ours)
        what = f"{ranks} ranks of one GPU, part of the memory's traffic limit at {show_size(largest)}"
        yield worst(
            Line(what, traffic_part(one, limit), "≥", TRAFFIC_GOAL, note=_arrays(one.variant))
            for one in ours
            if one.bytes == largest
        )
    by_nccl = [one for one in figures if one.place == NCCL]
    pairs = [
        (one, raw)
        for one in by_nccl
        if one.name == OURS and one.variant == OWNED and (raw := find(by_nccl, RAW, one.bytes)) is not None
    ]
    yield from (
        Line(
            f"NCCL, {show_size(ITEM)}: longer than raw NCCL by",
            (one.seconds - raw.seconds) * 1e6,
            "≤",
            LATENCY_GOAL * 1e6,
            "µs",
        )
        for one, raw in pairs
        if one.bytes == ITEM
    )
    fast = [
        Line(
            f"NCCL, from {show_size(FAST_FROM)}: raw NCCL / ours",
            raw.seconds / one.seconds,
            "≥",
            SPEED_GOAL,
            note=show_size(one.bytes),
        )
        for one, raw in pairs
        if one.bytes >= FAST_FROM
    ]
    if fast:
        yield worst(fast)


def show_size(nbytes: int) -> str:
    """`4 B`, `32 KiB`, `1 GiB`."""
    return f"{nbytes >> 30} GiB" if nbytes % (1 << 30) == 0 else str(Case(1, nbytes // ITEM))


def _arrays(variant: str) -> str:
    return f"`{OWNED}`" if variant == OWNED else f"arrays of {variant}"


def _table(corner: str, rows: dict[str, dict[int, str]]) -> str:
    sizes = sorted({size for by_size in rows.values() for size in by_size})
    shown: list[Any] = [f"| {corner} | {' | '.join(map(show_size, sizes))} |", f"|---|{'---:|' * len(sizes)}"]
    shown += [f"| {row} | {' | '.join(by_size.get(size, '') for size in sizes)} |" for row, by_size in rows.items()]
    return "\n".join(shown)
