"""How the ranks of one host carry out a collective by themselves: what each puts in, and what it gets. Pure.

It follows from the contract alone, so that all ranks do the same. Where lengths or structure may differ, it follows
from the *blobs* of the ranks too: of a gather or an uneven all-to-all the *rows* of each
rank, of a broadcast or scatter what its root is about to send.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectived_proto.numpy_types import to_numpy
from collectived_proto.rows import split_evenly
from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    AxisOperation,
    Barrier,
    Broadcast,
    Collective,
    Gather,
    Layout,
    Leaf,
    Reduce,
    ReduceScatter,
    Scatter,
)

Phase = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # dtype, counts, leaves in, leaves out
LeafType = tuple[np.dtype[Any], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's part in one collective.

    Attributes:
        phases: as the native core takes them.
        inputs: which leaf of the value stands where in the phases.
        outputs: which leaf of the result stands where.
        results: dtype and shape of each leaf of the result as it travels: where values are cut or joined, rows first.
        packs: the leaves of each phase, last leaves first.
    """

    phases: tuple[Phase, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    results: tuple[LeafType, ...]
    packs: tuple[tuple[int, ...], ...]


NOTHING = Schedule((), (), (), (), ())  # of a barrier, and of a rank that does not know yet what comes


def schedule(collective: Collective, layout: Layout, rank: int, size: int, rows: Sequence[Sequence[int]]) -> Schedule:
    """Return the part of `rank` in a collective that is not open.

    Args:
        rows: by rank, where lengths differ: the first length of each leaf, or what an uneven all-to-all sends to each.
    """
    operation = collective.operation
    if isinstance(operation, AxisOperation):
        return _schedule_rows(operation, collective.leaves, layout, rank, size, rows)
    return _schedule_packs(collective, layout, rank)


def _schedule_packs(collective: Collective, layout: Layout, rank: int) -> Schedule:
    """Leaves of a pack move as one vector."""
    operation = collective.operation
    assert isinstance(operation, (AllReduce, Reduce, Broadcast, Barrier))
    sends = not isinstance(operation, Broadcast) or operation.root == rank
    receives = rank == operation.root if isinstance(operation, Reduce) else True
    members: list[list[int]] = [[] for _ in layout.packs]
    for index in sorted(range(len(layout.places)), key=lambda leaf: layout.places[leaf].offset):
        members[layout.places[index].pack].append(index)
    phases = []
    for pack, leaves in zip(layout.packs, members, strict=True):
        counts = tuple(collective.leaves[leaf].count for leaf in leaves)
        phases.append((int(pack.dtype), (pack.count,), counts if sends else (), counts if receives else ()))
    order = tuple(leaf for leaves in members for leaf in leaves)
    results = [
        (to_numpy(layout.packs[place.pack].result_dtype), leaf.shape)
        for leaf, place in zip(collective.leaves, layout.places, strict=True)
    ]
    packs = tuple(tuple(sorted(leaves, reverse=True)) for leaves in members)
    return Schedule(
        tuple(phases), order if sends else (), order if receives else (), tuple(results) if receives else (), packs
    )


def _schedule_rows(
    operation: AxisOperation,
    leaves: Sequence[Leaf],
    layout: Layout,
    rank: int,
    size: int,
    rows: Sequence[Sequence[int]],
) -> Schedule:
    """Every leaf moves by itself, row by row; last leaves first."""
    phases, results = [], []
    for index, leaf in enumerate(leaves):
        width = math.prod(leaf.shape[1:])
        counts, given, got = _cut(operation, index, leaf.shape[0], rank, size, rows)
        elements = tuple(count * width for count in counts)
        takes, gives = () if given is None else (given * width,), () if got is None else (got * width,)
        phases.append((int(leaf.dtype), elements, takes, gives))
        result = to_numpy(layout.packs[layout.places[index].pack].result_dtype)
        results.append((result, (got or 0, *leaf.shape[1:])))
    order = tuple(reversed(range(len(leaves))))
    sends, receives = bool(phases and phases[0][2]), bool(phases and phases[0][3])
    return Schedule(
        tuple(reversed(phases)),
        order if sends else (),
        order if receives else (),
        tuple(results) if receives else (),
        tuple((index,) for index in order),
    )


def _cut(
    operation: AxisOperation, index: int, length: int, rank: int, size: int, rows: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], int | None, int | None]:
    """Rows by rank (of an all-to-all, by sender and receiver), those that `rank` gives, and those that it gets."""
    match operation:
        case AllGather():
            joined = tuple(row[index] for row in rows)
            return joined, joined[rank], sum(joined)
        case Gather(root):
            joined = tuple(row[index] for row in rows)
            return joined, joined[rank], sum(joined) if rank == root else None
        case Scatter(root, _, sizes):
            pieces = sizes or split_evenly(length, size)
            return pieces, length if rank == root else None, pieces[rank]
        case ReduceScatter(_, _, sizes):
            pieces = sizes or split_evenly(length, size)
            return pieces, length, pieces[rank]
        case AllToAll(_, sizes):
            table = rows if sizes else [split_evenly(length, size)] * size
            return (
                tuple(count for row in table for count in row),
                sum(table[rank]),
                sum(row[rank] for row in table),
            )
