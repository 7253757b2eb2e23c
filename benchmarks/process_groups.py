"""`python -m benchmarks.process_groups`: `init_process_group("collectived")` beside Gloo, in the same processes.

It runs in an environment that has PyTorch: `make bench-torch`. Each rank has a process group of either backend. At each
operation and size both have a turn, several rounds, in the other order every other round; a ratio is the
median of those of the rounds. Ranks are on one worker, and then each on a worker of its own, whose only way to each
other is TCP over the loopback; Gloo is TCP in either place.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import conditions
from benchmarks.cases import Case, parse
from benchmarks.environments import ROOT
from benchmarks.page import write
from benchmarks.tables import duration
from benchmarks.verdicts import Line, number, table, worst

OURS, GLOO = "collectived", "gloo"
HOST, TCP = "one host", "loopback TCP"
RANKS = (2, 4)
SIZES = tuple(map(parse, ("4 B", "4 KiB", "64 KiB", "1 MiB", "25 MiB")))
MODELS = {"DDP step, 8,320 parameters": (64, 2, 32), "DDP step, 4,198,400 parameters": (1024, 4, 16)}
"""Width and number of linear layers, and rows of a batch."""
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "send_recv")
"""send_recv: a round trip between two neighbours."""
GOALS = {(HOST, False): 2.0, (TCP, False): 1.0, (HOST, True): 1.2, (TCP, True): 1.0}
"""How many times as fast as Gloo, by place, and whether it is a step of DDP."""
ROUNDS = 7
_SECONDS = 0.15  # that a turn takes, about
_MOST = 300  # calls of a turn

Calls = Mapping[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Figure:
    """
    place, ranks: where it was measured.
    what: the operation, or the model.
    size: of the tensor of a rank, as in `SIZES`; of reduce_scatter, of the result. Empty for steps of DDP.
    ours, gloo: seconds of one call, medians of the rounds.
    ratio: Gloo's time / ours, the median of the rounds.
    """

    place: str
    ranks: int
    what: str
    size: str
    ours: float
    gloo: float
    ratio: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.process_groups", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="N", help="how many; 2 and 4 by default")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/internals/performance.md")
    parser.add_argument("--rank", metavar="PLACE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(arguments.rank, arguments.rounds)
        return
    found: list[Figure] = []
    skipped: list[str] = []
    for place, ranks in [(place, ranks) for ranks in arguments.ranks for place in (HOST, TCP)]:
        try:
            found += launch(place, ranks, arguments.rounds)
        except subprocess.CalledProcessError as error:
            skipped.append(f"{ranks} ranks, {place}: its ranks ended with status {error.returncode}")
    text = report(found, conditions.shown({"torch": version("torch")}), skipped)
    print(text)
    if arguments.write:
        write("process groups", text)


def launch(place: str, ranks: int, rounds: int) -> list[Figure]:
    """Start a job of so many ranks. Return the figures of rank 0."""
    workers, clients = (1, ranks) if place == HOST else (ranks, 1)
    command = [str(Path(sys.executable).with_name("collectived")), "launch"]
    command += ["--workers", str(workers), "--clients", str(clients), "--", sys.executable]
    command += ["-m", "benchmarks.process_groups", "--rank", place, "--rounds", str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, check=True)
    lines = [line.partition("found ")[2] for line in ended.stdout.splitlines() if "found " in line]
    return [Figure(**json.loads(line)) for line in lines]


def report(found: Iterable[Figure], heading: str, skipped: Iterable[str] = ()) -> str:
    """The text that is printed, and written into the page. Pure."""
    figures = list(found)
    parts = [heading, *(f"Not measured: {what}." for what in skipped)]
    for place, ranks in dict.fromkeys((figure.place, figure.ranks) for figure in figures):
        parts.append(times(place, ranks, [one for one in figures if (one.place, one.ranks) == (place, ranks)]))
    goals = lines(figures)
    parts += [table(goals), f"{sum(line.met for line in goals)} of {len(goals)} goals are met."]
    return "\n\n".join(parts)


def times(place: str, ranks: int, figures: Iterable[Figure]) -> str:
    """A row for each operation: our time, and in brackets how many times as long Gloo takes. Pure."""
    cells: dict[str, dict[str, str]] = {}
    for figure in figures:
        cells.setdefault(figure.what, {})[figure.size] = f"{duration(figure.ours)} ({number(figure.ratio)})"
    sizes = [str(size) for size in SIZES]
    rows = [f"| {ranks} ranks, {place} | {' | '.join(sizes)} |", f"|---|{'---:|' * len(sizes)}"]
    steps = [f"{what} {by_size['']}" for what, by_size in cells.items() if "" in by_size]
    rows += [
        f"| {what} | {' | '.join(by_size.get(size, '') for size in sizes)} |"
        for what, by_size in cells.items()
        if "" not in by_size
    ]
    return "\n".join(rows) + "\n\n" + "; ".join(steps) + "."


def lines(figures: Iterable[Figure]) -> list[Line]:
    """The figures for the goals: each operation at the size where it is slowest beside Gloo. Pure."""
    by_goal: dict[str, list[Line]] = {}
    for figure in figures:
        what = f"{figure.ranks} ranks, {figure.place}, {figure.what}: Gloo / ours"
        goal = GOALS[figure.place, figure.size == ""]
        by_goal.setdefault(what, []).append(Line(what, figure.ratio, "≥", goal, note=figure.size))
    return [worst(of_goal) for of_goal in by_goal.values()]


def rank(place: str, rounds: int) -> None:
    """Be one rank. Rank 0 sends the first figure of each measurement to the runner."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=100)
    dist.init_process_group(GLOO, timeout=limit)
    groups = {GLOO: dist.group.WORLD, OURS: dist.new_group(backend=OURS, timeout=limit)}
    made = [
        *((what, str(size), make_operation(what, size, groups)) for size in SIZES for what in OPERATIONS),
        *((what, "", make_step(shape, groups)) for what, shape in MODELS.items()),
    ]
    for what, size, make in made:
        ours, gloo, ratio = compare(make(), rounds)
        if dist.get_rank() == 0:
            figure = Figure(place, dist.get_world_size(), what, size, ours, gloo, ratio)
            print("found", json.dumps(asdict(figure)), flush=True)
    dist.destroy_process_group()


def make_operation(what: str, size: Case, groups: Mapping[str, Any]) -> Callable[[], Calls]:
    """A collective of float32 by each backend, whose results have been looked at."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()

    def one(group: Any) -> Callable[[], object]:
        whole, part = torch.ones(size.count * ranks), torch.ones(size.count)
        peer, back = dist.get_rank() ^ 1, torch.empty(size.count)

        def go_and_return() -> None:
            if dist.get_rank() < peer:
                dist.send(part, peer, group=group)
                dist.recv(back, peer, group=group)
            else:
                dist.recv(back, peer, group=group)
                dist.send(part, peer, group=group)

        call: Callable[[], object] = {
            "all_reduce": lambda: dist.all_reduce(part, group=group),
            "broadcast": lambda: dist.broadcast(part, 0, group=group),
            "all_gather": lambda: dist.all_gather_single(whole, part, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole, group=group),
            "send_recv": go_and_return,
        }[what]
        part.fill_(dist.get_rank() + 1)
        whole.fill_(dist.get_rank() + 1)
        call()
        mine = torch.full_like(part, {"broadcast": 1, "send_recv": peer + 1}.get(what, ranks * (ranks + 1) // 2))
        expected = torch.arange(1.0, ranks + 1).repeat_interleave(size.count) if what == "all_gather" else mine
        if not torch.equal({"all_gather": whole, "send_recv": back}.get(what, part), expected):
            raise AssertionError(f"{what} of {size} gave a wrong result")
        whole.zero_()  # sums of sums stay what they are
        part.zero_()
        return call

    return lambda: {name: one(group) for name, group in groups.items()}


def make_step(shape: tuple[int, int, int], groups: Mapping[str, Any]) -> Callable[[], Calls]:
    """A step of training by each backend."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    width, depth, batch = shape

    def one(group: Any) -> Callable[[], object]:
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rows = torch.randn(batch, width)

        def step() -> None:
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()

        return step

    return lambda: {name: one(group) for name, group in groups.items()}


def compare(calls: Calls, rounds: int) -> tuple[float, float, float]:
    """Seconds of ours and of Gloo's, and how many times as long Gloo takes."""
    counts = {name: count_calls(call) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(rounds):
        for name in list(calls)[:: 1 if round_number % 2 else -1]:
            found[name].append(run(calls[name], counts[name]))
    ratio = statistics.median(gloo / ours for gloo, ours in zip(found[GLOO], found[OURS], strict=True))
    return statistics.median(found[OURS]), statistics.median(found[GLOO]), ratio


def count_calls(call: Callable[[], object]) -> int:
    """How many calls a turn has; the same on all ranks."""
    import torch
    import torch.distributed as dist

    run(call, 3)
    seconds = torch.tensor([run(call, 3)])
    dist.broadcast(seconds, 0)
    return max(3, min(_MOST, int(_SECONDS / seconds.item())))


def run(call: Callable[[], object], count: int) -> float:
    """Seconds of one of so many calls, on the rank where they took longest; a fifth more before are not counted."""
    import torch
    import torch.distributed as dist

    for _ in range(max(1, count // 5)):
        call()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    seconds = torch.tensor([(time.perf_counter() - begin) / count], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds.item())


if __name__ == "__main__":
    main()
