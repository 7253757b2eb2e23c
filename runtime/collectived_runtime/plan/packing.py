"""Packs: which leaves travel together, and where each of them lies.

A *pack* holds leaves of one type, one behind the other, as one vector. Leaves are taken last to first, because the
last layers' gradients are there first. A pack takes leaves until it holds more than `bytes_per_pack`; a leaf is never
split. The grouping rule is that of tf.distribute's collective all-reduce, applied per type. Operations that cut values
apart or join them send every leaf by itself, for each is cut along its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from collectived_proto.types import (
    AxisOperation,
    Collective,
    DType,
    Gather,
    Layout,
    Leaf,
    LeafPlacement,
    Pack,
    Reduce,
    ReduceOp,
    Reduction,
    Send,
    Tier,
    select_tier,
)
from collectived_runtime.plan.tf_packing import batches

ALIGNMENT = 64

_MEAN_OF = {
    DType.INT8: DType.FLOAT32,
    DType.INT16: DType.FLOAT32,
    DType.UINT8: DType.FLOAT32,
    DType.UINT16: DType.FLOAT32,
    DType.INT32: DType.FLOAT64,
    DType.INT64: DType.FLOAT64,
    DType.UINT32: DType.FLOAT64,
    DType.UINT64: DType.FLOAT64,
}


def result_dtype(dtype: DType, reduce_op: ReduceOp | None) -> DType:
    """The type of a result: a mean of integers is floating, for any number of ranks; all else keeps its type."""
    return _MEAN_OF.get(dtype, dtype) if reduce_op is ReduceOp.MEAN else dtype


def get_reduce_op(collective: Collective) -> ReduceOp | None:
    """The reduce op of a collective that folds, None for one that only moves."""
    operation = collective.operation
    return operation.reduce_op if isinstance(operation, Reduction) else None


def receives_result(collective: Collective, rank: int) -> bool:
    """Whether this rank gets a result: of a reduce and a gather only the root does, of a send no rank."""
    operation = collective.operation
    if isinstance(operation, (Reduce, Gather)):
        return operation.root == rank
    return not isinstance(operation, Send)


def layout(collective: Collective, rank: int, automatic: int = 0) -> Layout:
    """The packs of a collective and the place of every leaf, the same on all ranks but for `result_bytes`.

    Args:
        collective: the description; no leaves (a barrier, an open collective), no packs.
        rank: whose layout; a rank that receives no result has `result_bytes` 0. So has one that will get the form of
            its result by an outline.
        automatic: the pack size in bytes where the collective leaves it open; 0 is one pack per type.
    """
    groups = tuple(
        opened for leaves in _split_by_tier(collective) for opened in _group_into_packs(collective, leaves, automatic)
    )
    reduce_op = get_reduce_op(collective)
    packs, places = [], [LeafPlacement(0, 0)] * len(collective.leaves)
    staging_bytes = result_bytes = 0
    for number, opened in enumerate(groups):
        for index, offset in zip(opened.leaves, opened.offsets, strict=True):
            places[index] = LeafPlacement(number, offset)
        result = result_dtype(opened.dtype, reduce_op)
        packs.append(Pack(opened.dtype, result, opened.count, staging_bytes, result_bytes))
        staging_bytes += align_up(opened.count * opened.dtype.itemsize)
        result_bytes += align_up(opened.count * result.itemsize)
    outlined = isinstance(collective.operation, AxisOperation)
    received = result_bytes if receives_result(collective, rank) and not outlined else 0
    return Layout(tuple(packs), tuple(places), staging_bytes, received)


def select_leaf_tier(collective: Collective, leaf: int) -> Tier:
    """The tier of `all_reduce_spec` that carries a leaf: by its own bytes, before packing."""
    return select_tier(collective.all_reduce_spec, collective.leaves[leaf].nbytes)


def _split_by_tier(collective: Collective) -> Iterator[list[int]]:
    """Leave by index, in one list per tier; all in one where there is no specification."""
    everything = range(len(collective.leaves))
    if isinstance(collective.operation, AxisOperation):
        yield from ([leaf] for leaf in reversed(everything))
        return
    if not collective.all_reduce_spec:
        yield list(everything)
        return
    chosen: dict[int, list[int]] = {id(tier): [] for tier in collective.all_reduce_spec}
    for leaf in everything:
        chosen[id(select_leaf_tier(collective, leaf))].append(leaf)
    yield from chosen.values()


def _group_into_packs(collective: Collective, indices: Sequence[int], automatic: int) -> Iterator[PackGroup]:
    leaves = [collective.leaves[index] for index in indices]
    packing = collective.packing
    if packing is None:
        for opened in group_leaves(leaves, collective.bytes_per_pack or automatic):
            yield PackGroup(opened.dtype, [indices[leaf] for leaf in opened.leaves], opened.offsets, opened.count)
        return
    for batch in batches(leaves, packing.num_packs, packing.max_bytes, packing.max_group):
        yield PackGroup(batch.dtype, [indices[leaf] for leaf in batch.leaves], list(batch.offsets), batch.count)


@dataclass(slots=True)
class PackGroup:
    """Leaves of one pack, by index, with their offsets in elements; `count` elements in all."""

    dtype: DType
    leaves: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    count: int = 0

    def append(self, index: int, count: int) -> None:
        self.leaves.append(index)
        self.offsets.append(self.count)
        self.count += count


def group_leaves(leaves: Sequence[Leaf], bytes_per_pack: int) -> tuple[PackGroup, ...]:
    """Leaves, last first, in groups of one type; 0 bytes per pack is one group per type. In order of opening."""
    groups: list[PackGroup] = []
    latest: dict[DType, PackGroup] = {}
    for index, leaf in reversed(tuple(enumerate(leaves))):
        into = latest.get(leaf.dtype)
        if into is None or 0 < bytes_per_pack < into.count * into.dtype.itemsize:
            into = latest[leaf.dtype] = PackGroup(leaf.dtype)
            groups.append(into)
        into.append(index, leaf.count)
    return tuple(groups)


def align_up(nbytes: int) -> int:
    """Return the next multiple of a cache line."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
