"""One shot: everybody sends everything to everybody and folds all contributions itself, in ascending order.

One exchange, the smallest latency there is, for P-1 times the span per participant. Everybody folds by the same tree,
so that everybody gets the same bits although nothing is copied from one place. Known as the direct or linear exchange
of small all-reduces.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectived_runtime.plan.collect import Collect, WidePlan
from collectived_runtime.plan.moves import Buffer, Finish, Send, Span


def all_reduce(members: Sequence[int], me: int, span: Span) -> WidePlan:
    """Every member ends with the fold of all contributions."""
    if len(members) == 1:
        return ((Finish(span, Buffer.INPUT),),)
    position = members.index(me)
    others = (*members[position + 1 :], *members[:position])
    sends = (Send(other, span, Buffer.INPUT) for other in others)
    collect = Collect(tuple(sorted(members)), span, Buffer.INPUT)
    return ((*sends, collect), (Finish(span, Buffer.SCRATCH),))
