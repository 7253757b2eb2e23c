"""`python -m benchmarks.compare` (`make bench`): collectived beside Gloo, MPI and TensorFlow, in one run.

All processes of all libraries are started once and stay. At each size each library has a turn, several rounds, so that
all are affected alike if the machine becomes slower. Sums of float32 are checked after every turn. The figure is the
median over all calls of the time from call to return, on the rank where that call took longest.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks import conditions, goals, schedule, tables
from benchmarks.cases import ALL, ALL_REDUCE, Case, parse
from benchmarks.contestants import ALL as CONTESTANTS
from benchmarks.contestants import KEYS
from benchmarks.distance import Distance
from benchmarks.measure import run
from benchmarks.page import write
from benchmarks.peers import ORDINARY
from benchmarks.record import Run
from benchmarks.verdicts import table

_ABOUT_OTHERS = """\
The other operations, with ordinary arrays. In brackets: how many times as long Open MPI, MPICH and Gloo take, in this
order, as far as they were measured; of a worker per rank, Gloo alone. The size is that of the longer of a rank's input
and result. `send_recv` sends a value to a neighbour and gets another back."""


def main() -> int:
    options = _parser().parse_args()
    cases = options.sizes or ALL
    chosen = [contestant for contestant in CONTESTANTS if contestant.key in options.only]
    begin = time.monotonic()
    runs: list[Run] = []
    pace = schedule.QUICK if options.quick else schedule.USUAL
    with Distance() as distance:
        for index in range(options.runs):
            say(f"run {index + 1} of {options.runs}")
            runs.append(run(chosen, options.ranks, cases, pace, distance, say))
    say(f"{options.runs} runs took {(time.monotonic() - begin) / 60:.1f} minutes")
    text = report(runs, options.ranks, cases, is_distance_measured=distance.is_measured)
    print(text)
    if options.json:
        options.json.write_text(json.dumps([as_json(one) for one in runs], indent=1))
    if options.write:
        write("compare", text)
    return 1 if any(one.wrong for one in runs) else 0


def report(runs: list[Run], ranks: list[int], cases: tuple[Case, ...], *, is_distance_measured: bool) -> str:
    """Make what is printed, and written into the page.

    Args:
        is_distance_measured: that of the processors from each other.
    """
    versions = {name: version for one in runs for name, version in one.versions.items()}
    skipped = {name: why for one in runs for name, why in one.skipped.items()}
    seconds = tables.together([one.seconds for one in runs])
    parts = [f"{conditions.shown(versions)} {len(runs)} run{'s' * (len(runs) > 1)}; medians of the runs."]
    if is_distance_measured:
        turns, apart = sum(one.turns for one in runs), sum(one.apart for one in runs)
        parts.append(f"In {apart} of {turns} turns the processors were not near each other.")
    parts += [f"Not measured: {name}: {why}" for name, why in skipped.items()]
    parts += [
        f"**Wrong results**: {cell.name}, {cell.ranks} ranks, {cell.case}, {count} numbers"
        for one in runs
        for cell, count in one.wrong.items()
    ]
    reduced, others = ([case for case in cases if (case.operation == ALL_REDUCE) is of] for of in (True, False))
    if reduced:
        parts += [tables.times(seconds, number, reduced) for number in ranks]
    if others:
        parts.append(_ABOUT_OTHERS)
        places = [(n, place) for n in ranks for place in (ORDINARY, goals.TCP)]
        parts += filter(None, (tables.others(seconds, n, place, others) for n, place in places))
    lines = goals.worst_of([one.seconds for one in runs])
    parts.append(f"The goals, the worst of {len(runs)}; in brackets the size where that was:")
    parts.append(table(lines))
    parts.append(f"{sum(line.met for line in lines)} of {len(lines)} goals are met.")
    return "\n\n".join(parts)


def as_json(one: Run) -> dict[str, object]:
    return {
        "seconds": [{**asdict(cell), "seconds": value} for cell, value in one.seconds.items()],
        "wrong": [{**asdict(cell), "numbers": count} for cell, count in one.wrong.items()],
        "skipped": one.skipped,
        "turns": one.turns,
        "apart": one.apart,
        "versions": one.versions,
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--only", type=_keys, default=KEYS, metavar="A,B", help=f"of {', '.join(KEYS)}")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        metavar="A,B",
        help="such as '64 KiB,64 x 1 KiB,broadcast 1 MiB,barrier'; an all_reduce where no operation is named",
    )
    parser.add_argument("--ranks", type=_numbers, default=[2, 4], metavar="N,M", help="how many; 2,4 by default")
    parser.add_argument("--runs", type=int, default=1, help="the worst of them is held to the goals")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all medians, for programs")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/internals/performance.md")
    return parser


def _keys(text: str) -> tuple[str, ...]:
    keys = tuple(part.strip() for part in text.split(","))
    if unknown := [key for key in keys if key not in KEYS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not known: expected some of {', '.join(KEYS)}")
    return keys


def _sizes(text: str) -> tuple[Case, ...]:
    try:
        return tuple(map(parse, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not understood: expected such as 2,4") from None
    if min(numbers) < 2:
        raise argparse.ArgumentTypeError(f"{min(numbers)} ranks cannot sum anything: expected 2 or more")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
