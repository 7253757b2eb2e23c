"""Arithmetic on components in this process, where no worker is needed. Results have the kind of the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectived.indexed_slices import HALVES, IndexedSlices, aggregate, divided, mean_dtype
from collectived.leaves import Array, check_reducible, element_type, kind_of
from collectived_proto.types import AllReduce, DType, ReduceOp


def is_sparse(component: Any) -> bool:
    return isinstance(component, IndexedSlices)


def element(component: Any, name: str) -> DType:
    """The type of a component's elements.

    Raises:
        TypeError: collectives do not carry it.
    """
    values = component.values if isinstance(component, IndexedSlices) else component
    try:
        array = kind_of(values).array(values)
    except TypeError as error:
        raise TypeError(f"{name} is {error}") from None
    return element_type(array.dtype, name)


def check(component: Any, reduce_op: ReduceOp, name: str) -> None:
    """Raises TypeError where collectives do not carry the component, or `reduce_op` does not take its elements."""
    check_reducible(AllReduce(reduce_op), element(component, name), name)


def copied(component: Any) -> Any:
    """A copy that shares no memory with the original."""
    if isinstance(component, IndexedSlices):
        return IndexedSlices(copied(component.values), copied(component.indices), component.dense_shape)
    kind = kind_of(component)
    return kind.restore(_native(kind.array(component)).copy(order="C"))


def summed(components: Sequence[Any]) -> Any:
    """The sum, in their order, as the kind of the first: sparse where all are, else dense; never an input itself.

    Raises:
        ValueError: shapes or element types differ, or a sparse one that does not know its shape meets a dense one.
    """
    if len(components) == 1:
        return copied(components[0])
    total = aggregate([_plain(component) for component in components])
    first = components[0]
    if isinstance(total, IndexedSlices):
        values, indices = (_as_kind_of(first.values, total.values), _as_kind_of(first.indices, total.indices))
        return IndexedSlices(values, indices, total.dense_shape)
    return _as_kind_of(first.values if isinstance(first, IndexedSlices) else first, total)


def mean(component: Any, count: int = 1) -> Any:
    """A sum of `count` contributions as their mean, in memory of its own; of integers it is floating for any count."""
    if isinstance(component, IndexedSlices):
        return IndexedSlices(mean(component.values, count), copied(component.indices), component.dense_shape)
    return _as_kind_of(component, divided(_plain(component), count))


def mean_like(example: Any, total: Any, count: int) -> Any:
    """A sum of `count` elements as their mean, in the type of a mean of the type of `example`."""
    array = np.asarray(_plain(total))
    dtype = mean_dtype(_plain(example).dtype)
    return _as_kind_of(example, np.asarray(np.true_divide(array, count)).astype(dtype))


def summed_along(component: Any, axis: int, wide: bool = False) -> Any:
    """The sum of a component's elements along an axis; `wide`: in a type that does not round or overflow early.

    Raises:
        ValueError: it is sparse, or has no such axis.
    """
    array = _dense(component, axis)
    if wide or array.dtype in HALVES:
        dtype = np.dtype(np.int64 if array.dtype.kind in "iu" else np.float32 if array.dtype in HALVES else array.dtype)
    else:
        dtype = array.dtype
    total = np.asarray(array.sum(axis, dtype=dtype))
    return total if wide else _as_kind_of(component, total.astype(array.dtype, copy=False))


def length(component: Any, axis: int) -> int:
    """Of that axis."""
    return int(_dense(component, axis).shape[axis])


def _dense(component: Any, axis: int) -> Array:
    array = _plain(component)
    if isinstance(array, IndexedSlices) or not -array.ndim <= axis < array.ndim:
        what = "sparse" if isinstance(array, IndexedSlices) else f"of shape {list(array.shape)}"
        raise ValueError(f"axis {axis!r} cannot be reduced along: a component is {what}")
    return np.asarray(array)


def _plain(component: Any) -> Any:
    """The same over NumPy arrays."""
    if isinstance(component, IndexedSlices):
        return IndexedSlices(_plain(component.values), _plain(component.indices), component.dense_shape)
    return kind_of(component).array(component)


def _as_kind_of(example: Any, array: Array) -> Any:
    return kind_of(example).restore(_native(array))


def _native(array: Array) -> Array:
    return np.asarray(array, array.dtype.newbyteorder("="))
