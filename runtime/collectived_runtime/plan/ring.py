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

from collectived_runtime.plan.moves import Buffer, Finish, Fold, Plan, Recv, Round, Send, Span
from collectived_runtime.plan.spans import finishing, pieces, without_idle_moves

_RECEIVED_LEFT = Fold(Buffer.INPUT, received_left=True)
_RECEIVED_RIGHT = Fold(Buffer.INPUT, received_left=False)


def all_reduce(members: Sequence[int], me: int, span: Span) -> Plan:
    """Every member ends with the fold of all contributions."""
    return tuple(all_reduce_rounds(members, me, span))


def all_reduce_rounds(members: Sequence[int], me: int, span: Span) -> Iterator[Round]:
    """`all_reduce`, one round at a time: a ring of thousands has too many to keep for every member."""
    shares = pieces(span, len(members))
    finish = Finish(shares[members.index(me)], _holder(members))
    rounds = chain(fold_around(members, me, shares), finishing(finish, pass_around(members, me, shares)))
    return rounds if len(span) >= len(members) else without_idle_moves(rounds)


def reduce_scatter(members: Sequence[int], me: int, shares: Sequence[Span]) -> Plan:
    """Member i ends with the fold of all contributions in `shares[i]`, and with nothing elsewhere."""
    finish = (Finish(shares[members.index(me)], _holder(members)),)
    return tuple(without_idle_moves(chain(fold_around(members, me, shares), [finish])))


def all_gather(members: Sequence[int], me: int, shares: Sequence[Span]) -> Plan:
    """Member i contributes `shares[i]`; every member ends with all shares."""
    finish = Finish(shares[members.index(me)], Buffer.INPUT)
    return tuple(without_idle_moves(finishing(finish, pass_around(members, me, shares))))


def fold_around(members: Sequence[int], me: int, shares: Sequence[Span]) -> Iterator[Round]:
    """The reduce phase: P-1 rounds, after which member i holds `shares[i]` of all in SCRATCH."""
    size, position = len(members), members.index(me)
    after, before = members[(position + 1) % size], members[position - 1]
    lowest = me
    source = Buffer.INPUT
    for step in range(1, size):
        # What arrives now holds the contributions of the `step` members before me.
        lowest = min(lowest, members[position - step])
        fold = _RECEIVED_LEFT if lowest < me else _RECEIVED_RIGHT
        yield (
            Send(after, shares[position - step], source),
            Recv(before, shares[position - step - 1], Buffer.SCRATCH, fold),
        )
        source = Buffer.SCRATCH


def pass_around(members: Sequence[int], me: int, shares: Sequence[Span]) -> Iterator[Round]:
    """The gather phase: P-1 rounds, before which member i has `shares[i]` in OUTPUT."""
    size, position = len(members), members.index(me)
    after, before = members[(position + 1) % size], members[position - 1]
    for step in range(size - 1):
        yield (
            Send(after, shares[position - step], Buffer.OUTPUT),
            Recv(before, shares[position - step - 1], Buffer.OUTPUT),
        )


def _holder(members: Sequence[int]) -> Buffer:
    """Where a member has its share after the reduce phase."""
    return Buffer.SCRATCH if len(members) > 1 else Buffer.INPUT
