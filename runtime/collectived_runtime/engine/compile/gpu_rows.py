"""How NCCL carries the rows of a leaf between the GPUs of a group: what each GPU of a worker calls. Pure.

A leaf is cut as between workers (`partition`), with GPUs as places, numbered as in the communicator of all. Where all
GPUs have shares of one length, one call gathers or scatters them. Else there is one per GPU, which broadcasts its share
or reduces it to that GPU.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from collectived_proto.types import AllGather, AxisOperation, ReduceScatter
from collectived_runtime.device.nccl.interface import MOST_ELEMENTS
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.compile.partition import Partition, RanksByWorker, Rows, partition_leaf
from collectived_runtime.plan.moves import RecvMove, SendMove, Span


class RowsCallKind(enum.Enum):
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SEND = "send"
    RECV = "recv"


@dataclass(frozen=True, slots=True)
class RowsCall:
    """A call of NCCL.

    Attributes:
        span: wide positions. Of an ALL_GATHER or a REDUCE_SCATTER, this GPU's own; else those that are carried.
        peer: the root, or the rank at the other end; -1: neither.
    """

    kind: RowsCallKind
    span: Span
    peer: int = -1


@dataclass(frozen=True, slots=True)
class GpuRows:
    """The part of one GPU. `ranks` are those on it; `cut` is the leaf as this GPU sees it."""

    ranks: tuple[int, ...]
    cut: Partition
    calls: tuple[RowsCall, ...]


@dataclass(frozen=True, slots=True)
class LeafRows:
    """A leaf that is cut: its number, how many rows it has, and how many elements each. `rows` as of `partition_leaf`.

    Attributes:
        units: for how many elements NCCL takes one.
    """

    number: int
    length: int
    width: int
    rows: Rows
    units: int


def plan_gpu_rows(operation: AxisOperation, topology: GroupTopology, leaf: LeafRows) -> tuple[GpuRows, ...]:
    """For each GPU of this worker, in the order of the communicator."""
    found = []
    for number, (place, _) in enumerate(topology.gpus):
        if place == topology.place:
            gpus = RanksByWorker(topology.ranks_by_gpu, number)
            cut = partition_leaf(operation, gpus, leaf.number, leaf.length, leaf.width, leaf.rows)
            found.append(GpuRows(gpus.own_ranks, cut, _list_calls(operation, cut, number, leaf.units)))
    return tuple(found)


def _list_calls(operation: AxisOperation, cut: Partition, me: int, units: int) -> tuple[RowsCall, ...]:
    if isinstance(operation, AllGather):
        return _share_calls(cut.shares, me, units, RowsCallKind.ALL_GATHER, RowsCallKind.BROADCAST)
    if isinstance(operation, ReduceScatter):
        return _share_calls(cut.shares, me, units, RowsCallKind.REDUCE_SCATTER, RowsCallKind.REDUCE)
    calls = []
    for moves in cut.plan:
        for move in moves:
            if isinstance(move, (SendMove, RecvMove)) and len(move.span):
                kind = RowsCallKind.SEND if isinstance(move, SendMove) else RowsCallKind.RECV
                calls.append(RowsCall(kind, move.span, move.peer))
    return tuple(calls)


def _share_calls(
    shares: Sequence[Span], me: int, units: int, together: RowsCallKind, one_by_one: RowsCallKind
) -> tuple[RowsCall, ...]:
    lengths = {len(share) for share in shares}
    if lengths == {0}:
        return ()
    # The result of several calls lies otherwise.
    if len(lengths) == 1 and len(shares[me]) * units <= MOST_ELEMENTS:
        return (RowsCall(together, shares[me]),)
    return tuple(RowsCall(one_by_one, share, gpu) for gpu, share in enumerate(shares) if len(share))
