"""The final values on which all participants agree while plans are checked.

A *value* is a run of *segments*; a segment is a span with the contributions in it as a bit mask (bit i: the i-th
participant in ascending order) and its fold tree as a hash. The *book* knows the goal and the fold tree of every span
that has been finished anywhere; a participant with finished values needs to remember only where.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from collectived_runtime.plan.errors import ContributionError, FoldDivergence
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.verify.postconditions import Goal

Segment = tuple[int, int, int, int]
"""start, stop, mask, tree."""
FINAL = None
Value = list[Segment] | None
"""Segments in ascending order, or FINAL: what the book says of that span."""


class FoldTrees:
    """The goal, and the fold tree of what has been finished."""

    def __init__(self, goal: Goal, participants: Iterable[int]) -> None:
        self.goal = goal
        self._names = sorted({*participants, *goal.inputs, *goal.outputs})
        self.bits = {participant: bit for bit, participant in enumerate(self._names)}
        self._contributor_masks = [
            (span, sum(1 << self.bits[who] for who in whose)) for span, whose in goal.contributors if len(span)
        ]
        self._starts = [span.start for span, _ in self._contributor_masks]
        self._trees: list[Segment] = []

    def format_names(self, mask: int) -> str:
        return ", ".join(str(name) for bit, name in enumerate(self._names) if mask >> bit & 1) or "nobody"

    def record_final(self, participant: int, value: list[Segment]) -> None:
        """A participant declares `value` final: it must be complete, and folded as all others fold it."""
        for start, stop, mask, tree in value:
            for at in range(max(bisect_right(self._starts, start) - 1, 0), len(self._starts)):
                span, whole = self._contributor_masks[at]
                if span.start >= stop:
                    break
                if span.stop > start and mask != whole:
                    raise ContributionError(
                        f"{participant} finishes {Span(start, stop)} without {self.format_names(whole & ~mask)}"
                        f" and with {self.format_names(mask & ~whole)} that should not be in it"
                    )
            self._match_tree(participant, start, stop, tree)

    def _match_tree(self, participant: int, start: int, stop: int, tree: int) -> None:
        at = bisect_right(self._trees, start, key=lambda known: known[1])
        while start < stop:
            known = self._trees[at] if at < len(self._trees) else (stop, stop, 0, 0)
            if start < known[0]:
                self._trees.insert(at, (start, min(stop, known[0]), 0, tree))
            elif tree != known[3]:
                raise FoldDivergence(
                    f"{participant} folds {Span(start, min(stop, known[1]))} by another tree than others"
                )
            start = self._trees[at][1]
            at += 1
