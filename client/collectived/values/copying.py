"""Copies of arrays into memory that has been written before: staging, and arrays of `out=`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from collectived.values.leaves import Array

STREAMED_BYTES = 8 << 20
"""From here on a copy goes past the caches: there is no room in them for all that the ranks of a host copy at once.

A new array is better copied through them: the kernel has just filled its pages with zeros, which are there yet.
"""

_NATIVE_BYTES = 32 << 10  # from here on the core copies: memcpy may take twelve times as long (native `copying.c`)


def copy_into(target: Array, source: Array) -> None:
    """`target[...] = source`, where the two do not overlap."""
    if source.nbytes >= _NATIVE_BYTES and _is_same_layout(target, source):
        copy = find_streamed_copy() if source.nbytes >= STREAMED_BYTES else _find_copy()
        copy(target.reshape(-1).view(np.uint8), source.reshape(-1).view(np.uint8))
    else:
        target[...] = source  # a sixth of the time of np.copyto


def _is_same_layout(target: Array, source: Array) -> bool:
    """Whether a copy of the bytes is a copy of the array."""
    alike = target.shape == source.shape and target.dtype == source.dtype
    return alike and target.flags.c_contiguous and source.flags.c_contiguous


@cache
def find_streamed_copy() -> Callable[[Array, Array], None]:
    """Copies bytes past the caches: by the native core, where there is one. Clients over gRPC alone do without."""
    try:
        from collectived_native import core
    except ImportError:
        return np.copyto
    return core.copy_streamed


@cache
def _find_copy() -> Callable[[Array, Array], None]:
    """Copies bytes, in the same way."""
    try:
        from collectived_native import core
    except ImportError:
        return np.copyto
    return core.copy
