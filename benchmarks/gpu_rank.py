"""One rank of one library with a GPU, driven by the runner: `python -m benchmarks.gpu_rank LIBRARY`.

It connects to the runner's socket, says which rank it is, and waits for orders in a blocking read. One order makes the
buffers of a size and variant, before any rank waits for another one; answers to others have the seconds of each call.
Calls follow each other without a barrier, as in nccl-tests. If an order fails, its answer is the error.
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.rank import take_orders


class Trial(Protocol):
    """Buffers of one size and variant on one rank."""

    def measure(self, calls: int) -> list[float]:
        """Seconds of each of so many calls."""

    def count_wrong(self) -> int:
        """How many elements are wrong after one call from fresh inputs, which is not measured."""


class Peer(Protocol):
    """One rank of a library's group; `size` is the number of ranks that take orders."""

    rank: int
    size: int
    versions: dict[str, str]

    def trial(self, nbytes: int, variant: str) -> Trial: ...

    def close(self) -> None: ...


def main(start: Callable[[str], Peer] | None = None) -> None:
    """Run a rank. `start` makes the peer of a library's name; None: its module of `benchmarks.peers` does."""
    library = sys.argv[1]
    peer = importlib.import_module(f"benchmarks.peers.{library}").start() if start is None else start(library)
    desk = Desk(peer)
    take_orders({"rank": peer.rank, "size": peer.size, "versions": peer.versions}, desk.answer)
    desk.drop()
    peer.close()


class Desk:
    """Keeps the buffers of a size, of every variant, until an order drops them."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._trials: dict[tuple[int, str], Trial] = {}

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            if order["do"] == "drop":
                self.drop()
                return {}
            trial = self._trial(order["bytes"], order["variant"])
            return {} if order["do"] == "make" else take_turn(trial, order)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def drop(self) -> None:
        self._trials.clear()
        gc.collect()

    def _trial(self, nbytes: int, variant: str) -> Trial:
        found = self._trials.get((nbytes, variant))
        if found is None:
            found = self._trials[nbytes, variant] = self._peer.trial(nbytes, variant)
        return found


def take_turn(trial: Trial, order: dict[str, Any]) -> dict[str, Any]:
    wrong = trial.count_wrong() if order["checked"] else 0
    trial.measure(order["warmup"])
    return {"times": trial.measure(order["calls"]), "wrong": wrong}


def time_calls(call: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of so many calls, one behind the other."""
    clock, times = time.perf_counter, []
    for _ in range(count):
        begin = clock()
        call()
        times.append(clock() - begin)
    return times


if __name__ == "__main__":
    main()
