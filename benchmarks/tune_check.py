"""`python -m benchmarks.tune_check` (`make tune-check`): AUTO's choice beside the best algorithm, measured.

Every algorithm has a group of its own, whose table says that it carries everything, and so has the table of measured
links (`--tune`). All groups have turns at each size. A call lasts as long as on the slowest rank. The choice of AUTO,
by the model or by measured links, is judged by the time of the algorithm that its table names.

The simulator's prediction stands beside each cell. Its costs are fitted to the cells of all other numbers of workers:
those of a message and of latency are common to all links, each link has a bandwidth, and copying costs more where
links are paced.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

import collectived as cd
from benchmarks import conditions
from benchmarks.environments import ROOT
from benchmarks.paced_hosts import paced_hosts
from benchmarks.page import write
from benchmarks.verdicts import Line, table
from collectived_native.cores import count_cores
from collectived_proto.types import Peer, Tier, select_tier
from collectived_runtime.coordinator.core.tuning import CANDIDATES, make_table
from collectived_runtime.coordinator.files import read_tables
from collectived_runtime.plan.cost_model import LinkClass, Model
from collectived_runtime.simulation.study import SimulationSpec, predict_cost

PAGE = ROOT / "docs" / "guide" / "algorithms.md"
ALGORITHMS = ("one_shot", *CANDIDATES, "double_tree")
LINKS: Mapping[str, int | None] = {"loopback": None, "1 Gbit/s": 1000, "100 Mbit/s": 100}
WORKERS = (2, 3, 4, 8)
SIZES = (4, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
GOAL, WORST, CELLS, ERROR = 1.1, 1.5, 0.9, 0.15
_HOPELESS = 3.0  # times as long as the best: an algorithm is not measured at larger sizes
_SECONDS = 0.6  # for a size, about
_LONGEST = 4.0  # seconds that a call may take; larger sizes are left out
_MOST_ROUNDS, _LEAST_ROUNDS = 40, 3
# Where the fit of the simulator's costs begins. A token bucket cuts what is sent into single packets.
_OVERHEAD, _LATENCY, _COPIED, _COPIED_PACED, _FREE_MEGABITS = 22e-6, 8e-6, 1.6e9, 0.3e9, 12_000
_OUTLIER = 0.7  # the most that one cell counts in the fit, as the logarithm of a ratio
_MOST_TRIES = 600
_WARM_UP = 3  # calls: the third is carried out as all later ones are

Contestant = tuple[str, int]  # algorithm and shards
Times = dict[int, dict[str, list[float]]]  # by size and group, one a round


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """One size over one kind of link.

    Attributes:
        seconds: of each contestant that was measured; medians.
        auto, tuned: what AUTO takes by the model, and by measured links.
        crowd: workers per processor of this machine.
    """

    link: str
    workers: int
    nbytes: int
    seconds: Mapping[Contestant, float]
    auto: Contestant
    tuned: Contestant
    crowd: float = 0.0

    @property
    def best(self) -> Contestant:
        return min(self.seconds, key=lambda one: self.seconds[one])

    def ratio(self, chosen: Contestant) -> float:
        """How many times as long as the best that takes."""
        return self.seconds[chosen] / self.seconds[self.best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", default=",".join(LINKS), help="of: %(default)s")
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)))
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/guide/algorithms.md")
    arguments = parser.parse_args()
    sizes = [size for size in SIZES if size <= arguments.largest]
    cells = []
    for link in arguments.links.split(","):
        for workers in map(int, arguments.workers.split(",")):
            found = measure(link, workers, sizes)
            print(table_of(found, {}), flush=True)
            cells += found
    predicted = predict(cells)
    text = f"{conditions.shown()}\n\n{table_of(cells, predicted)}\n\n{table(judge(cells, predicted))}"
    print(text)
    if arguments.write:
        write("tune check", text, PAGE)


# From figures to lines of the table. Pure.


def judge(cells: Sequence[Cell], predicted: Mapping[Cell, float]) -> list[Line]:
    """The goals, with what was measured."""
    lines = []
    for name, ratios in (
        ("AUTO by the model", [cell.ratio(cell.auto) for cell in cells]),
        ("AUTO by measured links", [cell.ratio(cell.tuned) for cell in cells]),
    ):
        share = sum(ratio <= GOAL for ratio in ratios) / len(ratios)
        worst = max(range(len(cells)), key=lambda index: ratios[index])
        where = f"{cells[worst].workers} workers, {cells[worst].link}, {show_size(cells[worst].nbytes)}"
        lines.append(Line(f"{name}: part of cells within {GOAL:.0%} of the best", share, "≥", CELLS))
        lines.append(Line(f"{name}: at the worst, times the best", ratios[worst], "≤", WORST, note=where))
    errors = [abs(seconds / cell.seconds[cell.best] - 1) for cell, seconds in predicted.items()]
    if errors:
        lines.append(
            Line("simulator: median error of the best algorithm's time", statistics.median(errors), "≤", ERROR)
        )
    return lines


def predict(cells: Sequence[Cell]) -> dict[Cell, float]:
    """The simulator's prediction for the best algorithm of each cell, with costs fitted to other numbers of workers."""
    found = {}
    for workers in dict.fromkeys(cell.workers for cell in cells):
        known = [cell for cell in cells if cell.workers != workers]
        models = fit(known) if known else {}
        for cell in cells:
            if cell.workers == workers and cell.link in models:
                found[cell] = predict_seconds(cell, models[cell.link], cell.best)
    return found


def fit(cells: Sequence[Cell]) -> dict[str, Model]:
    """By link, the model that comes closest to the times of the best algorithms and of AUTO's choices."""
    links = list(dict.fromkeys(cell.link for cell in cells))
    known = [(cell, one) for cell in cells for one in {cell.best, cell.auto, cell.tuned}]

    def models(logarithms: Sequence[float]) -> dict[str, Model]:
        overhead, latency, free, paced, *bandwidths = map(math.exp, logarithms)
        copied = [paced if LINKS[link] else free for link in links]
        return {link: make_model(overhead, latency, *one) for link, *one in zip(links, bandwidths, copied, strict=True)}

    def error(logarithms: Sequence[float]) -> float:
        of_link = models(logarithms)
        ratios = (predict_seconds(cell, of_link[cell.link], one) / cell.seconds[one] for cell, one in known)
        return statistics.fmean(min(abs(math.log(ratio)), _OUTLIER) for ratio in ratios)

    start = [
        _OVERHEAD,
        _LATENCY,
        _COPIED,
        _COPIED_PACED,
        *((LINKS[link] or _FREE_MEGABITS) * 1e6 / 8 for link in links),
    ]
    options = {"maxfev": _MOST_TRIES, "xtol": 0.01, "ftol": 0.001}
    return models(minimize(error, [math.log(one) for one in start], method="Powell", options=options).x)


def make_model(overhead: float, latency: float, bandwidth: float, copied: float) -> Model:
    """A model in which a message costs the same whether a worker has slept or not, and folding costs nothing extra."""
    across = LinkClass(latency, bandwidth)
    return Model(across, overhead=overhead, fold=1e12, stream=bandwidth, wakeup=0.0, copied=copied)


def predict_seconds(cell: Cell, model: Model, one: Contestant) -> float:
    name, shards = one
    question = SimulationSpec((1,) * cell.workers, (cell.nbytes,), (name,), replace(model, crowd=cell.crowd))
    return predict_cost(question, name, cell.nbytes, shards).seconds


def table_of(cells: Sequence[Cell], predicted: Mapping[Cell, float]) -> str:
    """A row per kind of link and number of workers, a column per size."""
    sizes = sorted({cell.nbytes for cell in cells})
    rows = [f"| | {' | '.join(map(show_size, sizes))} |", "|---" * (len(sizes) + 1) + "|"]
    for link, workers in dict.fromkeys((cell.link, cell.workers) for cell in cells):
        shown = {cell.nbytes: cell for cell in cells if (cell.link, cell.workers) == (link, workers)}
        texts = [show(shown[n], predicted.get(shown[n])) if n in shown else "" for n in sizes]
        rows.append(f"| {workers} workers, {link} | {' | '.join(texts)} |")
    return "\n".join(rows)


def show(cell: Cell, predicted: float | None) -> str:
    """`ring 1.2 ms (1.00 / 1.05; 1.1 ms)`."""
    simulated = "" if predicted is None else f"; {show_seconds(predicted)}"
    ratios = f"{cell.ratio(cell.auto):.2f} / {cell.ratio(cell.tuned):.2f}"
    return f"{show_contestant(cell.best)} {show_seconds(cell.seconds[cell.best])} ({ratios}{simulated})"


def show_contestant(one: Contestant) -> str:
    return one[0] if one[1] == 1 else f"{one[0]} × {one[1]}"


def show_seconds(seconds: float) -> str:
    return (
        f"{seconds * 1e6:.3g} µs"
        if seconds < 1e-3
        else f"{seconds * 1e3:.3g} ms"
        if seconds < 1
        else f"{seconds:.3g} s"
    )


def show_size(nbytes: int) -> str:
    return f"{nbytes} B" if nbytes < 1 << 10 else f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"


def name_group(one: Contestant) -> str:
    return f"{one[0]}-{one[1]}"


# Measuring


def measure(link: str, workers: int, sizes: Sequence[int]) -> list[Cell]:
    """All sizes over one kind of link."""
    crowd = workers / count_cores()
    auto = make_table([Peer(task, "", "", "", (task,)) for task in range(workers)], crowd=crowd)
    contestants = list(dict.fromkeys([*((name, 1) for name in ALGORITHMS), *((t.algorithm, t.shards) for t in auto)]))
    shape = ",".join(["1"] * workers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tables.json"
        stored = {name_group(one): [asdict(Tier(*one, -1, 0))] for one in contestants}
        path.write_text(json.dumps({f"{name} {shape}": rows for name, rows in stored.items()}))
        with paced_hosts(workers, LINKS[link], ("--tune", "--tables", str(path))) as addresses:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(workers, mp_context=context) as pool:
                names = [*map(name_group, contestants), "tuned"]
                kept = {size: name_group(choose(auto, size)) for size in sizes}
                running = [pool.submit(run_rank, addresses, rank, names, kept) for rank in range(workers)]
                by_rank = [one.result() for one in running]
            tuned = read_tables(path)[f"tuned {shape}"]
    cells = [make_cell(link, workers, size, by_rank, contestants, auto, tuned) for size in by_rank[0]]
    return [replace(cell, crowd=crowd) for cell in cells]


def make_cell(
    link: str,
    workers: int,
    nbytes: int,
    by_rank: Sequence[Times],
    contestants: Sequence[Contestant],
    auto: Sequence[Tier],
    tuned: Sequence[Tier],
) -> Cell:
    """A cell of what the ranks have measured. Pure."""

    def take(group: str) -> float:
        rounds = zip(*(times[nbytes][group] for times in by_rank), strict=True)
        return statistics.median(max(map(float, seconds)) for seconds in rounds)

    seconds = {one: take(name_group(one)) for one in contestants if name_group(one) in by_rank[0][nbytes]}
    by_links = choose(tuned, nbytes)
    seconds.setdefault(by_links, take("tuned"))
    return Cell(link, workers, nbytes, seconds, choose(auto, nbytes), by_links)


def choose(tiers: Sequence[Tier], nbytes: int) -> Contestant:
    """The choice of a table for that size. Pure."""
    tier = select_tier(tiers, nbytes)
    return tier.algorithm, tier.shards


def run_rank(addresses: Sequence[str], rank: int, names: Sequence[str], kept: Mapping[int, str]) -> Times:
    """The measurements of one rank.

    Args:
        kept: by size, the group that is measured however slow it is, for AUTO takes its algorithm.
    """
    found: Times = {}
    with cd.connect(addresses[rank]) as session, ExitStack() as stack:
        groups = {name: stack.enter_context(session.join(name, len(addresses), rank=rank)) for name in names}
        control = groups[names[0]]
        fast = set(names)
        for nbytes, chosen in kept.items():
            live = [name for name in names if name in fast or name in (chosen, "tuned")]
            value, result = session.empty((nbytes // 4,), np.float32), session.empty((nbytes // 4,), np.float32)
            value[:] = rank
            first = {name: [call(groups[name], value, result) for _ in range(_WARM_UP)][-1] for name in live}
            assert result[0] == result[-1] == sum(range(len(addresses)))
            rounds = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, int(_SECONDS / sum(first.values()))))
            rounds = int(control.broadcast(np.int64(rounds), 0))
            found[nbytes] = {name: [] for name in live}
            for _ in range(rounds):
                for name in live:
                    found[nbytes][name].append(call(groups[name], value, result))
            medians = np.array([statistics.median(found[nbytes][name]) for name in live])
            medians = control.broadcast(medians, 0)
            fast = {name for name, median in zip(live, medians, strict=True) if median <= _HOPELESS * medians.min()}
            if 4 * medians.min() > _LONGEST:
                break
    return found


def call(group: cd.Group, value: np.ndarray, result: np.ndarray) -> float:
    """Seconds of a sum that all ranks begin together."""
    group.barrier()
    begin = time.perf_counter()
    group.all_reduce("sum", value, out=result)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
