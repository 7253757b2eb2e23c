"""A goal beside what was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """
    what: is measured.
    measured: the number.
    relation: `≥`, `≤` or `<`, of the number to its goal.
    goal: in the same unit.
    unit: shown after both.
    note: where the number comes from, such as the size at which it is worst.
    """

    what: str
    measured: float
    relation: str
    goal: float
    unit: str = ""
    note: str = ""

    @property
    def met(self) -> bool:
        if self.relation == "≥":
            return self.measured >= self.goal
        return self.measured < self.goal if self.relation == "<" else self.measured <= self.goal


def worst(lines: Iterable[Line]) -> Line:
    """Of the same goal, measured several times, that which is farthest on its wrong side."""
    found = list(lines)
    return min(found, key=_margin)


def _margin(line: Line) -> float:
    return line.measured if line.relation == "≥" else -line.measured


def number(value: float) -> str:
    """Three digits: `0.0123`, `1.23`, `123`, `4567`."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.095 else f"{value:.2g}"


def table(lines: Iterable[Line]) -> str:
    """Markdown: goal, measured, met."""
    rows = ["| what | goal | measured | met |", "|---|---|---|---|"]
    for line in lines:
        unit = f" {line.unit}" if line.unit else ""
        note = f" ({line.note})" if line.note else ""
        met = "yes" if line.met else "**no**"
        rows.append(
            f"| {line.what} | {line.relation} {number(line.goal)}{unit} | {number(line.measured)}{unit}{note} | {met} |"
        )
    return "\n".join(rows)
