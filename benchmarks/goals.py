"""The goals of a run: each with the place where it was missed most, or met most narrowly. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks import contestants as who
from benchmarks.cases import ALL_REDUCE, BARRIER, MANY, MOVING, OTHERS, SIZES, Case, parse
from benchmarks.peers import ORDINARY, OWNED
from benchmarks.record import REJOIN, Cell
from benchmarks.verdicts import Line, worst

Seconds = Mapping[Cell, float]
RANKS = (2, 4)
TCP = "tcp"
_SINGLE = tuple(case for case in SIZES if case.tensors == 1)
_4B, _1K, _64K, _1M, _16M = map(parse, ("4 B", "1 KiB", "64 KiB", "1 MiB", "16 MiB"))
_OURS = {OWNED: (who.HOST.name, OWNED), ORDINARY: (who.HOST.name, ORDINARY), TCP: (who.TCP.name, ORDINARY)}
_SHOWN = {OWNED: f"one host, {OWNED}", ORDINARY: f"one host, {ORDINARY}", TCP: "loopback TCP"}
_GLOO = (who.GLOO.name,)
_MPI = (who.OPENMPI.name, who.MPICH.name)
_SMALL = ("broadcast", "gather", "scatter", BARRIER, "send_recv")


def lines(seconds: Seconds) -> list[Line]:
    """The goals that what was measured can be held to."""
    found: list[Line] = []
    for ranks in RANKS:
        found += _one_host(seconds, ranks)
        found += _others_on_one_host(seconds, ranks)
        found += _tcp(seconds, ranks)
        found += _rejoin(seconds, ranks)
    return found


def worst_of(runs: Sequence[Seconds]) -> list[Line]:
    """The worst of several runs, goal by goal."""
    by_goal: dict[str, list[Line]] = {}
    for seconds in runs:
        for line in lines(seconds):
            by_goal.setdefault(line.what, []).append(line)
    return [worst(found) for found in by_goal.values()]


def between(least: Case, most: Case | None = None, operation: str = ALL_REDUCE) -> list[Case]:
    """Sizes at which an operation is measured, one array in a call."""
    cases = _SINGLE if operation == ALL_REDUCE else [case for case in OTHERS if case.operation == operation]
    return [case for case in cases if least.size <= case.size <= (most or _SINGLE[-1]).size]


def _one_host(seconds: Seconds, ranks: int) -> Iterator[Line]:
    if ranks == 2:
        for place in (ORDINARY, OWNED):
            yield from _ratio(seconds, ranks, place, _MPI[:1], "Open MPI at 4 B", [_4B], 1.0)
            yield from _ratio(seconds, ranks, place, _GLOO, "Gloo at 4 B", [_4B], 50.0)
        yield from _ratio(seconds, ranks, ORDINARY, _MPI, "best MPI, 1 KiB to 1 MiB", between(_1K, _1M), 1.0)
    else:
        yield from _ratio(seconds, ranks, ORDINARY, _MPI, "best MPI, up to 1 MiB", between(_4B, _1M), 0.8)
    yield from _ratio(seconds, ranks, ORDINARY, _MPI, "best MPI, from 16 MiB", between(_16M), 1.5)
    fold = [
        (ours / alone, str(case))
        for case in between(_16M)
        if (ours := our_time(seconds, ranks, OWNED, case)) and (alone := best(seconds, ranks, (who.FOLD.name,), case))
    ]
    if fold:
        value, where = max(fold)
        yield Line(f"{ranks} ranks, {_SHOWN[OWNED]}: ours / fold alone, from 16 MiB", value, "≤", 1.0, "", where)
    many, one = (our_time(seconds, ranks, ORDINARY, case) for case in (MANY, _64K))
    if many and one:
        yield Line(f"{ranks} ranks, {_SHOWN[ORDINARY]}: {MANY} in one call / one of 64 KiB", many / one, "≤", 4.0)


def _others_on_one_host(seconds: Seconds, ranks: int) -> Iterator[Line]:
    if ranks == 2:
        small = [case for case in OTHERS if case.operation in _SMALL and case.size <= _4B.size]
        for case in small:
            name = str(case)
            yield from _ratio(seconds, ranks, ORDINARY, _MPI, f"best MPI, {name}", [case], 0.5)
            yield from _ratio(seconds, ranks, ORDINARY, _GLOO, f"Gloo, {name}", [case], 20.0)
    for operation in MOVING:
        cases = between(_64K, operation=operation)
        yield from _ratio(
            seconds, ranks, ORDINARY, (*_MPI, *_GLOO), f"best MPI or Gloo, {operation} from 64 KiB", cases, 1.0
        )


def _tcp(seconds: Seconds, ranks: int) -> Iterator[Line]:
    small, large = (1.3, 1.05) if ranks == 2 else (1.0, 1.0)
    for operation in (ALL_REDUCE, *MOVING, BARRIER):
        up_to = [parse(BARRIER)] if operation == BARRIER else between(_4B, _1M, operation)
        beyond = [] if operation == BARRIER else between(_16M, operation=operation)
        yield from _ratio(seconds, ranks, TCP, _GLOO, f"Gloo, {operation} up to 1 MiB", up_to, small)
        yield from _ratio(seconds, ranks, TCP, _GLOO, f"Gloo, {operation} from 16 MiB", beyond, large)
    yield from _ratio(seconds, ranks, TCP, (who.TENSORFLOW.name,), "TensorFlow", _SINGLE, 5.0)
    yield from _ratio(seconds, ranks, TCP, (who.SOCKETS.name,), "plain sockets, from 1 MiB", between(_1M), 0.9)


def _rejoin(seconds: Seconds, ranks: int) -> Iterator[Line]:
    if again := seconds.get(Cell(ranks, who.HOST.name, "", REJOIN)):
        yield Line(f"{ranks} ranks, one host: joining a warm group name again", again * 1e3, "≤", 50.0, "ms")


def _ratio(
    seconds: Seconds, ranks: int, place: str, names: Iterable[str], against: str, cases: Iterable[Case], goal: float
) -> Iterator[Line]:
    """Their time / our time, at the size where that is least."""
    names = tuple(names)
    found = [
        (theirs / ours, case.size_name)
        for case in cases
        if (ours := our_time(seconds, ranks, place, case)) and (theirs := best(seconds, ranks, names, case))
    ]
    if found:
        value, where = min(found)
        yield Line(f"{ranks} ranks, {_SHOWN[place]}: {against} / ours", value, "≥", goal, "", where)


def our_time(seconds: Seconds, ranks: int, place: str, case: Case) -> float | None:
    name, variant = _OURS[place]
    return seconds.get(Cell(ranks, name, variant, str(case)))


def best(seconds: Seconds, ranks: int, names: Iterable[str], case: Case) -> float | None:
    found = [cell for name in names if (cell := seconds.get(Cell(ranks, name, "", str(case)))) is not None]
    return min(found) if found else None
