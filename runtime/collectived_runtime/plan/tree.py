"""Binomial tree: reduce to a root, broadcast from a root, and both after each other.

A participant's *place* is its distance from the root in the circle of members. In round k of a reduce the places with
bit k as their lowest set bit hand what they hold to the place without that bit; a broadcast is the same backwards. The
subtree of a place is a run of places, so what is folded together are neighbours in the circle.

P participants take ceil(log2 P) rounds each way, and each sends the whole span at most once upwards; good for short
spans. Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from collectived_runtime.plan.moves import Buffer, FinishMove, FoldMove, Plan, RecvMove, Round, SendMove, Span
from collectived_runtime.plan.spans import prepend_finish


def reduce(members: Sequence[int], me: int, span: Span, root: int) -> Plan:
    """The root ends with the fold of all contributions, the others with nothing."""
    finish: Round = (FinishMove(span, _holder(members)),) if me == root else ()
    return (*reduce_rounds(members, me, span, root), finish)


def broadcast(members: Sequence[int], me: int, span: Span, root: int) -> Plan:
    """Every member ends with the root's contribution."""
    finish = FinishMove(span, Buffer.INPUT) if me == root else None
    return tuple(prepend_finish(finish, broadcast_rounds(members, me, span, root)))


def all_reduce(members: Sequence[int], me: int, span: Span) -> Plan:
    """Every member ends with the fold of all contributions, made by the first member."""
    return tuple(all_reduce_rounds(members, me, span))


def all_reduce_rounds(members: Sequence[int], me: int, span: Span) -> Iterator[Round]:
    root = members[0]
    finish = FinishMove(span, _holder(members)) if me == root else None
    return chain(
        reduce_rounds(members, me, span, root), prepend_finish(finish, broadcast_rounds(members, me, span, root))
    )


def depth(size: int) -> int:
    """Return the rounds of a binomial tree one way."""
    return (size - 1).bit_length()


def _holder(members: Sequence[int]) -> Buffer:
    """Where the root of a reduce has the fold of all contributions."""
    return Buffer.SCRATCH if len(members) > 1 else Buffer.INPUT


def reduce_rounds(members: Sequence[int], me: int, span: Span, root: int) -> Iterator[Round]:
    """The way up: `depth` rounds, after which the root holds the fold of all in SCRATCH."""
    size, first = len(members), members.index(root)
    place = (members.index(me) - first) % size
    holder, lowest = Buffer.INPUT, me
    sent = False
    for level in range(depth(size)):
        reach = 1 << level
        if sent or (not place & reach and place + reach >= size):
            yield ()
        elif place & reach:
            sent = True
            yield (SendMove(members[(first + place - reach) % size], span, holder),)
        else:
            subtree = range(first + place + reach, first + min(place + 2 * reach, size))
            received_lowest = min(members[at % size] for at in subtree)
            fold = FoldMove(holder, received_left=received_lowest < lowest)
            yield (RecvMove(members[subtree[0] % size], span, Buffer.SCRATCH, fold),)
            holder, lowest = Buffer.SCRATCH, min(lowest, received_lowest)


def broadcast_rounds(members: Sequence[int], me: int, span: Span, root: int) -> Iterator[Round]:
    """The way down: `depth` rounds, before which the root has the result in OUTPUT."""
    size, first = len(members), members.index(root)
    place = (members.index(me) - first) % size
    for level in reversed(range(depth(size))):
        reach = 1 << level
        if place % (2 * reach) == reach:
            yield (RecvMove(members[(first + place - reach) % size], span, Buffer.OUTPUT),)
        elif place % (2 * reach) == 0 and place + reach < size:
            yield (SendMove(members[(first + place + reach) % size], span, Buffer.OUTPUT),)
        else:
            yield ()
