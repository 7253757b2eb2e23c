"""The cost of the flight recorder for a group loop: processor time per collective, in the calls of group loops.

`python -m benchmarks.recorder --write` puts the result into docs/operate/trace.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import conditions, page, verdicts
from collectived_proto.types import AllReduce, Collective, DType, Layout, Leaf, ReduceOp
from collectived_runtime.engine.record.flight_recorder import (
    MOST_MARKS,
    MOST_MOVES,
    SEND,
    FlightRecorder,
    GroupLabel,
    GroupRecorder,
    ProgramSummary,
)
from collectived_runtime.engine.submit.contracts import PreparedCollective
from collectived_runtime.engine.submit.tracker import Arrival, Instance, Mark

PAGE = Path(__file__).parents[1] / "docs" / "operate" / "trace.md"
GOAL_MICROSECONDS = 3.0
ROUNDS, REPEATS = 4_000, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write the result into {PAGE.name}")
    options = parser.parse_args()
    text = f"{conditions.shown()}\n\n{verdicts.table(lines())}"
    print(text)
    if options.write:
        page.write("recorder", text, PAGE)


def lines() -> list[verdicts.Line]:
    cases = [
        ("one worker, 1 rank", 1, 0),
        ("one worker, 4 ranks", 4, 0),
        ("one worker, 8 ranks", 8, 0),
        ("two workers of 2 ranks, ring: 6 marks", 2, 6),
        (f"many workers or packs: {MOST_MARKS} marks, the most", 2, MOST_MARKS),
    ]
    return [verdicts.Line(what, cost(ranks, marks), "≤", GOAL_MICROSECONDS, "µs") for what, ranks, marks in cases]


def cost(ranks: int, marks: int) -> float:
    """Microseconds of processor time per collective, the least of some repeats."""
    instance = _instance(ranks)
    recorder = GroupRecorder(FlightRecorder(), GroupLabel("world", 1, ranks, tuple(range(ranks)), (0,)))
    summary = ProgramSummary("ring", 16, 1, 1)

    def one() -> None:
        instance.marks = []
        instance.started_at = time.monotonic()
        if marks:
            mark(instance.marks, marks)
        recorder.record_completed(7, instance, summary, instance.started_at)

    return min(_timed(one) for _ in range(REPEATS)) / ROUNDS * 1e6


def mark(marks: list[Mark], count: int) -> None:
    """As `schedule` and `host_task` do: the bound is looked at, then the time is taken."""
    began = time.monotonic()
    for number in range(count):
        if len(marks) < (MOST_MOVES if number < MOST_MOVES else MOST_MARKS):
            marks.append((SEND, 0, 0, number, 1, began, time.monotonic()))


def _timed(one: Callable[[], None]) -> float:
    begin = time.thread_time()
    for _ in range(ROUNDS):
        one()
    return time.thread_time() - begin


def _instance(ranks: int) -> Instance:
    collective = Collective(AllReduce(ReduceOp.SUM), "*", (Leaf("", DType.FLOAT32, (4,)),), site="train.py:8")
    prepared = PreparedCollective(collective, b"", Layout((), (), 0, 0), "all_reduce(sum)")
    arrivals = {rank: Arrival(prepared, None, 1.0) for rank in range(ranks)}
    return Instance(5, arrivals, reference=prepared, collective=collective)


if __name__ == "__main__":
    main()
