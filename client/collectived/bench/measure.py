"""One rank's part in the whole measurement: sizes one after the other, on all ranks alike.

What ranks must know of each other (how many iterations, times, wrong elements) goes through the group itself, before
and after the timed loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectived.bench.answers import answer, wrong
from collectived.bench.figures import Figures, enough, figures
from collectived.bench.kinds import Extent
from collectived.bench.loops import timed, users_code
from collectived.bench.operations import Memory, call, value
from collectived.bench.order import Order
from collectived.bench.sizes import extents, sizes
from collectived_proto.types import ReduceOp


@dataclass(frozen=True, slots=True)
class Row:
    """One size. `errors`: wrong elements on all ranks together, None where nobody looked."""

    extent: Extent
    figures: Figures
    errors: int | None


def planned(order: Order, ranks: int) -> list[Extent]:
    """All that will be measured."""
    wished = sizes(order.min_bytes, order.max_bytes, order.factor, order.step_bytes)
    return extents(order.kind, wished, order.numpy_dtype.itemsize, ranks)


@users_code
def measure(
    order: Order, group: Any, memory: Memory, extent: Extent, begins: Callable[[Extent, int], None]
) -> Row | None:
    """Measures one size on all ranks of a group; rank 0 gets the row.

    Args:
        begins: called with the number of iterations before they are timed.
    """
    again = call(order, group, value(order, extent, memory, group.rank))
    probe, _ = timed(again, max(1, order.warmup), order.in_flight)
    iterations = order.iterations or enough(group.all_reduce("max", float(np.median(probe))) / 1e9)
    begins(extent, iterations)
    group.barrier()
    ticks, result = timed(again, iterations, order.in_flight)
    errors = _errors(order, group, extent, result) if order.checks else None
    times = group.gather(ticks[np.newaxis])
    return None if times is None else Row(extent, figures(order.kind, extent, times), errors)


def _errors(order: Order, group: Any, extent: Extent, result: object) -> int:
    """On all ranks together."""
    tolerant = order.kind.reduces and order.reduction is ReduceOp.MEAN
    found = wrong(result, answer(order, extent, group.rank, group.size), tolerant)
    return int(group.all_reduce("sum", found))
