"""Where the results of a rank lie in its own memory on a GPU, as clients and workers reckon alike.

Of an operation that cuts values apart or joins them, leaves stand one behind the other, each with its rows together. Of
all others the result is laid out as `Layout` says.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from collectived_proto.rows import lacks_axis, split_evenly
from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Layout,
    Reduce,
    ReduceScatter,
)

_ALIGNMENT = 64  # bytes
_ROW_OPERATIONS = (AllGather, ReduceScatter, AllToAll)
_WHOLE_OPERATIONS = (AllReduce, Reduce, Broadcast)


class DeviceRows(NamedTuple):
    """Where the leaves of a result lie. `offsets` and `ends`, in bytes, and `rows` are by pack, each of one leaf."""

    offsets: tuple[int, ...]
    ends: tuple[int, ...]
    rows: tuple[int, ...]
    nbytes: int


def is_carried_on_gpus(collective: Collective) -> bool:
    """Whether values and results may lie on a GPU; all others pass by the host."""
    operation = collective.operation
    if collective.open or not collective.leaves:
        return False
    if not isinstance(operation, _ROW_OPERATIONS):
        return isinstance(operation, _WHOLE_OPERATIONS)
    return not lacks_axis(collective)


def lay_out_device_rows(collective: Collective, layout: Layout, rank: int, size: int) -> DeviceRows | None:
    """Where a rank of a group of that size has its result; None where `layout` says so, or it is not carried on GPUs.

    Of an all_gather it is where it lies if all ranks have as many rows as this one, of an all_to_all with sizes if this
    rank gets as many as it gives. Else it passes by the host.
    """
    operation = collective.operation
    if not isinstance(operation, _ROW_OPERATIONS) or not is_carried_on_gpus(collective):
        return None
    found = [(0, 0, 0)] * len(layout.packs)
    end = 0
    for leaf, place in zip(collective.leaves, layout.places, strict=True):
        rows = _count_rows(operation, leaf.shape[0], rank, size)
        nbytes = rows * math.prod(leaf.shape[1:]) * layout.packs[place.pack].result_dtype.itemsize
        found[place.pack] = end, end + nbytes, rows
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    offsets, ends, counts = zip(*found, strict=True)
    return DeviceRows(offsets, ends, counts, end)


def _count_rows(operation: AllGather | ReduceScatter | AllToAll, length: int, rank: int, size: int) -> int:
    if isinstance(operation, AllGather):
        return length * size
    if isinstance(operation, ReduceScatter):
        return operation.sizes[rank] if operation.sizes else split_evenly(length, size)[rank]
    return length if operation.sizes else split_evenly(length, size)[rank] * size
