"""What was measured, as Markdown. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks import contestants as who
from benchmarks.cases import Case
from benchmarks.peers import ORDINARY, OWNED
from benchmarks.record import Cell
from benchmarks.verdicts import number

_ROWS = (
    (who.HOST.name, OWNED, f"**collectived**, one worker, `{OWNED}`"),
    (who.HOST.name, ORDINARY, f"**collectived**, one worker, {ORDINARY}"),
    (who.FOLD.name, "", "floor: a NumPy fold of the same buffers"),
    (who.OPENMPI.name, "", "Open MPI, shared memory"),
    (who.MPICH.name, "", "MPICH, shared memory"),
    (who.TCP.name, OWNED, "**collectived**, a worker per rank, TCP"),
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


def duration(seconds: float) -> str:
    """`45 µs`, `1.23 ms`, `2.50 s`."""
    if seconds < 0.99e-3:
        return f"{number(seconds * 1e6)} µs"
    return f"{number(seconds * 1e3)} ms" if seconds < 0.99 else f"{number(seconds)} s"
