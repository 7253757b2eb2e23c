"""Collectives that only move data: gather, scatter, all-to-all; and the barrier, which moves none.

A *share* is what belongs to one member; shares may differ in length and may be empty. `all_to_all` has a *table* of
spans instead: `table[i][j]` goes from member i to member j. Its rows are neighbours, so that INPUT of member i is row
i and OUTPUT of member j is column j, both with positions in the whole table; they never share memory.

Gather and scatter are one round with a frame per member, which moves each element once. All-to-all takes P-1 rounds
of pairs at growing distance (R. Thakur et al., IJHPCA 2005). The barrier is the dissemination barrier of D. Hensgen,
R. Finkel, U. Manber, "Two algorithms for barrier synchronization", IJPP 1988: ceil(log2 P) rounds of empty frames.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectived_runtime.plan.moves import Buffer, FinishMove, Plan, RecvMove, SendMove, Span


def gather(members: Sequence[int], me: int, shares: Sequence[Span], root: int) -> Plan:
    """The root ends with all shares, the others with nothing."""
    own = shares[members.index(me)]
    if me != root:
        return ((SendMove(root, own, Buffer.INPUT),),)
    pairs = zip(members, shares, strict=True)
    receives = (RecvMove(member, share, Buffer.OUTPUT) for member, share in pairs if member != root)
    return ((FinishMove(own, Buffer.INPUT), *receives),)


def scatter(members: Sequence[int], me: int, shares: Sequence[Span], root: int) -> Plan:
    """Member i ends with the root's `shares[i]`."""
    own = shares[members.index(me)]
    if me != root:
        return ((RecvMove(root, own, Buffer.OUTPUT),),)
    pairs = zip(members, shares, strict=True)
    sends = (SendMove(member, share, Buffer.INPUT) for member, share in pairs if member != root)
    return ((FinishMove(own, Buffer.INPUT), *sends),)


def all_to_all(members: Sequence[int], me: int, table: Sequence[Sequence[Span]]) -> Plan:
    """Member j ends with column j of the table."""
    size, position = len(members), members.index(me)
    rounds: list[tuple[FinishMove | SendMove | RecvMove, ...]] = [
        (FinishMove(table[position][position], Buffer.INPUT),)
    ]
    for step in range(1, size):
        to, source = (position + step) % size, (position - step) % size
        rounds.append(
            (
                SendMove(members[to], table[position][to], Buffer.INPUT),
                RecvMove(members[source], table[source][position], Buffer.OUTPUT),
            )
        )
    return tuple(rounds)


def barrier(members: Sequence[int], me: int) -> Plan:
    """Plan a barrier: no member ends before all have begun."""
    size, position = len(members), members.index(me)
    nothing = Span(0, 0)
    return tuple(
        (
            SendMove(members[(position + (1 << level)) % size], nothing, Buffer.INPUT),
            RecvMove(members[position - (1 << level)], nothing, Buffer.SCRATCH),
        )
        for level in range((size - 1).bit_length())
    )
