"""Sums and means of NumPy arrays in this process, rounded where workers round.

An array is *widened* into partial sums; the caller adds these up, each of them like any array, and they are
*rounded* to a sum or *averaged*. A partial sum of halves is float32. For a mean, partial sums of integers are exact:
int64, and two of them for 64-bit ones, of the upper and the lower 32 bits. Sums of integers wrap, as in NumPy.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Partial = tuple[Array, ...]

HALF_DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_LOW_MASK = 0xFFFFFFFF


def to_native(array: Array) -> Array:
    """The same elements in the byte order of this machine."""
    return np.asarray(array, array.dtype.newbyteorder("="))


def partial_dtypes(dtype: np.dtype[Any], mean: bool) -> tuple[np.dtype[Any], ...]:
    """The types of the partial sums of elements of that (native) type."""
    if dtype in HALF_DTYPES:
        return (np.dtype(np.float32),)
    if mean and dtype.kind in "iu":
        return (np.dtype(np.int64),) * (2 if dtype.itemsize == 8 else 1)
    return (dtype,)


def widen(array: Array, mean: bool, copy: bool = False) -> Partial:
    """An array of native elements as partial sums; `copy`: never the array itself."""
    dtypes = partial_dtypes(array.dtype, mean)
    if len(dtypes) == 1:
        return (np.array(array, dtypes[0], order="C") if copy else array.astype(dtypes[0], copy=False),)
    return np.asarray(array >> 32).astype(np.int64), np.asarray(array & _LOW_MASK).astype(np.int64)


def round_sum(partial: Partial, dtype: np.dtype[Any]) -> Array:
    """Partial sums, widened for a sum, as the sum of elements of `dtype`."""
    return partial[0].astype(dtype, copy=False)


def average(partial: Partial, dtype: np.dtype[Any], count: int) -> Array:
    """Partial sums, widened for a mean, as the mean of `count` elements of `dtype`.

    Raises:
        TypeError: such elements have no mean.
    """
    total = partial[0] if len(partial) == 1 else partial[0].astype(np.float64) * (_LOW_MASK + 1.0) + partial[1]
    return np.asarray(np.true_divide(total, count)).astype(mean_dtype(dtype), copy=False)


def mean_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of a mean: integers of up to 16 bits give float32, wider ones float64, all else keeps its type.

    Raises:
        TypeError: elements of that type have no mean.
    """
    dtype = dtype.newbyteorder("=")
    if dtype.kind in "iu":
        return np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)
    if dtype.kind in "fc" or dtype in HALF_DTYPES:
        return dtype
    raise TypeError(f"{dtype} has no mean: expected integers, floating or complex numbers; convert with .astype()")
