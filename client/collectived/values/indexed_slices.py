"""IndexedSlices: rows of an array, each with its number, as the gradient of an embedding is; and their arithmetic.

Duplicate numbers are allowed and mean addition. Everything here is local; `sparse_reduce` has collectives on
sparse values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectived.values.arithmetic import (
    Array,
    Partial,
    average,
    mean_dtype,
    partial_dtypes,
    round_sum,
    to_native,
    widen,
)
from collectived.values.leaves import UnknownLeaf, kind_of


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
        values, indices = self.values, _check_indices(self.indices)
        if isinstance(values, IndexedSlices):
            values, indices = values.values, _to_host(indices, "indices")[_to_host(values.indices, "indices")]
        values = _array(values)
        shape = tuple(values.shape)
        if not shape:
            raise ValueError("values must have rows, so at least one axis: they are 0-dimensional")
        if len(indices.shape) != 1:
            raise ValueError(
                f"indices must be 1-dimensional, one per row of values: their shape is {_shape_list(indices)}"
            )
        if indices.shape[0] != shape[0]:
            raise ValueError(f"indices must be as many as rows of values: {indices.shape[0]} for {shape[0]} rows")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "indices", indices)
        object.__setattr__(self, "dense_shape", _check_dense_shape(self.dense_shape, shape))

    @property
    def dtype(self) -> Any:
        """Element type of `values`."""
        return self.values.dtype

    def to_dense(self) -> Array:
        """The whole array, as a new NumPy array: zero in rows without values; rows with the same index are added.

        Raises:
            ValueError: `dense_shape` is not known, or an index lies outside it.
            TypeError: `values` are no array that collectives carry.
        """
        values = _to_host(self.values, "values")
        return round_sum(self._sum_to_dense(values, mean=False), values.dtype)

    def coalesced(self) -> IndexedSlices:
        """The same with every index once, ascending; rows of equal number are added up in their order.

        Raises:
            TypeError: `values` or `indices` are no arrays that collectives carry.
        """
        values = _to_host(self.values, "values")
        indices, rows = np.unique(_to_host(self.indices, "indices"), return_inverse=True)
        sums = _scatter_add(values, rows.reshape(-1), (len(indices), *values.shape[1:]), mean=False)
        restored = kind_of(self.values).restore(round_sum(sums, values.dtype))
        return IndexedSlices(restored, kind_of(self.indices).restore(indices), self.dense_shape)

    def _sum_to_dense(self, values: Array, mean: bool) -> Partial:
        """The whole array as partial sums; `values` are those of this object."""
        shape = self._require_dense_shape()
        rows = _to_host(self.indices, "indices")
        outside = rows[(rows < 0) | (rows >= shape[0])]
        if outside.size:
            raise ValueError(f"index {outside[0]} lies outside dense_shape {list(shape)}, which has {shape[0]} rows")
        return _scatter_add(values, rows, shape, mean)

    def _require_dense_shape(self) -> tuple[int, ...]:
        if self.dense_shape is None:
            raise ValueError("dense_shape is not known: give IndexedSlices(values, indices, dense_shape) to densify")
        return self.dense_shape

    def __repr__(self) -> str:
        shape = "unknown shape" if self.dense_shape is None else list(self.dense_shape)
        return (
            f"IndexedSlices({self.dtype}{_shape_list(self.values)} at {_shape_list(self.indices)} indices, of {shape})"
        )


def aggregate(components: Sequence[Any], mean: bool = False) -> Any:
    """The sum of values of which some are sparse, or their mean; None among them counts for nothing.

    If all are sparse, their rows follow each other in order, without de-duplication, with the first one's
    `dense_shape`; a mean divides `values` only. If any is dense, so is the result.

    Returns:
        `IndexedSlices`, or a NumPy array; the sum of one component alone is the component as it was given.

    Raises:
        ValueError: there is none, shapes or element types differ, or a sparse one whose `dense_shape` is not known
            meets a dense one.
        TypeError: elements of that type have no mean.
    """
    given = [component for component in components if component is not None]
    if not given:
        raise ValueError("nothing to add up: expected at least one component")
    if len(given) == 1 or all(isinstance(component, IndexedSlices) for component in given):
        total = given[0] if len(given) == 1 else _concatenate(given)
        return divide(total, len(given)) if mean else total
    return _total(given, mean)


def divide(value: Any, count: int) -> Any:
    """A sum as the mean of `count` contributions: an array, or `IndexedSlices` of which only `values` are divided.

    Raises:
        TypeError: the element type has no mean.
    """
    if isinstance(value, IndexedSlices):
        return IndexedSlices(divide(value.values, count), value.indices, value.dense_shape)
    array = _to_host(value, "the value")
    dtype = mean_dtype(array.dtype)
    (quotient_dtype,) = partial_dtypes(dtype, mean=True)
    return np.asarray(np.true_divide(array, count, dtype=quotient_dtype)).astype(dtype, copy=False)


def _total(parts: Sequence[Any], mean: bool) -> Array:
    """The sum or mean of dense and sparse values, as a dense array of its own that is rounded once."""
    values = [_to_host(part.values if isinstance(part, IndexedSlices) else part, "values") for part in parts]
    _check_agree(values, list(map(_full_shape, parts, values)))
    total = _widen_part(parts[0], values[0], mean, copy=True)
    for part, array in zip(parts[1:], values[1:], strict=True):
        for into, term in zip(total, _widen_part(part, array, mean), strict=True):
            np.add(into, term, out=into)
    dtype = values[0].dtype
    return average(total, dtype, len(parts)) if mean else round_sum(total, dtype)


def _full_shape(part: Any, values: Array) -> list[int]:
    return list(part._require_dense_shape() if isinstance(part, IndexedSlices) else values.shape)


def _widen_part(part: Any, values: Array, mean: bool, copy: bool = False) -> Partial:
    """Partial sums of a dense value, or of a sparse one made dense; `values` are its own, on the host."""
    return part._sum_to_dense(values, mean) if isinstance(part, IndexedSlices) else widen(values, mean, copy)


def _scatter_add(values: Array, rows: Array, shape: tuple[int, ...], mean: bool) -> Partial:
    """Partial sums of rows, each at its number, in an array of that shape; zero where there is none."""
    terms = widen(values, mean)
    sums = tuple(np.zeros(shape, term.dtype) for term in terms)
    for into, term in zip(sums, terms, strict=True):
        np.add.at(into, rows, term)
    return sums


def _concatenate(slices: Sequence[IndexedSlices]) -> IndexedSlices:
    values = [_to_host(part.values, "values") for part in slices]
    indices = [_to_host(part.indices, "indices") for part in slices]
    _check_agree(values, [list(part.shape[1:]) for part in values])
    wide = np.result_type(*indices)
    wide = wide if wide.kind in "iu" else np.dtype(np.int64)  # NumPy joins int64 and uint64 to float64
    return IndexedSlices(np.concatenate(values), np.concatenate(indices, dtype=wide), slices[0].dense_shape)


def _check_agree(parts: Sequence[Array], shapes: Sequence[list[int]]) -> None:
    for number, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
        if part.dtype != parts[0].dtype:
            raise ValueError(
                f"component {number} has dtype {part.dtype}, component 0 has {parts[0].dtype}: make them equal"
            )
        if shape != shapes[0]:
            raise ValueError(f"component {number} has shape {shape}, component 0 has {shapes[0]}: make them equal")


def _to_host(array: Any, name: str) -> Array:
    """An array of any kind as one of NumPy in native byte order, which shares its memory where that is possible."""
    try:
        return to_native(kind_of(array).to_array(array))
    except UnknownLeaf as error:
        raise TypeError(f"{name} cannot be read here: {error}") from None


def _array(value: Any) -> Any:
    return value if hasattr(value, "shape") and hasattr(value, "dtype") else np.asarray(value)


def _check_indices(given: Any) -> Any:
    indices = _array(given)
    dtype = indices.dtype
    if isinstance(indices, np.ndarray) and indices is not given and not indices.size:
        return indices.astype(np.int64)  # an empty list says no type
    if not (dtype.kind in "iu" if isinstance(dtype, np.dtype) else "int" in str(dtype)):
        raise TypeError(f"indices must be integers, they are {dtype}: convert them with .astype(numpy.int64)")
    return indices


def _check_dense_shape(given: Any, values: tuple[int, ...]) -> tuple[int, ...] | None:
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


def _shape_list(array: Any) -> list[int]:
    return list(array.shape)
