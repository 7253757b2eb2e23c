"""Compressed sums over a link of 1 Gbit/s: how many times as fast they are as float32. Needs root and iproute2.

Two workers, each in a network namespace, with one link between them that a token bucket paces. In every round all
formats have their turn; a call lasts as long as on the slower rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import collectived as cd
from benchmarks import conditions
from benchmarks.paced_hosts import paced_hosts
from benchmarks.page import write

FORMATS = ("none", "bfloat16", "float8", "int8")
GOALS = {"bfloat16": 1.8, "int8": 3.0}  # times as fast as float32
SIZES = tuple(1 << exponent for exponent in (18, 20, 22, 24, 26))  # bytes of float32
GOAL_FROM = 1 << 20
MEGABITS = 1000
Seconds = dict[int, dict[str, list[float]]]  # by size and format, one a round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="put the table into docs/internals/performance.md")
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    text = f"{conditions.shown()}\n\n{table(found)}"
    print(text)
    if arguments.write:
        write("compression", text)


def table(found: Seconds) -> str:
    """Medians, and how many times as fast: the median of what that was in each round. Pure."""
    head = "| float32 of | none | " + " | ".join(FORMATS[1:]) + " |"
    rows = [head, "|---" * (len(FORMATS) + 1) + "|"]
    for size, by_format in found.items():
        cells = [_show_size(size), f"{statistics.median(by_format['none']) * 1e3:.3g} ms"]
        for name in FORMATS[1:]:
            ratio = speedup(by_format, name)
            missed = size >= GOAL_FROM and ratio < GOALS.get(name, 0)
            shown = f"**{ratio:.2f}**" if missed else f"{ratio:.2f}"
            cells.append(f"{statistics.median(by_format[name]) * 1e3:.3g} ms ({shown})")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def speedup(by_format: dict[str, list[float]], name: str) -> float:
    """How many times as fast as float32. Pure."""
    return statistics.median(plain / other for plain, other in zip(by_format["none"], by_format[name], strict=True))


def _show_size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def measure(rounds: int) -> Seconds:
    with paced_hosts(2, MEGABITS) as addresses, ThreadPoolExecutor(len(addresses)) as pool:
        by_rank = list(pool.map(lambda rank: run_rank(addresses, rank, rounds), range(len(addresses))))
    return {
        size: {
            name: [max(times) for times in zip(*(one[size][name] for one in by_rank), strict=True)] for name in FORMATS
        }
        for size in SIZES
    }


def run_rank(addresses: list[str], rank: int, rounds: int) -> Seconds:
    found: Seconds = {}
    with cd.connect(addresses[rank]) as session, session.join("compressed", len(addresses), rank=rank) as group:
        for size in SIZES:
            value, result = session.empty((size // 4,), np.float32), session.empty((size // 4,), np.float32)
            value[:] = np.random.default_rng(rank).standard_normal(len(value), np.float32)
            found[size] = {name: [] for name in FORMATS}
            for number in range(rounds + 1):
                for name in FORMATS:
                    options = cd.CommunicationOptions(compression=name, timeout_seconds=60)
                    group.barrier()
                    begin = time.perf_counter()
                    group.all_reduce("sum", value, options=options, out=result)
                    if number:  # the first is to get ready
                        found[size][name].append(time.perf_counter() - begin)
    return found


if __name__ == "__main__":
    main()
