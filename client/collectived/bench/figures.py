"""Times as figures: percentiles and bandwidths, and how many iterations give good ones. Pure.

The time of an iteration is that of the slowest rank, from the end of its iteration before to the end of this one, so it
has everything in it that a program would wait for. nccl-tests averages over ranks and iterations unless options say
otherwise; bandwidths here are of the median, which one disturbed iteration does not move. 1 GB = 10^9 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectived.bench.operation_kinds import BenchOperation, Extent

TARGET_SECONDS = 0.3
MIN_ITERATIONS, MAX_ITERATIONS = 20, 10_000
"""Iterations per size where the command gives none."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one size. Seconds; bytes per second, None where nothing is moved."""

    iterations: int
    p50: float
    p99: float
    mean: float
    algorithm_bandwidth: float | None
    bus_bandwidth: float | None


def figures(kind: BenchOperation, extent: Extent, nanoseconds: NDArray[np.int64]) -> Figures:
    """Compute the figures of one size. `nanoseconds` has the shape [ranks, iterations]."""
    ranks, iterations = nanoseconds.shape
    seconds = nanoseconds.max(axis=0) / 1e9
    p50, p99 = (float(np.percentile(seconds, percent)) for percent in (50, 99))
    bandwidth = extent.size / p50 if kind.moves_data and p50 > 0 else None
    return Figures(
        iterations=iterations,
        p50=p50,
        p99=p99,
        mean=float(seconds.mean()),
        algorithm_bandwidth=bandwidth,
        bus_bandwidth=None if bandwidth is None else bandwidth * kind.factor.compute(ranks),
    )


def choose_iterations(seconds: float) -> int:
    """How many iterations of so many seconds take about `TARGET_SECONDS`; at least 20."""
    return min(
        MAX_ITERATIONS, max(MIN_ITERATIONS, math.ceil(TARGET_SECONDS / seconds) if seconds > 0 else MAX_ITERATIONS)
    )
