"""`python -m benchmarks.gpus`: sums of float32 on one GPU, beside NCCL and what the GPU's memory can carry.

First 2, 4 and 8 ranks of one worker, which folds them on the GPU; a large copy on the GPU, counted as bytes read plus
written, is the limit of the memory's traffic, and the fold's kernel is timed alone. Then a rank on each of two workers
by the hint NCCL, beside raw NCCL (launch and wait, as in nccl-tests) and PyTorch's backend of NCCL. NCCL allows several
ranks on one GPU only where it takes them for ranks of several hosts, so these go by sockets over the loopback.

All contestants are started once and have turns at each size; of each call the rank counts on which it took longest. A
contestant that fails at a size is started again for the next one. Without a GPU it ends with status 1 and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks import conditions
from benchmarks.crew import Failed
from benchmarks.gpu_figures import NCCL, ONE_GPU, Figure, report, show_size
from benchmarks.gpu_teams import Field, Team, device_alone, ours_by_nccl, ours_on_one_worker, raw_nccl, torch_nccl
from benchmarks.page import write
from benchmarks.peers import COPY, CUPY, FOLD, OWNED, TORCH
from benchmarks.schedule import Pace, round_robin, slowest

RANKS, QUICK_RANKS = (2, 4, 8), (2, 8)
LIMIT_BYTES = 1 << 30  # of the copy
SIZES = tuple(1 << power for power in (2, 10, 15, 18, 20, 23, 25, 28, 30))
MOST_BY_NCCL, QUICK_MOST = 256 << 20, 64 << 20
QUICK_SIZES = tuple(1 << power for power in (2, 15, 20, 23, 28, 30))
ARRAYS = (OWNED, TORCH, CUPY)
USUAL = Pace(rounds=3, seconds=0.06, fewest=3, most=300)
QUICK = Pace(rounds=2, seconds=0.03, fewest=2, most=60)
SECONDS, QUICK_SECONDS = 150.0, 60.0
_FIRST_PART = 0.62  # of the time, in which ranks of one worker are measured

Say = Callable[[str], None]
Entry = tuple[Team, str, int]  # with which arrays, of how many bytes


@dataclass
class Found:
    """The figures, and the contestants that could not be measured, with the reason."""

    figures: list[Figure] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Which sizes are measured, how long, and when it has to end by the monotonic clock."""

    sizes: Sequence[int]
    pace: Pace
    end: float
    say: Say


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpus", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, arrays and turns: a minute")
    parser.add_argument("--seconds", type=float, help="begin nothing after so many; 150, or 60 with --quick")
    parser.add_argument("--out", type=Path, metavar="FILE", help="all figures as JSON")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/internals/performance.md")
    options = parser.parse_args()
    if why := find_obstacle():
        print(f"no GPU can be measured: {why}", file=sys.stderr)
        return 1
    quick, begin = options.quick, time.monotonic()
    seconds = options.seconds or (QUICK_SECONDS if quick else SECONDS)
    plan = Plan(QUICK_SIZES if quick else SIZES, QUICK if quick else USUAL, begin + _FIRST_PART * seconds, say)
    found = Found()
    try:
        for ranks in QUICK_RANKS if quick else RANKS:
            ours = ours_on_one_worker(Field(), ranks, ARRAYS[:2] if quick else ARRAYS)
            measure_one_gpu(found, plan, ranks, [ours, device_alone(Field(), (COPY, f"{FOLD} {ranks}"))])
        most = QUICK_MOST if quick else MOST_BY_NCCL
        plan = replace(plan, end=begin + seconds, sizes=[size for size in plan.sizes if size <= most])
        measure_nccl(found, plan, [ours_by_nccl(Field(), ARRAYS[:2]), raw_nccl(Field()), torch_nccl(Field())])
    finally:  # the figures so far, also after an error
        text = report(found.figures, conditions.shown(found.versions), found.failures)
        print(text)
        if options.out:
            options.out.write_text(json.dumps(as_json(found), indent=1))
    if options.write:
        write("gpus", text)
    return 0 if found.figures else 1


def find_obstacle() -> str:
    """Why this process can use no GPU; empty: it can. CUDA is not started in this process for longer than this."""
    from collectived.gpu.driver import CudaError, get_cuda

    try:
        return "" if get_cuda().device_uuids() else "the driver offers none"
    except CudaError as error:
        return str(error)


def measure_one_gpu(found: Found, plan: Plan, ranks: int, contestants: Sequence[Team]) -> None:
    """Ranks of one GPU on one worker, and the GPU alone."""
    with running(found, contestants, plan.say) as teams:
        for size in plan.sizes:
            if is_over(found, plan, f"{ranks} ranks of one GPU, {show_size(size)}"):
                return
            entries = [
                (team, variant, LIMIT_BYTES if variant == COPY else size) for team in teams for variant in team.variants
            ]
            measure_size(found, plan, ONE_GPU, ranks, size, entries)


def measure_nccl(found: Found, plan: Plan, contestants: Sequence[Team]) -> None:
    """A rank on each of two workers of one GPU, beside NCCL by others."""
    with running(found, contestants, plan.say) as teams:
        for size in plan.sizes:
            if is_over(found, plan, f"NCCL, {show_size(size)}"):
                break
            entries = [(team, variant, size) for team in teams for variant in team.variants]
            measure_size(found, plan, NCCL, 2, size, entries)
        for team in teams:
            if team.falls_back:
                found.failures.append(f"{team.name}: NCCL did not carry it, as its workers say")


def is_over(found: Found, plan: Plan, what: str) -> bool:
    if time.monotonic() < plan.end:
        return False
    found.failures.append(f"{what} and all that follows there: the time is over")
    return True


@contextlib.contextmanager
def running(found: Found, teams: Iterable[Team], say: Say) -> Iterator[list[Team]]:
    """Those of them that could be started; all are ended."""
    with contextlib.ExitStack() as stack:
        started = []
        for team in teams:
            stack.callback(team.close)
            began = time.monotonic()
            try:
                team.start()
            except Failed as failure:
                found.failures.append(f"{team.name}: {failure}")
                say(found.failures[-1])
                continue
            found.versions |= team.versions
            say(f"{team.name} started in {time.monotonic() - began:.1f} s")
            started.append(team)
        yield started


def measure_size(found: Found, plan: Plan, place: str, ranks: int, size: int, entries: Sequence[Entry]) -> None:
    """The turns of all contestants at one size."""
    pace = plan.pace
    times: dict[Entry, list[float]] = {}
    calls: dict[Entry, int] = {}

    def turn(entry: Entry, count: int, warmup: int, checked: bool = False) -> list[float]:
        team, variant, nbytes = entry
        what = {"bytes": nbytes, "variant": variant}
        if checked:  # the first one
            team.ask(do="make", **what)
        answers = team.ask(do="turn", **what, calls=count, warmup=warmup, checked=checked)
        if wrong := sum(answer["wrong"] for answer in answers):
            raise Failed(f"{wrong} of the numbers that were looked at are wrong")
        return slowest([answer["times"] for answer in answers])

    def give_up(entry: Entry, failure: Failed) -> None:
        calls.pop(entry, None)
        times.pop(entry, None)
        found.failures.append(f"{place}, {ranks} ranks, {who(entry)} at {show_size(size)}: {failure}")
        plan.say(found.failures[-1])

    for entry in entries:
        try:
            calls[entry] = pace.calls(statistics.median(turn(entry, 3, 2, checked=True)))
            times[entry] = []
        except Failed as failure:
            give_up(entry, failure)
    for _, entry in round_robin(list(times), pace.rounds):
        if entry in times and time.monotonic() < plan.end:
            try:
                times[entry] += turn(entry, calls[entry], pace.warmup(calls[entry]))
            except Failed as failure:
                give_up(entry, failure)
    for team in dict.fromkeys(team for team, _, _ in entries):
        with contextlib.suppress(Failed):  # the next size reports it
            team.ask(do="drop")
    for (team, variant, nbytes), seconds in times.items():
        if seconds:
            found.figures.append(Figure.of(place, ranks, team.name, variant, nbytes, seconds))
    plan.say(
        f"{place}, {ranks} ranks, {show_size(size)}: " + ", ".join(str(one) for one in found.figures[-len(times) :])
    )


def who(entry: Entry) -> str:
    team, variant, _ = entry
    return f"{team.name}, {variant}" if variant else team.name


def as_json(found: Found) -> dict[str, object]:
    return {
        "conditions": conditions.shown(found.versions),
        "versions": found.versions,
        "figures": [asdict(figure) for figure in found.figures],
        "failures": found.failures,
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
