"""One rank's part in the whole measurement: sizes one after the other, on all ranks alike.

Ranks exchange data (how many iterations, times, wrong elements) through the group itself, before
and after the timed loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectived.bench.answers import answer, count_wrong
from collectived.bench.config import BenchConfig
from collectived.bench.figures import Figures, choose_iterations, figures
from collectived.bench.loops import BenchMemory, as_user_code, make_call, make_input, time_calls
from collectived.bench.operation_kinds import Extent, compute_extents, compute_sizes
from collectived_proto.types import ReduceOp


@dataclass(frozen=True, slots=True)
class Row:
    """One size. `errors`: wrong elements on all ranks together, None where the results were not checked."""

    extent: Extent
    figures: Figures
    errors: int | None


def plan_extents(order: BenchConfig, ranks: int) -> list[Extent]:
    """All that will be measured."""
    wished = compute_sizes(order.min_bytes, order.max_bytes, order.factor, order.step_bytes)
    return compute_extents(order.kind, wished, order.numpy_dtype.itemsize, ranks)


@as_user_code
def measure(
    order: BenchConfig, group: Any, memory: BenchMemory, extent: Extent, begins: Callable[[Extent, int], None]
) -> Row | None:
    """Measure one size on all ranks, calling `begins` with its iterations before timing them; rank 0 gets the row."""
    again = make_call(order, group, make_input(order, extent, memory, group.rank))
    probe, _ = time_calls(again, max(1, order.warmup), order.in_flight)
    iterations = order.iterations or choose_iterations(group.all_reduce("max", float(np.median(probe))) / 1e9)
    begins(extent, iterations)
    group.barrier()
    ticks, result = time_calls(again, iterations, order.in_flight)
    errors = _count_errors(order, group, extent, result) if order.should_check else None
    times = group.gather(ticks[np.newaxis])
    return None if times is None else Row(extent, figures(order.kind, extent, times), errors)


def _count_errors(order: BenchConfig, group: Any, extent: Extent, result: object) -> int:
    tolerant = order.kind.reduces and order.reduction is ReduceOp.MEAN
    found = count_wrong(result, answer(order, extent, group.rank, group.size), tolerant)
    return int(group.all_reduce("sum", found))
