"""Cutting values along an axis, and joining them: arrays travel with that axis first, so that rows are neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import numpy as np

from collectived.arguments import check_integer
from collectived.values import nest
from collectived.values.leaves import Array, format_path
from collectived.values.nest import Spec
from collectived.values.new_arrays import make_array
from collectived_proto.types import AllGather, AxisOperation, Gather, Scatter

_MAX_AXES = 64  # of a NumPy array
_MAX_ROWS = (1 << 63) - 1


def check_axis(axis: SupportsIndex) -> int:
    """The caller's axis as a number; which arrays have it is seen later."""
    return check_integer(axis, "axis", -_MAX_AXES, _MAX_AXES - 1, "an axis of the arrays, such as 0 or -1")


def check_sizes(sizes: Iterable[SupportsIndex] | None, size: int) -> tuple[int, ...]:
    """Rows by rank; () for an even split.

    Raises:
        TypeError, ValueError: not one number per rank, or one is negative.
    """
    if sizes is None:
        return ()
    expected = f"rows for each of the {size} ranks, none of them negative"
    if not isinstance(sizes, Iterable):
        raise TypeError(f"sizes must be {expected}, or None, got {sizes!r}")
    rows = tuple([check_integer(number, "sizes", 0, _MAX_ROWS, expected) for number in sizes])
    if len(rows) != size:
        raise ValueError(f"sizes must be {expected}: got {len(rows)}, {list(rows)}")
    return rows


def resolve_axis(operation: AxisOperation, spec: Spec, arrays: Sequence[Array]) -> AxisOperation:
    """The operation as ranks compare it; of the arrays it is only asked which axes they have.

    A negative axis is counted from the front where all arrays agree on what it means, but not of a scatter, for only
    its root has arrays. An array of 0 dimensions in a gather is let pass: the worker sends an error to all ranks.

    Raises:
        ValueError: an array has no such axis, or not as many rows as `sizes` hands out. The others are not told: this
            rank has started nothing.
    """
    axis, sizes = operation.axis, () if isinstance(operation, (AllGather, Gather)) else operation.sizes
    for number, array in enumerate(arrays):
        if array.ndim == 0 and isinstance(operation, (AllGather, Gather)):
            continue
        if not -array.ndim <= axis < array.ndim:
            raise _axis_error(operation, spec, number, array, _explain_missing_axis(array, axis))
        if sizes and sum(sizes) != array.shape[axis]:
            why = f"has {array.shape[axis]} rows along axis {axis}, but sizes {list(sizes)} add up to {sum(sizes)}"
            raise _axis_error(operation, spec, number, array, why)
    if axis < 0 and not isinstance(operation, Scatter) and len({array.ndim for array in arrays}) == 1:
        axis += arrays[0].ndim
        operation = replace(operation, axis=axis)
    return operation


def move_axis_first(axis: int, arrays: Sequence[Array]) -> list[Array]:
    """The arrays with that axis first; arrays of 0 dimensions stay as they are."""
    return [np.moveaxis(array, axis, 0) if axis and array.ndim else array for array in arrays]


def _explain_missing_axis(array: Array, axis: int) -> str:
    if array.ndim == 0:
        return "is 0-d, and has no axis to go by; give it one, for example with numpy.reshape(value, 1)"
    return f"has the shape {list(array.shape)}, and no axis {axis}"


def _axis_error(operation: AxisOperation, spec: Spec, number: int, array: Array, why: str) -> ValueError:
    return ValueError(f"{operation}: {format_path(nest.paths(spec)[number])} {why}")


def restore_axis(array: Array, axis: int) -> Array:
    """A view of an array whose rows come first, with them along `axis`."""
    return np.moveaxis(array, 0, axis) if axis else array


def restore_shape(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """The shape of such a view."""
    rows, *tail = shape
    at = axis % len(shape)
    return (*tail[:at], rows, *tail[at:])


def empty(shape: Sequence[int], dtype: np.dtype[Any], axis: int) -> Array:
    """An array for rows of that shape, in the caller's order of axes."""
    return make_array(restore_shape(shape, axis) if axis else tuple(shape), dtype)
