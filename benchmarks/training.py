"""Trains `examples/train_digits.py` over a link of 100 Mbit/s in every compression: its time and accuracy.

Needs root and iproute2. Two ranks, each on a worker of its own; the formats take turns.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from typing import NamedTuple

from benchmarks import conditions
from benchmarks.compression import FORMATS
from benchmarks.environments import ROOT
from benchmarks.paced_hosts import paced_hosts
from benchmarks.page import write

HIDDEN = 4096  # neurons: 1.2 MB of gradients
MEGABITS = 100  # of the link, so that its time counts beside that of two processors
_TIMEOUT = 300.0


class Training(NamedTuple):
    seconds: float
    accuracy: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put the table into docs/internals/performance.md")
    arguments = parser.parse_args()
    found: dict[str, list[Training]] = {name: [] for name in FORMATS}
    with paced_hosts(2, MEGABITS) as addresses:
        for number in range(arguments.rounds):
            for name in FORMATS:
                found[name].append(train(addresses, name, f"{name}-{number}"))
    text = f"{conditions.shown()}\n\n{table(found)}"
    print(text)
    if arguments.write:
        write("training", text)


def table(found: dict[str, list[Training]]) -> str:
    """Medians. The accuracy is the same in each round, for all sums have the same bits. Pure."""
    rows = ["| compression | 400 steps | test accuracy |", "|---|---|---|"]
    for name, trainings in found.items():
        seconds = statistics.median(one.seconds for one in trainings)
        accuracies = sorted({f"{one.accuracy:.4f}" for one in trainings})
        rows.append(f"| {name} | {seconds:.2f} s | {' to '.join(accuracies)} |")
    return "\n".join(rows)


def train(addresses: list[str], compression: str, group: str) -> Training:
    """One training, as the ranks of a new group."""
    command = [sys.executable, "examples/train_digits.py", "--compression", compression, "--hidden", str(HIDDEN)]
    running = []
    for rank, address in enumerate(addresses):
        place = {"COLLECTIVED_WORKER": address, "COLLECTIVED_JOB": "bench", "COLLECTIVED_GROUP": group}
        place |= {"RANK": str(rank), "WORLD_SIZE": str(len(addresses))}
        running.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | place, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=_TIMEOUT)[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"training with {compression} failed: {said[0]}")
    return parse(said[0])


def parse(output: str) -> Training:
    """The line of rank 0 at the end. Pure."""
    seconds, accuracy = re.search(r"steps took ([\d.]+) s", output), re.search(r"test accuracy ([\d.]+)", output)
    assert seconds and accuracy, output
    return Training(float(seconds[1]), float(accuracy[1]))


if __name__ == "__main__":
    main()
