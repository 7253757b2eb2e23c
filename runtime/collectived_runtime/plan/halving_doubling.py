"""Recursive halving-doubling for any number of members and any length.

The *core* is the largest power of two of members; each member beyond it is the *guest* of a *host* in the core, its
left neighbour: it gives its whole contribution to the host before, and gets the whole result from it after. In the
core, partners at distance 1, 2, 4, … split the span that both still hold; each keeps one half and folds into it what
the other has of it. Then the halves come back in reverse order.

2 log2 P rounds and 2(P-1)/P times the span per member for a power of two; two rounds and up to two spans more for
guests and hosts otherwise. Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from collectived_runtime.plan.moves import Buffer, FinishMove, FoldMove, Plan, RecvMove, Round, SendMove, Span
from collectived_runtime.plan.spans import drop_empty_moves, idle_rounds, prepend_finish


def all_reduce(members: Sequence[int], me: int, span: Span) -> Plan:
    """Every member ends with the fold of all contributions."""
    return tuple(drop_empty_moves(all_reduce_rounds(members, me, span)))


def all_reduce_rounds(members: Sequence[int], me: int, span: Span) -> Iterator[Round]:
    levels = len(members).bit_length() - 1
    core = _Core(members, len(members) - (1 << levels))
    position = core.position(me)
    host, *guests = core.team(position)
    if me != host:
        return _remainder_rounds(host, span, levels)
    rounds = _halve_and_double(core, position, span)
    return (
        chain(_fold_remainder(host, guests, span), rounds, _send_to_remainder(guests, span))
        if core.remainder
        else rounds
    )


@dataclass(frozen=True, slots=True)
class _Core:
    """The first members are hosts, each with its guest behind it; the others are alone. Both are *teams*."""

    members: Sequence[int]
    remainder: int

    def __len__(self) -> int:
        return len(self.members) - self.remainder

    def begin(self, position: int) -> int:
        """Where that team begins among the members."""
        return position + min(position, self.remainder)

    def team(self, position: int) -> Sequence[int]:
        return self.members[self.begin(position) : self.begin(position + 1)]

    def position(self, member: int) -> int:
        at = self.members.index(member)
        return at // 2 if at < 2 * self.remainder else at - self.remainder

    def lowest(self, position: int, reach: int) -> int:
        """The lowest contribution in that team's block of `reach` teams."""
        block = position - position % reach
        return min(self.members[self.begin(block) : self.begin(block + reach)])


def _remainder_rounds(host: int, span: Span, levels: int) -> Iterator[Round]:
    return chain(
        [(SendMove(host, span, Buffer.INPUT),)], idle_rounds(2 * levels), [(RecvMove(host, span, Buffer.OUTPUT),)]
    )


def _fold_remainder(host: int, guests: Sequence[int], span: Span) -> Iterator[Round]:
    yield tuple(
        RecvMove(guest, span, Buffer.SCRATCH, FoldMove(Buffer.INPUT, received_left=guest < host)) for guest in guests
    )


def _send_to_remainder(guests: Sequence[int], span: Span) -> Iterator[Round]:
    yield tuple(SendMove(guest, span, Buffer.OUTPUT) for guest in guests)


def _halve_and_double(core: _Core, position: int, span: Span) -> Iterator[Round]:
    holder = Buffer.SCRATCH if len(core.team(position)) > 1 else Buffer.INPUT
    back: list[Round] = []
    reach = 1
    while reach < len(core):
        other = position ^ reach
        partner = core.team(other)[0]
        first, second = span.split(2)
        kept, given = (second, first) if position & reach else (first, second)
        # Both partners hold the contributions of a block of `reach` teams; the blocks are neighbours.
        fold = FoldMove(holder, received_left=core.lowest(other, reach) < core.lowest(position, reach))
        yield (SendMove(partner, given, holder), RecvMove(partner, kept, Buffer.SCRATCH, fold))
        back.append((SendMove(partner, kept, Buffer.OUTPUT), RecvMove(partner, given, Buffer.OUTPUT)))
        span, holder, reach = kept, Buffer.SCRATCH, 2 * reach
    yield from prepend_finish(FinishMove(span, holder), reversed(back))
