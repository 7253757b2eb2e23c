"""A cell of the drills: one fault on one target, under one hard cap; and the table of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.drills.scene import Scene

Drill = Callable[["Scene"], None]

VICTIM = 2  # the rank whose client is hit, and the first rank of the worker that is hit where there are several


@dataclass(frozen=True, slots=True)
class Cell:
    """
    Attributes:
        family: which table of the report it is in. fault, target: what happens to whom.
        deadline: seconds that every call is given; 0: none.
        workers: 1, with three ranks; or 3, with ranks 0 and 1 on the first and one on each other.
        cap: seconds after which the cell is given up: a hang.
        linked: the links between workers pass through the proxy.
        hit: the task of the worker that is hit; other groups keep away from it. -1: none.
        grace: seconds beyond deadline + 250 ms that are promised where a host vanishes.
        orphans: ranks that may decide alone, because their own worker is hit.
        alone: no group is formed for it: the drill has processes of its own.
        bystanders: another group on the same workers is watched.
        apart: every worker is on a host of its own, in a network namespace.
        remote: clients reach their workers over TCP, by gRPC alone.
        short: part of the short form.
    """

    family: str
    fault: str
    target: str
    drill: Drill
    deadline: float = 0.0
    workers: int = 1
    cap: float = 20.0
    linked: bool = False
    hit: int = -1
    grace: float = 0.0
    orphans: tuple[int, ...] = ()
    alone: bool = False
    bystanders: bool = True
    short: bool = False
    apart: bool = False
    remote: bool = False

    @property
    def name(self) -> str:
        timeout = "with timeout" if self.deadline else "without timeout"
        parts = [f"{self.target}: {self.fault}"]
        if self.family == "faults":
            parts.append(timeout)
        return ", ".join([*parts, f"{self.workers} worker{'s' * (self.workers > 1)}"])

    @property
    def placement(self) -> tuple[int, ...]:
        """Rank -> task of its worker."""
        return (0, 0, 0) if self.workers == 1 else (0, 0, 1, 2)


ALL: list[Cell] = []


def fault(
    fault: str,
    target: str,
    *,
    deadline: float = 8.0,
    without: bool = True,
    given: bool = True,
    workers: tuple[int, ...] = (1, 3),
    short: tuple[tuple[bool, int], ...] = (),
    cap: float = 20.0,
    linked: bool = False,
    hit: tuple[int, int] = (-1, -1),
    grace: float = 0.0,
    orphans: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    apart: bool = False,
    remote: bool = False,
) -> Callable[[Drill], Drill]:
    """Makes cells of a drill: with `deadline` and without, on one worker and on three.

    Args:
        given, without: whether there is a cell with a timeout, and one without.
        short: (with timeout, workers) of the cells that are part of the short form.
        hit, orphans: for one worker and for three.
    """

    def made(drill: Drill) -> Drill:
        for count in workers:
            at = 0 if count == 1 else 1
            for timed in [True] * given + [False] * without:
                ALL.append(
                    Cell(
                        "faults",
                        fault,
                        target,
                        drill,
                        deadline if timed else 0.0,
                        count,
                        cap,
                        linked,
                        hit[at],
                        grace,
                        orphans[at],
                        short=(timed, count) in short,
                        apart=apart,
                        remote=remote,
                    )
                )
        return drill

    return made
