"""Reductions of values with sparse leaves: what is dense travels as one collective, then each sparse leaf as a gather
of its values and indices, one after another. See tf.distribute's IndexedSlices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from collectived.calls.call import Call
from collectived.calls.prepare import Prepared, Value
from collectived.calls.route import Route
from collectived.calls.uncollected import Uncollected
from collectived.values import nest
from collectived.values.indexed_slices import IndexedSlices, divided
from collectived.values.leaves import check_reducible, element_type, shown
from collectived.values.sparse import only
from collectived.work import Work
from collectived_proto.types import AllGather, AllReduce, Gather, Operation, Reduce, ReduceOp


class Part(NamedTuple):
    """One collective of several.

    Attributes:
        numbers: of its leaves in the whole value.
        sparse: of all leaves of the `IndexedSlices` that it gathers; empty for the dense part.
    """

    operation: Operation
    value: Value
    numbers: tuple[int, ...]
    sparse: range = range(0)


def parts(operation: AllReduce | Reduce, value: Value, size: int) -> list[Part]:
    """The collectives that reduce a value with sparse leaves.

    Raises:
        TypeError: a sparse leaf's elements, or sparse values altogether, cannot be reduced so.
    """
    sparse = {number for numbers in value.sparse for number in numbers}
    dense = tuple([number for number in range(len(value.arrays)) if number not in sparse])
    gather = AllGather() if isinstance(operation, AllReduce) else Gather(operation.root)
    found = [Part(operation, _selected(value, dense), dense)] if dense else []
    for numbers in value.sparse:
        pair = tuple(numbers[:2])
        mean = _check(operation.reduce_op, value, pair[0])
        selected = _selected(value, pair)
        found.append(Part(gather, _divided(selected, size) if mean else selected, pair, numbers))
    return found


def _check(reduce_op: ReduceOp, value: Value, number: int) -> bool:
    """Whether values are to be divided."""
    path = nest.paths(value.spec)[number]
    if reduce_op not in (ReduceOp.SUM, ReduceOp.MEAN):
        owner = shown(path.removesuffix(".values"))
        raise TypeError(f"{owner} is IndexedSlices, which {reduce_op.value} does not take: sum and mean do")
    check_reducible(Reduce(reduce_op), element_type(value.metas[number][1], path), path)
    return reduce_op is ReduceOp.MEAN


def _selected(value: Value, numbers: Sequence[int]) -> Value:
    arrays = [value.arrays[number] for number in numbers]
    return Value(only(value.spec, set(numbers)), arrays, tuple([value.metas[number] for number in numbers]))


def _divided(pair: Value, size: int) -> Value:
    """The values of a sparse leaf divided before they travel, each element once: so results keep their kind."""
    values, indices = pair.arrays
    quotient = divided(values, size)
    (kind, _, shape), other = pair.metas
    return Value(pair.spec, [quotient, indices], ((kind, quotient.dtype, shape), other))


def check_rebuilds(found: Sequence[Prepared], parts: Sequence[Part], whole: Value) -> None:
    """Tries to put a result together; see `nest.check_rebuilds`."""
    leaves: list[Any] = [None] * len(whole.arrays)
    for prepared, part in zip(found, parts, strict=True):
        for number, leaf in zip(part.numbers, prepared.stand_ins(), strict=True):
            leaves[number] = leaf
    nest.check_rebuilds(whole.spec, leaves)


class Several(Work):
    """A reduction in several collectives; of this rank's own sparse leaves the result keeps `dense_shape`."""

    def __init__(
        self, calls: Sequence[Call], route: Route, uncollected: Uncollected, parts: Sequence[Part], whole: Value
    ) -> None:
        super().__init__(calls, route, uncollected)
        self._parts = {id(call): part for call, part in zip(calls, parts, strict=True)}
        self._whole = whole

    def _take(self) -> Any:
        if not self._call.prepared.receives:
            return None
        leaves: list[Any] = [None] * len(self._whole.arrays)
        for call in self._calls:
            for number, leaf in zip(self._parts[id(call)].numbers, call.collect(), strict=True):
                leaves[number] = leaf
        for numbers in self._whole.sparse:
            for number, length in zip(numbers[2:], self._dense_shape(numbers), strict=True):
                leaves[number] = length
        return nest.unflatten(self._whole.spec, leaves)

    def _leaves_of(self, call: Call, pack: int) -> list[tuple[str, Any]]:
        part = self._parts[id(call)]
        if not part.sparse:
            return call.leaves_of(pack)
        if pack != call.packs[-1] or len(call.packs) < call.prepared.packs:
            return []  # the other half is yet to come
        found = dict(leaf for number in call.packs for leaf in call.leaves_of(number))
        if not found:  # somebody else's result
            return []
        values, indices = (found[path] for path in call.prepared.paths)
        path = call.prepared.paths[0].removesuffix(".values")
        return [(path, IndexedSlices(values, indices, self._dense_shape(part.sparse) or None))]

    def _dense_shape(self, numbers: range) -> tuple[int, ...]:
        return tuple([int(self._whole.arrays[number]) for number in numbers[2:]])
