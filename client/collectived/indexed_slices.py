"""IndexedSlices: rows of an array, each with its number, as the gradient of an embedding is; and their arithmetic.

Duplicate numbers are allowed and mean addition. Everything here is local; `several` has collectives on sparse values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IndexedSlices:
    """Row `values[i]` belongs at `indices[i]` of an array of shape `dense_shape`.

    Args:
        values: [n, ...], an array of any kind and element type; a list becomes a NumPy array, and so does an
            `IndexedSlices`, which is flattened: row j of it belongs where `indices[values.indices[j]]` says.
        indices: [n], integers in any order; equal ones add up.
        dense_shape: lengths of the whole array, the first of them the number of rows; None: not known.

    Raises:
        TypeError: `indices` are no integers, or a length in `dense_shape` is none.
        ValueError: `indices` are not 1-D, there are not as many as rows, or `dense_shape` does not fit `values`.
    """

    values: Any
    indices: Any
    dense_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        values, indices = self.values, _indices(self.indices)
        if isinstance(values, IndexedSlices):
            values, indices = values.values, np.asarray(indices)[np.asarray(values.indices)]
        values = _array(values)
        shape = tuple(values.shape)
        if not shape:
            raise ValueError("values must have rows, so at least one axis: they are 0-dimensional")
        if len(indices.shape) != 1:
            raise ValueError(f"indices must be 1-dimensional, one per row of values: their shape is {_list(indices)}")
        if indices.shape[0] != shape[0]:
            raise ValueError(f"indices must be as many as rows of values: {indices.shape[0]} for {shape[0]} rows")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "indices", indices)
        object.__setattr__(self, "dense_shape", _dense_shape(self.dense_shape, shape))

    @property
    def dtype(self) -> Any:
        """Element type of `values`."""
        return self.values.dtype

    def to_dense(self) -> Array:
        """The whole array, as a NumPy array of its own: zero where no row belongs, rows of equal number added up.

        Raises:
            ValueError: `dense_shape` is not known, or an index lies outside it.
        """
        if self.dense_shape is None:
            raise ValueError("dense_shape is not known: give IndexedSlices(values, indices, dense_shape) to densify")
        return self._added(np.asarray(self.indices), self.dense_shape)

    def coalesced(self) -> IndexedSlices:
        """The same with every index once, ascending; rows of equal number are added up in their order."""
        indices, rows = np.unique(np.asarray(self.indices), return_inverse=True)
        values = self._added(rows.reshape(-1), (len(indices), *self.values.shape[1:]))
        return IndexedSlices(values, indices, self.dense_shape)

    def _added(self, rows: Array, shape: tuple[int, ...]) -> Array:
        values = np.asarray(self.values)
        outside = rows[(rows < 0) | (rows >= shape[0])]
        if outside.size:
            raise ValueError(f"index {outside[0]} lies outside dense_shape {list(shape)}, which has {shape[0]} rows")
        sums = np.zeros(shape, _partial(values.dtype))
        np.add.at(sums, rows, values)
        return sums.astype(values.dtype, copy=False)

    def __repr__(self) -> str:
        shape = "unknown shape" if self.dense_shape is None else list(self.dense_shape)
        return f"IndexedSlices({self.dtype}{_list(self.values)} at {_list(self.indices)} indices, of {shape})"


def aggregate(components: Sequence[Any]) -> Any:
    """The sum of values of which some are sparse; None among them counts for nothing.

    One alone is returned as it is. If all are sparse, their rows follow each other in order, without de-duplication,
    with the first one's `dense_shape`. If any is dense, so is the sum.

    Returns:
        `IndexedSlices`, or a NumPy array; the one component as it was given where there is only one.

    Raises:
        ValueError: there is none, shapes or element types differ, or a sparse one whose `dense_shape` is not known
            meets a dense one.
    """
    given = [component for component in components if component is not None]
    if not given:
        raise ValueError("nothing to add up: expected at least one component")
    if len(given) == 1:
        return given[0]
    if all(isinstance(component, IndexedSlices) for component in given):
        return _concatenated(given)
    return add_n([part.to_dense() if isinstance(part, IndexedSlices) else part for part in given])


def add_n(arrays: Sequence[Any]) -> Array:
    """The sum of arrays of one shape and type, in their order, as a NumPy array of its own; halves add in float32.

    Raises:
        ValueError: shapes or element types differ.
    """
    parts = [np.asarray(array) for array in arrays]
    _must_agree(parts, [list(part.shape) for part in parts])
    total = parts[0].astype(_partial(parts[0].dtype), order="C")  # a copy
    for part in parts[1:]:
        np.add(total, part, out=total)
    return total.astype(parts[0].dtype, copy=False)


def divided(value: Any, count: int) -> Any:
    """A sum as the mean of `count` contributions: an array, or `IndexedSlices` of which only `values` are divided.

    Raises:
        TypeError: the element type has no mean.
    """
    if isinstance(value, IndexedSlices):
        return IndexedSlices(divided(value.values, count), value.indices, value.dense_shape)
    array = np.asarray(value)
    dtype = mean_dtype(array.dtype)
    quotient = np.true_divide(array, count, dtype=_partial(dtype))
    return np.asarray(quotient).astype(dtype, copy=False)


def mean_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of a mean: integers of up to 16 bits give float32, wider ones float64, all else keeps its type.

    Raises:
        TypeError: elements of that type have no mean.
    """
    if dtype.kind in "iu":
        return np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)
    if dtype.kind in "fc" or dtype in HALVES:
        return dtype
    raise TypeError(f"{dtype} has no mean: expected integers, floating or complex numbers; convert with .astype()")


def _concatenated(slices: Sequence[IndexedSlices]) -> IndexedSlices:
    values = [np.asarray(part.values) for part in slices]
    indices = [np.asarray(part.indices) for part in slices]
    _must_agree(values, [list(part.shape[1:]) for part in values])
    wide = np.result_type(*indices)
    wide = wide if wide.kind in "iu" else np.dtype(np.int64)  # NumPy joins int64 and uint64 to float64
    return IndexedSlices(np.concatenate(values), np.concatenate(indices, dtype=wide), slices[0].dense_shape)


def _must_agree(parts: Sequence[Array], shapes: Sequence[list[int]]) -> None:
    for number, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
        if part.dtype != parts[0].dtype:
            raise ValueError(
                f"component {number} has dtype {part.dtype}, component 0 has {parts[0].dtype}: make them equal"
            )
        if shape != shapes[0]:
            raise ValueError(f"component {number} has shape {shape}, component 0 has {shapes[0]}: make them equal")


def _partial(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which elements are added up before the one rounding."""
    return np.dtype(np.float32) if dtype in HALVES else dtype


def _array(value: Any) -> Any:
    return value if hasattr(value, "shape") and hasattr(value, "dtype") else np.asarray(value)


def _indices(given: Any) -> Any:
    indices = _array(given)
    dtype = indices.dtype
    if isinstance(indices, np.ndarray) and indices is not given and not indices.size:
        return indices.astype(np.int64)  # an empty list says no type
    if not (dtype.kind in "iu" if isinstance(dtype, np.dtype) else "int" in str(dtype)):
        raise TypeError(f"indices must be integers, they are {dtype}: convert them with .astype(numpy.int64)")
    return indices


def _dense_shape(given: Any, values: tuple[int, ...]) -> tuple[int, ...] | None:
    if given is None:
        return None
    try:
        lengths = np.asarray(given)
        shape = tuple(int(length) for length in lengths)
    except (TypeError, ValueError):
        lengths, shape = np.asarray(0.5), ()
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise TypeError(f"dense_shape must be whole lengths such as (1000, 16), or None, got {given!r}")
    if any(length < 0 for length in shape) or len(shape) != len(values) or shape[1:] != values[1:]:
        expected = ", ".join(["rows", *map(str, values[1:])])
        raise ValueError(f"dense_shape {list(shape)} does not fit values of {list(values)}: expected [{expected}]")
    return shape


def _list(array: Any) -> list[int]:
    return list(array.shape)
