"""How long each contestant is measured. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pace:
    """
    rounds: how often each contestant has a turn at each size.
    seconds: about how long a turn takes.
    fewest, most: calls of a turn that count.
    """

    rounds: int = 5
    seconds: float = 0.12
    fewest: int = 3
    most: int = 2000

    def calls(self, seconds_each: float) -> int:
        """How many calls a turn has, if one takes so long."""
        return max(self.fewest, min(self.most, int(self.seconds / max(seconds_each, 1e-9))))

    def warmup(self, calls: int) -> int:
        """How many calls before are not counted: what others left in the caches has to go."""
        return max(1, calls // 5)


USUAL = Pace()
QUICK = Pace(rounds=2, seconds=0.04, fewest=2, most=50)


def round_robin(contestants: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Turns of all contestants. Each round begins with another one, so that a slower machine affects all alike."""
    for number in range(rounds):
        for place in range(len(contestants)):
            yield number, contestants[(place + number) % len(contestants)]


def slowest(times: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each call on the rank where it took longest; `times` by rank."""
    return [max(call) for call in zip(*times, strict=True)]
