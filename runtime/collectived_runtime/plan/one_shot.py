"""One shot: each participant sends its span to all others and folds all contributions itself, in ascending order.

One exchange, the smallest latency there is, for P-1 times the span per participant. All fold by the same tree,
so that all get the same bits although nothing is copied from one place. Known as the direct or linear exchange
of small all-reduces.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectived_runtime.plan.moves import Buffer, FinishMove, SendMove, Span
from collectived_runtime.plan.wide_moves import CollectMove, WidePlan


def all_reduce(members: Sequence[int], me: int, span: Span) -> WidePlan:
    """Every member ends with the fold of all contributions."""
    if len(members) == 1:
        return ((FinishMove(span, Buffer.INPUT),),)
    position = members.index(me)
    others = (*members[position + 1 :], *members[:position])
    sends = (SendMove(other, span, Buffer.INPUT) for other in others)
    collect = CollectMove(tuple(sorted(members)), span, Buffer.INPUT)
    return ((*sends, collect), (FinishMove(span, Buffer.SCRATCH),))
