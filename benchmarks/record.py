"""The record of a run. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

REJOIN = "join again"
"""Stands for a case: how long it takes to join a group name whose last generation has just ended."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A measurement: `ranks` ranks of a contestant, with its buffers where `variant` says."""

    ranks: int
    name: str
    variant: str
    case: str


@dataclass
class Run:
    """
    seconds: the median of each cell: of the calls' times on the rank where each took longest.
    wrong: cells that gave a wrong result, and how many numbers of it were wrong.
    skipped: contestants that were not measured, with the reason.
    turns, apart: how many turns count, and in how many of them the processors were not near each other.
    """

    seconds: dict[Cell, float] = field(default_factory=dict)
    wrong: dict[Cell, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    turns: int = 0
    apart: int = 0
