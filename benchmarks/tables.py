"""The measurements as Markdown. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks import contestants as who
from benchmarks.cases import BARRIER, MOVING, Case
from benchmarks.goals import best, our_time
from benchmarks.peers import ORDINARY, OWNED
from benchmarks.record import Cell
from benchmarks.verdicts import number

_ROWS = (
    (who.HOST.name, OWNED, f"**collectived**, one worker, `{OWNED}`"),
    (who.HOST.name, ORDINARY, f"**collectived**, one worker, {ORDINARY}"),
    (who.FOLD.name, "", "floor: a NumPy fold of the same buffers"),
    (who.OPENMPI.name, "", "Open MPI, shared memory"),
    (who.MPICH.name, "", "MPICH, shared memory"),
    (who.TCP.name, OWNED, f"**collectived**, a worker per rank, TCP, `{OWNED}`"),
    (who.TCP.name, ORDINARY, f"**collectived**, a worker per rank, TCP, {ORDINARY}"),
    (who.SOCKETS.name, "", "floor: plain sockets, the bytes of a ring, TCP"),
    (who.GLOO.name, "", "Gloo, TCP"),
    (who.TENSORFLOW.name, "", "TensorFlow RING, gRPC"),
)


def together(runs: Sequence[Mapping[Cell, float]]) -> dict[Cell, float]:
    """The median of the runs' medians."""
    cells = dict.fromkeys(cell for run in runs for cell in run)
    return {cell: statistics.median(run[cell] for run in runs if cell in run) for cell in cells}


def times(seconds: Mapping[Cell, float], ranks: int, cases: Sequence[Case]) -> str:
    """One row per contestant, one column per size."""
    rows = [f"| {ranks} ranks | {' | '.join(map(str, cases))} |", f"|---|{'---:|' * len(cases)}"]
    for name, variant, shown in _ROWS:
        cells = [seconds.get(Cell(ranks, name, variant, str(case))) for case in cases]
        if any(cell is not None for cell in cells):
            rows.append(f"| {shown} | {' | '.join('' if cell is None else duration(cell) for cell in cells)} |")
    return "\n".join(rows)


def others(seconds: Mapping[Cell, float], ranks: int, place: str, cases: Sequence[Case]) -> str:
    """One row per operation beside all_reduce: our time, and in brackets how many times as long others take."""
    names = (who.OPENMPI.name, who.MPICH.name, who.GLOO.name) if place == ORDINARY else (who.GLOO.name,)
    where = "one worker" if place == ORDINARY else "a worker per rank, TCP"
    sizes = list(dict.fromkeys(case.size_name for case in cases if case.operation in MOVING))
    rows = [f"| {ranks} ranks, {where} | {' | '.join(sizes)} |", f"|---|{'---:|' * len(sizes)}"]
    for operation in (*MOVING, BARRIER):
        shown = {}
        for case in cases:
            ours = our_time(seconds, ranks, place, case) if case.operation == operation else None
            if ours is not None:
                ratios = [theirs / ours for name in names if (theirs := best(seconds, ranks, (name,), case))]
                beside = f" ({' / '.join(map(number, ratios))})" if ratios else ""
                shown[case.size_name or sizes[0]] = duration(ours) + beside
        if shown:
            rows.append(f"| {operation} | {' | '.join(shown.get(size, '') for size in sizes)} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def duration(seconds: float) -> str:
    """`45 µs`, `1.23 ms`, `2.50 s`."""
    if seconds < 0.99e-3:
        return f"{number(seconds * 1e6)} µs"
    return f"{number(seconds * 1e3)} ms" if seconds < 0.99 else f"{number(seconds)} s"
