"""Collectives of groups of several workers: which values the ranks of one worker exchange through their segment.

Every rank and the worker must come to the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from collectived_proto.rows import lacks_axis, split_evenly
from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    Gather,
    GroupInfo,
    Layout,
    Leaf,
    Operation,
    Reduce,
    ReduceScatter,
    Scatter,
)

_WHOLE = (AllReduce, Reduce, Barrier)
_CUT = (AllGather, Gather, Scatter, AllToAll, ReduceScatter)
_FOLDED = (*_WHOLE, ReduceScatter)
_LINE = 64  # bytes to which the values of a pack are rounded up there


@dataclass(frozen=True, slots=True)
class LocalSeats:
    """The ranks of one worker, in the order of their seats, of a group of so many."""

    ranks: tuple[int, ...]
    size: int

    @classmethod
    def beside(cls, rank: int, group: GroupInfo) -> LocalSeats:
        """Those of the worker of `rank`."""
        worker = group.members[rank].worker
        return cls(tuple(one.rank for one in group.members if one.worker == worker), group.size)


@dataclass(frozen=True, slots=True)
class Share:
    """The numbers of elements that go into and out of the segment for one pack.

    Attributes:
        given: by local rank, those of its value. Where they are folded, all have as many.
        brought: those that the worker brings, in all.
        starts: by local rank, where its result begins in what is brought.
        ranks: the local ranks whose results are brought one behind the other. If it is one, the others read the same.
    """

    given: tuple[int, ...]
    brought: int
    starts: tuple[int, ...]
    ranks: tuple[int, ...]


def meets_in_segment(collective: Collective, layout: Layout, most: int, local: LocalSeats) -> bool:
    """Whether the ranks go to other workers by their segment: their worker takes values from there, and brings results.

    Larger values go over the doorbell: the worker reads and writes them where all can see them. A rank that takes
    a value as it comes does not know its size: it uses the segment, and the worker sends it a doorbell message if the
    value is larger.

    Args:
        most: bytes of a value, and of a result, that a segment takes in one tick.
    """
    operation = collective.operation
    if (
        not isinstance(operation, (*_WHOLE, Broadcast, *_CUT))
        or lacks_axis(collective)
        or (isinstance(operation, AllToAll) and operation.sizes)
    ):
        return False
    if collective.open:
        return True
    parts = []
    for share, pack in zip(make_shares(collective, layout, local), layout.packs, strict=True):
        given = [_round_up(count * pack.dtype.itemsize) for count in share.given]
        parts.append([*given, _round_up(share.brought * pack.result_dtype.itemsize)])
    return all(sum(sizes) <= most for sizes in zip(*parts, strict=True))


def make_shares(collective: Collective, layout: Layout, local: LocalSeats) -> list[Share]:
    """By pack, of a collective that is not open. Lengths that may differ are taken as equal."""
    operation = collective.operation
    if not isinstance(operation, _CUT):
        giving = [not isinstance(operation, Broadcast) or rank == operation.root for rank in local.ranks]
        counts, same = [pack.count for pack in layout.packs], (0,) * len(local.ranks)
        return [Share(tuple(n * gives for gives in giving), n, same, local.ranks[:1]) for n in counts]
    leaves = {place.pack: leaf for leaf, place in zip(collective.leaves, layout.places, strict=True)}
    return [_cut(operation, leaves[pack], local) for pack in range(len(layout.packs))]


def _cut(operation: Operation, leaf: Leaf, local: LocalSeats) -> Share:
    """Of a leaf that is cut or joined, and so has a pack of its own."""
    ranks, length, width = local.ranks, leaf.shape[0], math.prod(leaf.shape[1:])
    given = (length * width,) * len(ranks)
    pieces: Sequence[int] = (length * local.size,) * local.size
    getting = ranks[:1]
    match operation:
        case Gather(root):
            getting = tuple(rank for rank in ranks if rank == root)
        case ReduceScatter(_, _, sizes):
            pieces, getting = sizes or split_evenly(length, local.size), ranks
        case Scatter(root, _, sizes):
            given = tuple(length * width * (rank == root) for rank in ranks)
            pieces, getting = sizes or split_evenly(length, local.size), ranks
        case AllToAll():
            pieces, getting = [local.size * piece for piece in split_evenly(length, local.size)], ranks
    ends = list(accumulate((pieces[rank] * width for rank in getting), initial=0))
    starts = tuple(ends[:-1]) if getting == ranks else (0,) * len(ranks)
    return Share(given, ends[-1], starts, getting)


def list_counts(share: Share, rank: int, local: LocalSeats, is_folded: bool) -> tuple[int, ...]:
    """The counts of a pack in the native core's plan of that rank; without one of them (-1), of the worker."""
    given = share.given[:1] if is_folded else share.given
    return *given, share.brought, 0 if rank < 0 else share.starts[local.ranks.index(rank)]


def moves_across(collective: Collective) -> bool:
    """Whether values of a collective that meets in the segment are moved as they are, and not folded."""
    return not isinstance(collective.operation, _FOLDED)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
