"""Moves that concern several participants at once, beside those of `moves`.

A *wide* plan has such moves; it needs an executor that has the memory (`CollectMove`), or the engine (`NativeMove`),
for them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from collectived_runtime.plan.moves import Buffer, Move, Span


@dataclass(frozen=True, slots=True)
class CollectMove:
    """Receive `span` from each of `order` but me, and fold all in that order, left to right, into SCRATCH.

    `mine` stands where this participant stands in `order`. Parts are kept apart until all are there, so that the order
    does not depend on arrival; SCRATCH is written when the round's sends are done, since it may share memory with
    `mine`.
    """

    order: tuple[int, ...]
    span: Span
    mine: Buffer


class NativeKind(enum.Enum):
    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class NativeMove:
    """A collective that an engine such as NCCL carries out among `members`, all of which have it in the same round.

    ALL_REDUCE folds INPUT of all, in the engine's own order, into SCRATCH of all; REDUCE into SCRATCH of the root only;
    BROADCAST copies OUTPUT of the root to OUTPUT of the others. `members` ascend.
    """

    kind: NativeKind
    members: tuple[int, ...]
    span: Span
    root: int


WideMove = Move | CollectMove | NativeMove
WideRound = tuple[WideMove, ...]
WidePlan = tuple[WideRound, ...]
