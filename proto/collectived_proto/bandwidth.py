"""Bus bandwidth as nccl-tests defines it: algorithm bandwidth times how often a byte crosses the busiest rank's bus.

So figures of different operations and numbers of ranks can be compared with each other, and with those of nccl-tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class Factor(Enum):
    """How often a byte crosses the bus of the busiest rank."""

    TWICE = "2 (n - 1) / n"
    SHARE = "(n - 1) / n"
    ONCE = "1"
    NONE = "0"

    def of(self, ranks: int) -> float:
        match self:
            case Factor.TWICE:
                return 2 * (ranks - 1) / ranks
            case Factor.SHARE:
                return (ranks - 1) / ranks
            case Factor.ONCE:
                return 1.0
            case Factor.NONE:
                return 0.0


FACTORS: Mapping[str, Factor] = MappingProxyType(
    {
        "all_reduce": Factor.TWICE,
        "reduce": Factor.ONCE,
        "broadcast": Factor.ONCE,
        "all_gather": Factor.SHARE,
        "gather": Factor.SHARE,
        "scatter": Factor.SHARE,
        "reduce_scatter": Factor.SHARE,
        "all_to_all": Factor.SHARE,
        "barrier": Factor.NONE,
    }
)
"""By operation."""
