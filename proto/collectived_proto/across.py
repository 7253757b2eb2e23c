"""What ranks of one worker do in their segment where the group has other workers, too: all say the same of it."""

from __future__ import annotations

from dataclasses import dataclass

from collectived_proto.types import AllReduce, Barrier, Broadcast, Collective, GroupInfo, Layout, Reduce

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
    """What goes into and out of the segment of a pack whose values are moved as they are. Elements.

    Attributes:
        given: by local rank, those of its value.
        brought: those that the worker brings. starts: by local rank, where its own begin there.
    """

    given: tuple[int, ...]
    brought: int
    starts: tuple[int, ...]


def meets_in_segment(collective: Collective, layout: Layout, most: int, local: LocalSeats) -> bool:
    """Whether the ranks go to other workers by their segment: their worker takes values from there, and brings results.

    Larger values go over the doorbell: the worker reads and writes them where all can see them. A rank that takes what
    comes does not know how large that is: it comes to the segment, and is told over the doorbell where it is larger.

    Args:
        most: bytes of a value, and of a result, that a segment takes in one tick.
    """
    operation = collective.operation
    if isinstance(operation, (AllReduce, Reduce, Barrier)):
        values = sum(_round_up(pack.count * pack.dtype.itemsize) for pack in layout.packs)
        results = sum(_round_up(pack.count * pack.result_dtype.itemsize) for pack in layout.packs)
        return max(values, results) <= most
    if not isinstance(operation, Broadcast):
        return False
    shares = [] if collective.open else make_shares(collective, layout, local)
    itemsizes = [pack.dtype.itemsize for pack in layout.packs]
    parts = [[*share.given, share.brought] for share in shares]
    return all(
        sum(_round_up(count * itemsize) for count, itemsize in zip(counts, itemsizes, strict=True)) <= most
        for counts in zip(*parts, strict=True)
    )


def make_shares(collective: Collective, layout: Layout, local: LocalSeats) -> list[Share]:
    """By pack, of a collective that folds nothing and is not open."""
    operation = collective.operation
    assert isinstance(operation, Broadcast)
    nothing = (0,) * len(local.ranks)
    return [
        Share(tuple(pack.count * (rank == operation.root) for rank in local.ranks), pack.count, nothing)
        for pack in layout.packs
    ]


def list_counts(share: Share, rank: int, local: LocalSeats) -> tuple[int, ...]:
    """The counts of a pack in the native core's plan of that rank; without one of them (-1), of the worker."""
    return *share.given, share.brought, 0 if rank < 0 else share.starts[local.ranks.index(rank)]


def moves_across(collective: Collective) -> bool:
    """Whether values of a collective that meets in the segment are moved as they are."""
    return not isinstance(collective.operation, (AllReduce, Reduce, Barrier))


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
