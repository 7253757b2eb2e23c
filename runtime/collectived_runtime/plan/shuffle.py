"""Shuffle onto parameter servers: each member sends each server its piece, and the servers fold it and send it to all.

A *server* owns one piece of the span. Servers may be members or not; one that is not contributes nothing and keeps
its own piece only. With one server this is a *star*; with all members as servers it is a direct reduce-scatter and
all-gather, in which each member sends to all others.

The participants stand in a circle; in round k of the reduce phase each sends to the k-th after it, so that a server
folds one contribution per round and no two arrive together. In the gather phase nothing is folded, so that one round
does. With S servers and P members: up to P rounds, S P pieces each way. Source: M. Li et al., "Scaling distributed
machine learning with the parameter server", OSDI 2014.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain

from collectived_runtime.plan.moves import Buffer, FinishMove, FoldMove, Move, Plan, RecvMove, Round, SendMove, Span
from collectived_runtime.plan.spans import pieces, prepend_finish


def all_reduce(members: Sequence[int], me: int, span: Span, servers: Sequence[int] = ()) -> Plan:
    """Every member ends with the fold of all contributions; `me` may also be a server. No servers: all members."""
    return tuple(all_reduce_rounds(members, me, span, servers))


def all_reduce_rounds(members: Sequence[int], me: int, span: Span, servers: Sequence[int] = ()) -> Iterator[Round]:
    servers = servers or members
    finish = None
    if me in servers:
        finish = FinishMove(pieces(span, len(servers))[servers.index(me)], holder(members, me))
    gather = gather_from_servers(members, me, span, servers)
    return chain(reduce_to_servers(members, me, span, servers), prepend_finish(finish, gather))


def holder(members: Sequence[int], server: int) -> Buffer:
    """Where a server has its piece after the reduce phase."""
    return Buffer.INPUT if tuple(members) == (server,) else Buffer.SCRATCH


def reduce_to_servers(members: Sequence[int], me: int, span: Span, servers: Sequence[int]) -> Iterator[Round]:
    """The reduce phase, after which every server holds its piece of all."""
    share = _shares(tuple(servers), span)
    contributes = frozenset(members)
    circle = _circle(tuple(members), tuple(servers))
    position = circle.index(me)
    lowest, source = (me, Buffer.INPUT) if me in contributes else (None, Buffer.SCRATCH)
    for step in range(1, len(circle)):
        after, before = circle[(position + step) % len(circle)], circle[position - step]
        moves: list[Move] = []
        if after in share and me in contributes:
            moves.append(SendMove(after, share[after], Buffer.INPUT))
        if me in share and before in contributes:
            fold = None if lowest is None else FoldMove(source, received_left=before < lowest)
            moves.append(RecvMove(before, share[me], Buffer.SCRATCH, fold))
            lowest, source = before if lowest is None else min(lowest, before), Buffer.SCRATCH
        yield tuple(moves)


def gather_from_servers(members: Sequence[int], me: int, span: Span, servers: Sequence[int]) -> Iterator[Round]:
    """The gather phase, before which every server has its piece in OUTPUT: one round, or none for one participant."""
    share = _shares(tuple(servers), span)
    circle = _circle(tuple(members), tuple(servers))
    position = circle.index(me)
    others = (*circle[position + 1 :], *circle[:position])
    moves: list[Move] = []
    if me in share:
        receivers = frozenset(members)
        moves += [SendMove(other, share[me], Buffer.OUTPUT) for other in others if other in receivers]
    if me in members:
        moves += [RecvMove(other, share[other], Buffer.OUTPUT) for other in others if other in share]
    if others:
        yield tuple(moves)


# Both are the same for all participants, and shared by those whose plans are derived in this process.


@lru_cache(maxsize=16)
def _shares(servers: tuple[int, ...], span: Span) -> Mapping[int, Span]:
    return dict(zip(servers, pieces(span, len(servers)), strict=True))


@lru_cache(maxsize=16)
def _circle(members: tuple[int, ...], servers: tuple[int, ...]) -> tuple[int, ...]:
    contributes = frozenset(members)
    return (*members, *(server for server in servers if server not in contributes))
