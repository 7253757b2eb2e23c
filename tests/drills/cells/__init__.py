"""The cells, by what is hit: every module adds its own to the table."""

from __future__ import annotations

from tests.drills.cells import (
    clients,
    contracts,
    coordinator,
    endurance,
    far_clients,
    links,
    members,
    pairs,
    partitions,
    workers,
)

from ..cell import ALL

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
