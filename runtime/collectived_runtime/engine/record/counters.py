"""The work of a group loop so far, in numbers that only grow."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TypeVar

from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Gather,
    Operation,
    Recv,
    Reduce,
    ReduceScatter,
    Scatter,
    Send,
)

_Key = TypeVar("_Key")

OPERATIONS: dict[type, str] = {
    AllReduce: "all_reduce",
    Reduce: "reduce",
    Broadcast: "broadcast",
    Barrier: "barrier",
    AllGather: "all_gather",
    Gather: "gather",
    Scatter: "scatter",
    ReduceScatter: "reduce_scatter",
    AllToAll: "all_to_all",
    Send: "send",
    Recv: "recv",
}
"""The names under which operations are counted."""
SEGMENT = "segment"  # the algorithm of what ranks of one worker carry out themselves
POINT_TO_POINT = "point_to_point"  # the algorithm of a send or recv
NOT_STARTED = "none"  # the algorithm of what failed before it could start

# Upper bounds in seconds of the buckets of histograms: from a doorbell round to waits that need attention.
BOUNDS = (
    *(5e-5, 1e-4, 2.5e-4, 5e-4),
    *(1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 10.0, 60.0),
)


@dataclass(slots=True)
class Histogram:
    """Durations by bucket: `counts[i]` are those up to `BOUNDS[i]` seconds and beyond the bound before, the last one is
    what is beyond all."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds

    def add_many(self, count: int, seconds: float) -> None:
        """Add so many durations of which the sum alone is known: each counts as their mean."""
        self.counts[bisect_left(BOUNDS, seconds / count)] += count
        self.seconds += seconds

    def merge(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.seconds += other.seconds


@dataclass(slots=True)
class OperationTotals:
    """The work of one operation by one algorithm: bytes, and how long since the first local rank's submission."""

    nbytes: int = 0
    durations: Histogram = field(default_factory=Histogram)

    def merge(self, other: OperationTotals) -> None:
        self.nbytes += other.nbytes
        self.durations.merge(other.durations)


@dataclass(slots=True)
class Counters:
    """The counts of one group loop. Written by it alone; may be read from any thread.

    Attributes:
        done, failed: instances.
        result_bytes: of what was done.
        folded_bytes: that folds of local contributions have read.
        copied_bytes: of local contributions that were copied where they might have been read in place.
        stalls: instances, sends and receives that have waited for longer than `stall_after`.
        totals: of what was done, by operation and algorithm; sends and receives too.
        waits: by operation, how long the first local rank waited for the last one.
        failures: of instances, by operation, algorithm and the verdict's code.
        verdicts: by code.
    """

    done: int = 0
    failed: int = 0
    result_bytes: int = 0
    folded_bytes: int = 0
    copied_bytes: int = 0
    stalls: int = 0
    totals: dict[tuple[str, str], OperationTotals] = field(default_factory=dict)
    waits: dict[str, Histogram] = field(default_factory=dict)
    failures: dict[tuple[str, str, int], int] = field(default_factory=dict)
    verdicts: dict[int, int] = field(default_factory=dict)

    def count_completed(self, operation: Operation, algorithm: str, nbytes: int, seconds: float) -> None:
        """Count an operation that completed so many seconds after it was first submitted."""
        known = self._find_totals(OPERATIONS[type(operation)], algorithm)
        known.nbytes += nbytes
        known.durations.add(seconds)

    def count_many(self, operation: str, algorithm: str, count: int, nbytes: int, seconds: float) -> None:
        """Count so many operations of one kind, of which the sums of bytes and seconds are known."""
        known = self._find_totals(operation, algorithm)
        known.nbytes += nbytes
        known.durations.add_many(count, seconds)

    def _find_totals(self, operation: str, algorithm: str) -> OperationTotals:
        known = self.totals.get((operation, algorithm))
        if known is None:
            known = self.totals[operation, algorithm] = OperationTotals()
        return known

    def observe_wait(self, operation: Operation, seconds: float) -> None:
        """Count how long the first local rank has waited for the last one."""
        name = OPERATIONS[type(operation)]
        known = self.waits.get(name)
        if known is None:
            known = self.waits[name] = Histogram()
        known.add(seconds)

    def observe_waits(self, operation: Operation, count: int, seconds: float) -> None:
        """Count so many of these waits, of which the sum is known."""
        self.waits.setdefault(OPERATIONS[type(operation)], Histogram()).add_many(count, seconds)

    def count_failure(self, operation: Operation, algorithm: str, code: int) -> None:
        key = OPERATIONS[type(operation)], algorithm, code
        self.failures[key] = self.failures.get(key, 0) + 1

    def count_verdict(self, code: int) -> None:
        self.verdicts[code] = self.verdicts.get(code, 0) + 1

    def merge(self, other: Counters) -> None:
        """Add what another group loop has done."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for key, tally in list(other.totals.items()):
            self.totals.setdefault(key, OperationTotals()).merge(tally)
        for operation, histogram in list(other.waits.items()):
            self.waits.setdefault(operation, Histogram()).merge(histogram)
        _add(self.failures, other.failures)
        _add(self.verdicts, other.verdicts)


_NUMBERS = ("done", "failed", "result_bytes", "folded_bytes", "copied_bytes", "stalls")


def _add(mine: dict[_Key, int], theirs: dict[_Key, int]) -> None:
    for key, count in list(theirs.items()):
        mine[key] = mine.get(key, 0) + count
