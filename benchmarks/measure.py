"""One run: all contestants started, given turns at each size, and ended."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.cases import Case
from benchmarks.contestants import HOST, Contestant
from benchmarks.crew import Crew, Failed
from benchmarks.distance import Distance
from benchmarks.record import REJOIN, Cell, Run
from benchmarks.schedule import Pace, round_robin, slowest

Say = Callable[[str], None]

_ATTEMPTS = 4
"""Turns that are tried until the processors are near each other before and after one."""


@dataclass
class _Entry:
    crew: Crew
    cell: Cell
    variant: str
    turns: int = 0
    calls: int = 0
    times: list[float] = field(default_factory=list)


def run(
    contestants: Iterable[Contestant],
    ranks: Sequence[int],
    cases: Sequence[Case],
    pace: Pace,
    distance: Distance,
    say: Say,
) -> Run:
    """Measure once, in turns with the processors near each other by `distance`, where that can be had."""
    result = Run()
    for number in ranks:
        with contextlib.ExitStack() as stack:
            crews = []
            for contestant in contestants:
                try:
                    crews.append(stack.enter_context(Crew(contestant, number)))
                except Failed as failure:
                    result.skipped[contestant.name] = str(failure)
                    say(f"{contestant.name} with {number} ranks is skipped: {failure}")
            for crew in crews:
                result.versions |= crew.versions
            for case in cases:
                _measure(crews, number, case, pace, distance, result, say)
            for crew in crews:
                if crew.contestant is HOST:
                    _rejoin(crew, number, result, say)
    return result


def _measure(crews: list[Crew], ranks: int, case: Case, pace: Pace, distance: Distance, result: Run, say: Say) -> None:
    entries = [
        _Entry(crew, Cell(ranks, crew.contestant.name, variant, str(case)), variant)
        for crew in crews
        for variant in crew.contestant.variants_of(case)
    ]
    for entry in list(entries):  # how long does it take?
        if entry not in entries:
            continue
        try:
            _turn(entry, case, 3, 2, result)
            entry.calls = pace.calls(statistics.median(_turn(entry, case, 3, 1, result)))
        except Failed as failure:
            _give_up(crews, entries, entry, result, str(failure), say)
    for _, entry in list(round_robin(entries, pace.rounds)):
        if entry not in entries:
            continue
        try:
            entry.times += _near_turn(entry, case, pace, distance, result)
        except Failed as failure:
            _give_up(crews, entries, entry, result, str(failure), say)
    for entry in entries:
        result.seconds[entry.cell] = statistics.median(entry.times)
    for crew in crews:
        with contextlib.suppress(Failed):  # the next size reports it
            crew.ask(do="drop")
    shown = ", ".join(
        f"{e.cell.name} {e.variant} {result.seconds[e.cell] * 1e6:.0f}".replace("  ", " ") for e in entries
    )
    say(f"{ranks} ranks, {case}, microseconds: {shown}")


def _near_turn(entry: _Entry, case: Case, pace: Pace, distance: Distance, result: Run) -> list[float]:
    """A turn with the processors near each other before and after it; where that fails each time, the last turn."""
    result.turns += 1
    for _ in range(_ATTEMPTS):
        began_near = distance.wait()
        times = _turn(entry, case, entry.calls, pace.warmup(entry.calls), result)
        if distance.is_near() and began_near:
            return times
    result.apart += 1
    return times


def _turn(entry: _Entry, case: Case, calls: int, warmup: int, result: Run) -> list[float]:
    order = {"do": "turn", "case": str(case), "variant": entry.variant}
    answers = entry.crew.ask(**order, turn=entry.turns, calls=calls, warmup=warmup)
    entry.turns += 1  # which gives each its own numbers
    if wrong := sum(answer["wrong"] for answer in answers):
        result.wrong[entry.cell] = result.wrong.get(entry.cell, 0) + wrong
    return slowest([answer["times"] for answer in answers])


def _give_up(crews: list[Crew], entries: list[_Entry], failed: _Entry, result: Run, why: str, say: Say) -> None:
    result.skipped[failed.cell.name] = why
    say(f"{failed.cell.name} is skipped from now on: {why}")
    failed.crew.close()  # ranks that wait for a lost one may spin
    crews.remove(failed.crew)
    entries[:] = [entry for entry in entries if entry.crew is not failed.crew]


def _rejoin(crew: Crew, ranks: int, result: Run, say: Say) -> None:
    cell = Cell(ranks, crew.contestant.name, "", REJOIN)
    try:
        answers = crew.ask(do="extra", name="rejoin", calls=9)
    except Failed as failure:
        say(f"joining again with {ranks} ranks could not be measured: {failure}")
        return
    result.seconds[cell] = statistics.median(slowest([answer["times"] for answer in answers]))
