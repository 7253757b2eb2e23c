"""Reductions of values with sparse leaves: what is dense travels as one collective, then each sparse leaf as a gather
of its values and indices, one after another. See tf.distribute's IndexedSlices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from collectived.calls.call import Call
from collectived.calls.channel import RankChannel
from collectived.calls.prepare import FlatValue, PreparedCall
from collectived.calls.unobserved_errors import UnobservedErrors
from collectived.values import nest
from collectived.values.indexed_slices import IndexedSlices, divide
from collectived.values.leaves import check_reducible, element_type, format_path
from collectived.values.sparse import select_leaves
from collectived.work import Work
from collectived_proto.types import AllGather, AllReduce, Gather, Operation, Reduce, ReduceOp


class SubCollective(NamedTuple):
    """One collective of several.

    Attributes:
        leaf_indices: of its leaves in the whole value.
        sparse_leaves: of all leaves of the `IndexedSlices` that it gathers; empty for the dense part.
    """

    operation: Operation
    value: FlatValue
    leaf_indices: tuple[int, ...]
    sparse_leaves: range = range(0)


def split_sparse(operation: AllReduce | Reduce, value: FlatValue, size: int) -> list[SubCollective]:
    """The collectives that reduce a value with sparse leaves.

    Raises:
        TypeError: a sparse leaf's elements, or sparse values altogether, cannot be reduced so.
    """
    sparse = {number for numbers in value.sparse_leaves for number in numbers}
    dense = tuple([number for number in range(len(value.arrays)) if number not in sparse])
    gather = AllGather() if isinstance(operation, AllReduce) else Gather(operation.root)
    found = [SubCollective(operation, _select_leaves(value, dense), dense)] if dense else []
    for numbers in value.sparse_leaves:
        pair = tuple(numbers[:2])
        mean = _check(operation.reduce_op, value, pair[0])
        selected = _select_leaves(value, pair)
        found.append(SubCollective(gather, _divide_values(selected, size) if mean else selected, pair, numbers))
    return found


def _check(reduce_op: ReduceOp, value: FlatValue, number: int) -> bool:
    """Whether values are to be divided."""
    path = nest.paths(value.spec)[number]
    if reduce_op not in (ReduceOp.SUM, ReduceOp.MEAN):
        owner = format_path(path.removesuffix(".values"))
        raise TypeError(f"{owner} is IndexedSlices, which {reduce_op.value} does not take: sum and mean do")
    check_reducible(Reduce(reduce_op), element_type(value.leaf_types[number][1], path), path)
    return reduce_op is ReduceOp.MEAN


def _select_leaves(value: FlatValue, numbers: Sequence[int]) -> FlatValue:
    arrays = [value.arrays[number] for number in numbers]
    return FlatValue(
        select_leaves(value.spec, value.arrays, set(numbers)),
        arrays,
        tuple([value.leaf_types[number] for number in numbers]),
    )


def _divide_values(pair: FlatValue, size: int) -> FlatValue:
    """The values of a sparse leaf divided before they travel, each element once: so results keep their kind."""
    values, indices = pair.arrays
    quotient = divide(values, size)
    (kind, _, shape), other = pair.leaf_types
    return FlatValue(pair.spec, [quotient, indices], ((kind, quotient.dtype, shape), other))


def check_rebuildable(found: Sequence[PreparedCall], parts: Sequence[SubCollective], whole: FlatValue) -> None:
    """Tries to put a result together; see `nest.check_rebuildable`."""
    leaves: list[Any] = [None] * len(whole.arrays)
    for prepared, part in zip(found, parts, strict=True):
        for number, leaf in zip(part.leaf_indices, prepared.make_placeholders(), strict=True):
            leaves[number] = leaf
    nest.check_rebuildable(whole.spec, leaves)


class CompositeWork(Work[Any]):
    """A reduction in several collectives; of this rank's own sparse leaves the result keeps `dense_shape`."""

    def __init__(
        self,
        calls: Sequence[Call],
        route: RankChannel,
        uncollected: UnobservedErrors,
        parts: Sequence[SubCollective],
        whole: FlatValue,
    ) -> None:
        super().__init__(calls, route, uncollected)
        self._sub_collectives = {id(call): part for call, part in zip(calls, parts, strict=True)}
        self._whole = whole

    def _build_value(self) -> Any:
        if not self._call.prepared.receives:
            return None
        leaves: list[Any] = [None] * len(self._whole.arrays)
        for call in self._calls:
            for number, leaf in zip(self._sub_collectives[id(call)].leaf_indices, call.take_leaves(), strict=True):
                leaves[number] = leaf
        for numbers in self._whole.sparse_leaves:
            for number, length in zip(numbers[2:], self._dense_shape(numbers), strict=True):
                leaves[number] = length
        return nest.unflatten(self._whole.spec, leaves)

    def _get_pack_leaves(self, call: Call, pack: int) -> list[tuple[nest.KeyPath, Any]]:
        part = self._sub_collectives[id(call)]
        if not part.sparse_leaves:
            return call.get_pack_leaves(pack)
        if pack != call.completed_packs[-1] or len(call.completed_packs) < call.prepared.pack_count:
            return []  # the other half is yet to come
        found = dict(leaf for number in call.completed_packs for leaf in call.get_pack_leaves(number))
        if not found:  # the result of another rank
            return []
        paths = nest.key_paths(call.spec)
        values, indices = (found[path] for path in paths)
        return [(paths[0][:-1], IndexedSlices(values, indices, self._dense_shape(part.sparse_leaves) or None))]

    def _dense_shape(self, numbers: range) -> tuple[int, ...]:
        return tuple([int(self._whole.arrays[number]) for number in numbers[2:]])
