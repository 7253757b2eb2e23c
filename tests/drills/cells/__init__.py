"""The cells, by what is hit: every module adds its own to the table."""

from __future__ import annotations

from ..cell import ALL
from . import clients, contracts, coordinator, endurance, far_clients, links, members, pairs, partitions, workers

__all__ = [
    "ALL",
    "clients",
    "contracts",
    "coordinator",
    "endurance",
    "far_clients",
    "links",
    "members",
    "pairs",
    "partitions",
    "workers",
]
