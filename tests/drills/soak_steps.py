"""What the ranks of a soak do as each instance: a call, what goes into it, and what must come out by NumPy."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import collectived as cd

Array = np.ndarray[Any, np.dtype[Any]]
CALLS = (
    *("all_reduce", "all_reduce", "all_reduce", "reduce", "broadcast", "all_gather", "gather"),
    *("scatter", "reduce_scatter", "all_to_all", "barrier"),
)
_ROOTED = ("reduce", "broadcast", "gather", "scatter")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_ROWS = (*(1, 4, 7, 64, 1000, 20_000) * 6, 500_000)  # some so large that ranks read them in each other's processes
_FOLDS: dict[str, Any] = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max}


@dataclass(frozen=True, slots=True)
class Step:
    """One instance of a group of `size` ranks; `seed` makes the values."""

    call: str
    op: str
    root: int
    dtype: str
    rows: int
    size: int
    seed: tuple[int, int]

    def needs(self, rank: int) -> bool:
        """Whether others do not complete it without that rank."""
        return self.call not in ("broadcast", "scatter") or self.root == rank

    def values(self, rank: int) -> Array:
        """Small whole numbers, so that sums are exact in any order; gathers join different lengths."""
        rows = self.rows + rank if self.call in ("all_gather", "gather") else self.rows
        whole = np.random.default_rng([*self.seed, rank]).integers(-8, 9, (rows, 3))
        return np.asarray(whole, self.dtype)

    def run(self, group: cd.Group, options: cd.CommunicationOptions) -> cd.Work[Any]:
        """Start it on this rank."""
        arguments: list[Any] = [] if self.call == "barrier" else [self.values(group.rank)]
        if self.call == "broadcast" and group.rank != self.root and self.seed[1] % 2:
            arguments = [None]  # takes what comes
        if self.call in _REDUCING:
            arguments.insert(0, self.op)
        rooted = {"root": self.root} if self.call in _ROOTED else {}
        work: cd.Work[Any] = getattr(group, self.call)(*arguments, **rooted, options=options, async_op=True)
        return work

    def is_right(self, rank: int, result: Any) -> bool:
        """Whether that is what NumPy makes of what all ranks have given."""
        wanted = self._expect(rank)
        if wanted is None or result is None:
            return wanted is result
        return result.shape == wanted.shape and bool(np.allclose(result, wanted, rtol=1e-6, atol=0))

    def _expect(self, rank: int) -> Array | None:
        if self.call == "barrier" or (self.call in ("reduce", "gather") and rank != self.root):
            return None
        given = [self.values(one) for one in range(self.size)]
        match self.call:
            case "all_reduce" | "reduce":
                return np.asarray(_FOLDS[self.op](given, axis=0))
            case "broadcast":
                return given[self.root]
            case "all_gather" | "gather":
                return np.concatenate(given)
            case "scatter":
                return np.array_split(given[self.root], self.size)[rank]
            case "reduce_scatter":
                return np.array_split(_FOLDS[self.op](given, axis=0), self.size)[rank]
            case _:
                return np.concatenate([np.array_split(one, self.size)[rank] for one in given])


def make_step(seed: str, instance: int, size: int) -> Step:
    """What all ranks do as that instance."""
    chosen = random.Random(f"{seed}/{instance}")
    return Step(
        chosen.choice(CALLS),
        chosen.choice(tuple(_FOLDS)),
        chosen.randrange(size),
        chosen.choice(("float32", "float64", "int32", "int64")),
        chosen.choice(_ROWS),
        size,
        (zlib.crc32(seed.encode()), instance),
    )


def make_differing_step(step: Step) -> Step:
    """What a rank does that is mistaken: nothing that `step` may be."""
    return Step("all_reduce", "max", 0, "int16", step.rows, step.size, step.seed)


@dataclass
class SoakReport:
    """What a rank has seen: how many results were right, instances that were wrong, and what failed."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)


class Soak:
    """One rank in one generation, and its successors. As instance `differing` it does what the others do not."""

    def __init__(self, group: cd.Group, seed: str, options: cd.CommunicationOptions, differing: int = -1) -> None:
        self.report = SoakReport()
        self._group = group
        self._seed = seed
        self._options = options
        self._differing = differing
        self._next: int | None = 0  # None: the generation is over

    def play(self, last: int) -> bool:
        """Does the instances before `last`, up to six in flight; whether the group lives on."""
        while self._next is not None and self._next < last:
            window = random.Random(f"{self._seed}/{self._group.rank}/{self._next}").randrange(1, 7)
            self._play_window(range(self._next, min(last, self._next + window)))
        return self._next is not None

    def _play_window(self, numbers: range) -> None:
        self._next = numbers.stop
        works: list[tuple[int, Step, cd.Work[Any]]] = []
        number = numbers.start
        try:
            for number in numbers:
                step = make_step(self._seed, number, self._group.size)
                mine = make_differing_step(step) if number == self._differing else step
                works.append((number, step, mine.run(self._group, self._options)))
        except cd.errors.CollectiveError as error:
            self._note_failure(number, error)
        for number, step, work in works:
            try:
                right = step.is_right(self._group.rank, work.result())
            except cd.errors.CollectiveError as error:
                self._note_failure(number, error)
            else:
                self.report.right += right
                self.report.wrong += [] if right else [f"{step} on rank {self._group.rank}"]

    def _note_failure(self, number: int, error: cd.errors.CollectiveError) -> None:
        """Keeps the error of an instance, and with which instance the group goes on, if it does."""
        self._next = None if error.rejoin or error.verdict is None else error.instance + 1
        self.report.failures.append(
            {
                "number": number,
                "generation": error.generation,
                "code": error.code.name,
                "cause": error.verdict.cause.name if error.verdict is not None else "",
                "missing": sorted(member.rank for member in error.missing),
                "differing": sorted(member.rank for member in error.differing),
                "instance": error.verdict.instance if error.verdict is not None else -1,
                "decided_by": error.decided_by,
                "text": str(error),
            }
        )
