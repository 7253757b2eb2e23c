"""One rank of one library, driven by the runner: `python -m benchmarks.rank LIBRARY`.

It connects to the runner's socket, says which rank it is, and then waits for orders in a blocking read, so that it uses
no processor while others are measured. An order names a case and a number of calls; the answer has the seconds of each
call, on the clock that all processes of a host share, and how many numbers of the last result were wrong.

Calls follow each other without a barrier between them, as in nccl-tests: a call lasts from its start to its return, and
a rank that was ahead waits in it for the others.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.cases import REFILL, Case, base, expected, factor_of, parse, wrong
from benchmarks.trial import Peer, Trial

SOCKET = "COLLECTIVED_BENCH_SOCKET"


def main() -> None:
    library = sys.argv[1]
    peer: Peer = importlib.import_module(f"benchmarks.peers.{library}").start()
    take_orders({"rank": peer.rank, "size": peer.size, "versions": peer.versions}, Desk(peer).answer)
    peer.close()


def take_orders(greeting: dict[str, Any], answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Greet the runner, and answer what it asks until it hangs up."""
    with socket.socket(socket.AF_UNIX) as runner:
        runner.connect(os.environ[SOCKET])
        lines = runner.makefile("rwb")
        say(lines, greeting)
        while line := lines.readline():
            say(lines, answer(json.loads(line)))


def say(lines: Any, value: dict[str, Any]) -> None:
    lines.write(json.dumps(value).encode() + b"\n")
    lines.flush()


class Desk:
    """Keeps the buffers of the case at hand, and drops them when the next one comes."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._case: Case | None = None
        self._trials: dict[str, Trial] = {}

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "extra":
            return {"times": getattr(self._peer, order["name"])(order["calls"])}
        if order["do"] == "drop":
            self._case = None
            self._trials.clear()
            gc.collect()
            return {}
        case = parse(order["case"])
        if case != self._case:
            self._trials.clear()
            gc.collect()
            self._case = case
        trial = self._trials.get(order["variant"])
        if trial is None:
            trial = self._trials[order["variant"]] = self._peer.trial(case, order["variant"])
        return turn(trial, case, self._peer, order)


def turn(trial: Trial, case: Case, peer: Peer, order: dict[str, Any]) -> dict[str, Any]:
    """Some calls to get warm, then those that count."""
    clock = time.perf_counter
    factor = factor_of(order["turn"])
    numbers = base(case, peer.size)
    call = trial.call
    trial.fill(numbers, factor)
    since_fill = 0
    times = []
    for number in range(order["warmup"] + order["calls"]):
        if trial.in_place and since_fill == REFILL:
            trial.fill(numbers, factor)
            since_fill = 0
        begin = clock()
        call()
        end = clock()
        since_fill += 1
        if number >= order["warmup"]:
            times.append(end - begin)
    growth = float(peer.size ** (since_fill - 1)) if trial.in_place else 1.0
    right = expected(case, numbers, peer.rank, peer.size, factor * growth)
    bad = sum(wrong(result, right) for result in trial.results())
    return {"times": times, "wrong": bad}


if __name__ == "__main__":
    main()
