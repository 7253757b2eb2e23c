"""Ring: reduce-scatter, then all-gather; both can be had alone.

The members stand in a circle in the order given, and each owns one *piece* of the span. In the reduce phase piece i
starts at the member after its owner and travels once around; every member folds its contribution to it, its owner
last, so that the final value is made in one place. In the gather phase the final piece travels around again. Every
round, every member sends one piece to its successor and receives another one from its predecessor.

P members take 2(P-1) rounds; all of them together send 2(P-1) times the span, the least that any all-reduce needs.
Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from collectived_runtime.plan.moves import Buffer, FinishMove, FoldMove, Plan, RecvMove, Round, SendMove, Span
from collectived_runtime.plan.spans import drop_empty_moves, pieces, prepend_finish

_RECEIVED_LEFT = FoldMove(Buffer.INPUT, received_left=True)
_RECEIVED_RIGHT = FoldMove(Buffer.INPUT, received_left=False)


def all_reduce(members: Sequence[int], me: int, span: Span) -> Plan:
    """Every member ends with the fold of all contributions."""
    return tuple(all_reduce_rounds(members, me, span))


def all_reduce_rounds(members: Sequence[int], me: int, span: Span) -> Iterator[Round]:
    """`all_reduce`, one round at a time: a ring of thousands has too many to keep for every member."""
    shares = pieces(span, len(members))
    finish = FinishMove(shares[members.index(me)], _holder(members))
    rounds = chain(
        reduce_scatter_rounds(members, me, shares), prepend_finish(finish, all_gather_rounds(members, me, shares))
    )
    return rounds if len(span) >= len(members) else drop_empty_moves(rounds)


def reduce_scatter(members: Sequence[int], me: int, shares: Sequence[Span]) -> Plan:
    """Member i ends with the fold of all contributions in `shares[i]`, and with nothing elsewhere."""
    finish = (FinishMove(shares[members.index(me)], _holder(members)),)
    return tuple(drop_empty_moves(chain(reduce_scatter_rounds(members, me, shares), [finish])))


def all_gather(members: Sequence[int], me: int, shares: Sequence[Span]) -> Plan:
    """Member i contributes `shares[i]`; every member ends with all shares."""
    finish = FinishMove(shares[members.index(me)], Buffer.INPUT)
    return tuple(drop_empty_moves(prepend_finish(finish, all_gather_rounds(members, me, shares))))


def reduce_scatter_rounds(members: Sequence[int], me: int, shares: Sequence[Span]) -> Iterator[Round]:
    """The reduce phase: P-1 rounds, after which member i holds `shares[i]` of all in SCRATCH."""
    size, position = len(members), members.index(me)
    after, before = members[(position + 1) % size], members[position - 1]
    lowest = me
    source = Buffer.INPUT
    for step in range(1, size):
        # The span that arrives now holds the contributions of the `step` members before me.
        lowest = min(lowest, members[position - step])
        fold = _RECEIVED_LEFT if lowest < me else _RECEIVED_RIGHT
        yield (
            SendMove(after, shares[position - step], source),
            RecvMove(before, shares[position - step - 1], Buffer.SCRATCH, fold),
        )
        source = Buffer.SCRATCH


def all_gather_rounds(members: Sequence[int], me: int, shares: Sequence[Span]) -> Iterator[Round]:
    """The gather phase: P-1 rounds, before which member i has `shares[i]` in OUTPUT."""
    size, position = len(members), members.index(me)
    after, before = members[(position + 1) % size], members[position - 1]
    for step in range(size - 1):
        yield (
            SendMove(after, shares[position - step], Buffer.OUTPUT),
            RecvMove(before, shares[position - step - 1], Buffer.OUTPUT),
        )


def _holder(members: Sequence[int]) -> Buffer:
    """Where a member has its share after the reduce phase."""
    return Buffer.SCRATCH if len(members) > 1 else Buffer.INPUT
