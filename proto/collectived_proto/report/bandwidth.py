"""Bus bandwidth as nccl-tests defines it: algorithm bandwidth times how often a byte crosses the busiest rank's bus.

So figures of different operations and numbers of ranks can be compared with each other, and with those of nccl-tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class BusFactor(Enum):
    """How often a byte crosses the bus of the busiest rank."""

    TWICE = "2 (n - 1) / n"
    SHARE = "(n - 1) / n"
    ONCE = "1"
    NONE = "0"

    def compute(self, ranks: int) -> float:
        match self:
            case BusFactor.TWICE:
                return 2 * (ranks - 1) / ranks
            case BusFactor.SHARE:
                return (ranks - 1) / ranks
            case BusFactor.ONCE:
                return 1.0
            case BusFactor.NONE:
                return 0.0


BUS_FACTORS: Mapping[str, BusFactor] = MappingProxyType(
    {
        "all_reduce": BusFactor.TWICE,
        "reduce": BusFactor.ONCE,
        "broadcast": BusFactor.ONCE,
        "all_gather": BusFactor.SHARE,
        "gather": BusFactor.SHARE,
        "scatter": BusFactor.SHARE,
        "reduce_scatter": BusFactor.SHARE,
        "all_to_all": BusFactor.SHARE,
        "barrier": BusFactor.NONE,
    }
)
"""By operation."""
