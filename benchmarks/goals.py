"""What one run was to reach: each goal with the place where it was missed most, or met most narrowly. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks import contestants as who
from benchmarks.cases import ALL, MANY, Case, parse
from benchmarks.peers import ORDINARY, OWNED
from benchmarks.record import REJOIN, Cell
from benchmarks.verdicts import Line, worst

Seconds = Mapping[Cell, float]
RANKS = (2, 4)
_SINGLE = tuple(case for case in ALL if case.tensors == 1)
_4B, _64K, _1M, _16M = map(parse, ("4 B", "64 KiB", "1 MiB", "16 MiB"))
_OURS = {OWNED: (who.HOST.name, OWNED), ORDINARY: (who.HOST.name, ORDINARY), "tcp": (who.TCP.name, OWNED)}
_SHOWN = {OWNED: f"one host, {OWNED}", ORDINARY: f"one host, {ORDINARY}", "tcp": "loopback TCP"}
_MPI = (who.OPENMPI.name, who.MPICH.name)


def lines(seconds: Seconds) -> list[Line]:
    """The goals that what was measured can be held to."""
    found: list[Line] = []
    for ranks in RANKS:
        found += _one_host(seconds, ranks)
        found += _ordinary(seconds, ranks)
        found += _tcp(seconds, ranks)
        for place in _OURS:
            found += _many(seconds, ranks, place)
        found += _absolute(seconds, ranks)
    return found


def worst_of(runs: Sequence[Seconds]) -> list[Line]:
    """The worst of several runs, goal by goal."""
    by_goal: dict[str, list[Line]] = {}
    for seconds in runs:
        for line in lines(seconds):
            by_goal.setdefault(line.what, []).append(line)
    return [worst(found) for found in by_goal.values()]


def _from(least: Case) -> list[Case]:
    return [case for case in _SINGLE if case.size >= least.size]


def _to(most: Case) -> list[Case]:
    return [case for case in _SINGLE if case.size <= most.size]


def _one_host(seconds: Seconds, ranks: int) -> Iterator[Line]:
    gloo = (who.GLOO.name,)
    small, others = [_4B], [case for case in _SINGLE if case != _4B]
    yield from _ratio(seconds, ranks, OWNED, gloo, "Gloo at 4 B", small, 4.0)
    yield from _ratio(seconds, ranks, OWNED, gloo, "Gloo at every other size", others, 5.0)
    if ranks == 4:
        yield from _ratio(seconds, ranks, OWNED, _MPI, "best MPI at 64 KiB and 1 MiB", [_64K, _1M], 1.0)
    yield from _ratio(seconds, ranks, OWNED, _MPI, "best MPI at 16 MiB", [_16M], 2.0)
    yield from _ratio(seconds, ranks, OWNED, _MPI, "best MPI at 64 MiB", [_SINGLE[-1]], 3.0)
    fold = [
        (ours / alone, str(case))
        for case in _from(_16M)
        if (ours := _ours(seconds, ranks, OWNED, case)) and (alone := _best(seconds, ranks, (who.FOLD.name,), case))
    ]
    if fold:
        value, where = max(fold)
        yield Line(f"{ranks} ranks, {_SHOWN[OWNED]}: ours / fold alone, from 16 MiB", value, "≤", 1.4, "", where)


def _ordinary(seconds: Seconds, ranks: int) -> Iterator[Line]:
    gloo, mpi = (2.0, 0.8) if ranks == 2 else (4.0, 1.3)
    yield from _ratio(seconds, ranks, ORDINARY, (who.GLOO.name,), "Gloo", _SINGLE, gloo)
    yield from _ratio(seconds, ranks, ORDINARY, _MPI, "best MPI, from 16 MiB", _from(_16M), mpi)


def _tcp(seconds: Seconds, ranks: int) -> Iterator[Line]:
    gloo, large = (who.GLOO.name,), 1.0 if ranks == 2 else 1.3
    yield from _ratio(seconds, ranks, "tcp", gloo, "Gloo, up to 1 MiB", _to(_1M), 1.3)
    yield from _ratio(seconds, ranks, "tcp", gloo, "Gloo, from 16 MiB", _from(_16M), large)
    yield from _ratio(seconds, ranks, "tcp", (who.TENSORFLOW.name,), "TensorFlow", _SINGLE, 5.0)
    yield from _ratio(seconds, ranks, "tcp", (who.SOCKETS.name,), "plain sockets, from 16 MiB", _from(_16M), 0.7)


def _many(seconds: Seconds, ranks: int, place: str) -> Iterator[Line]:
    many, one = _ours(seconds, ranks, place, MANY), _ours(seconds, ranks, place, _64K)
    if many and one:
        yield Line(f"{ranks} ranks, {_SHOWN[place]}: {MANY} in one call / one of 64 KiB", many / one, "≤", 2.0)


def _absolute(seconds: Seconds, ranks: int) -> Iterator[Line]:
    if ranks == 2 and (call := _ours(seconds, ranks, OWNED, _4B)):
        yield Line(f"2 ranks, {_SHOWN[OWNED]}: 4 B", call * 1e6, "≤", 45.0, "µs")
    if again := seconds.get(Cell(ranks, who.HOST.name, "", REJOIN)):
        yield Line(f"{ranks} ranks, one host: joining a warm group name again", again * 1e3, "≤", 50.0, "ms")


def _ratio(
    seconds: Seconds, ranks: int, place: str, names: Iterable[str], against: str, cases: Iterable[Case], goal: float
) -> Iterator[Line]:
    """Their time / our time, at the size where that is least."""
    names = tuple(names)
    found = [
        (theirs / ours, str(case))
        for case in cases
        if (ours := _ours(seconds, ranks, place, case)) and (theirs := _best(seconds, ranks, names, case))
    ]
    if found:
        value, where = min(found)
        yield Line(f"{ranks} ranks, {_SHOWN[place]}: {against} / ours", value, "≥", goal, "", where)


def _ours(seconds: Seconds, ranks: int, place: str, case: Case) -> float | None:
    name, variant = _OURS[place]
    return seconds.get(Cell(ranks, name, variant, str(case)))


def _best(seconds: Seconds, ranks: int, names: Iterable[str], case: Case) -> float | None:
    found = [cell for name in names if (cell := seconds.get(Cell(ranks, name, "", str(case)))) is not None]
    return min(found) if found else None
