"""Arithmetic on components in this process, where no worker is needed. Results have the kind of the inputs.

Arrays on GPUs are copied to the host for it, and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectived.cross_device.values import device_of
from collectived.values.arithmetic import average, round_sum, to_native, widen
from collectived.values.indexed_slices import IndexedSlices, aggregate, divide
from collectived.values.leaves import Array, check_reducible, element_type, kind_of
from collectived_proto.types import AllReduce, DType, ReduceOp


def is_sparse(component: Any) -> bool:
    return isinstance(component, IndexedSlices)


def check_element_type(component: Any, name: str) -> DType:
    """The type of a component's elements.

    Raises:
        TypeError: collectives do not carry it.
    """
    values = component.values if isinstance(component, IndexedSlices) else component
    try:
        array = kind_of(values).to_array(values)
    except TypeError as error:
        raise TypeError(f"{name} is {error}") from None
    return element_type(array.dtype, name)


def check_component(component: Any, reduce_op: ReduceOp, name: str) -> None:
    """Raises TypeError where collectives do not carry the component, or `reduce_op` does not take its elements."""
    check_reducible(AllReduce(reduce_op), check_element_type(component, name), name)


def copy_component(component: Any) -> Any:
    """A copy that shares no memory with the original."""
    if isinstance(component, IndexedSlices):
        return IndexedSlices(copy_component(component.values), copy_component(component.indices), component.dense_shape)
    kind = kind_of(component)
    return kind.restore(to_native(np.asarray(kind.to_array(component))).copy(order="C"))


def move_beside(example: Any, component: Any) -> Any:
    """The component, on the GPU on which `example` lies, if that is another one than its own."""
    if (
        example is None
        or any(map(is_sparse, (example, component)))
        or device_of(example) in (None, device_of(component))
    ):
        return component
    return _restore_like(example, _to_numpy(component))


def reduce_components(components: Sequence[Any], op: ReduceOp) -> Any:
    """Their sum or mean, in their order, as the kind of the first: sparse where all are, else dense; never an input.

    Raises:
        ValueError: shapes or element types differ, or a sparse one that does not know its shape meets a dense one.
    """
    averages = op is ReduceOp.MEAN
    if len(components) == 1:
        return sum_to_mean(components[0]) if averages else copy_component(components[0])
    total = aggregate([_to_numpy(component) for component in components], averages)
    first = components[0]
    if isinstance(total, IndexedSlices):
        values, indices = (_restore_like(first.values, total.values), _restore_like(first.indices, total.indices))
        return IndexedSlices(values, indices, total.dense_shape)
    return _restore_like(first.values if isinstance(first, IndexedSlices) else first, total)


def sum_to_mean(component: Any, count: int = 1) -> Any:
    """A sum of `count` contributions as their mean, in memory of its own; of integers it is floating for any count."""
    if isinstance(component, IndexedSlices):
        return IndexedSlices(
            sum_to_mean(component.values, count), copy_component(component.indices), component.dense_shape
        )
    return _restore_like(component, divide(_to_numpy(component), count))


def sum_along(component: Any, axis: int) -> Any:
    """The sum of a component's elements along an axis.

    Raises:
        ValueError: it is sparse, or has no such axis.
    """
    array = _require_dense(component, axis)
    (partial,) = widen(array, mean=False)
    return _restore_like(component, round_sum((_sum(partial, axis),), array.dtype))


def partial_sums(components: Sequence[Any], axis: int) -> list[tuple[Array, ...]]:
    """The same of each component before anything is rounded or can overflow, for `finish_mean`.

    Returns:
        One tuple or two, each with an array per component: what is in one of them is to be added up.

    Raises:
        ValueError: as `sum_along`, or element types differ.
    """
    arrays = [_require_dense(component, axis) for component in components]
    for number, array in enumerate(arrays):
        if array.dtype != arrays[0].dtype:
            raise ValueError(f"component {number} has dtype {array.dtype}, component 0 has {arrays[0].dtype}")
    return list(zip(*([_sum(part, axis) for part in widen(array, mean=True)] for array in arrays), strict=True))


def finish_mean(totals: Sequence[Any], count: int, example: Any) -> Any:
    """Compute a mean of `count` elements from the totals of their `partial_sums`, of the kind of `example`."""
    return _restore_like(example, average(tuple(map(np.asarray, totals)), _to_numpy(example).dtype, count))


def axis_length(component: Any, axis: int) -> int:
    return int(_require_dense(component, axis).shape[axis])


def _sum(array: Array, axis: int) -> Array:
    return np.asarray(array.sum(axis, dtype=array.dtype))


def _require_dense(component: Any, axis: int) -> Array:
    array = _to_numpy(component)
    if isinstance(array, IndexedSlices) or not -array.ndim <= axis < array.ndim:
        what = "sparse" if isinstance(array, IndexedSlices) else f"of shape {list(array.shape)}"
        raise ValueError(f"axis {axis!r} cannot be reduced along: a component is {what}")
    return np.asarray(array)


def _to_numpy(component: Any) -> Any:
    """Return the same over NumPy arrays in native byte order."""
    if isinstance(component, IndexedSlices):
        return IndexedSlices(_to_numpy(component.values), _to_numpy(component.indices), component.dense_shape)
    return to_native(np.asarray(kind_of(component).to_array(component)))


def _restore_like(example: Any, array: Array) -> Any:
    return kind_of(example).restore(array)
