"""The part of a rank's result that is its own value. It is taken from the caller's arrays, and does not travel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectived.calls.prepare import PreparedCall
from collectived.gpu.array import DeviceArray
from collectived.values.leaves import Array
from collectived_proto.types import Broadcast

_MAX_COMPARED_LEAVES = 16  # each with each


def can_keep(prepared: PreparedCall, arrays: Sequence[Array], targets: Sequence[Array] | None) -> bool:
    """Whether the result is nothing but its own value, and can be read where the caller has it until the end.

    Args:
        targets: where the result is put; None: into new arrays.
    """
    is_root = isinstance(prepared.collective.operation, Broadcast) and prepared.contributes
    if not (is_root and arrays and prepared.is_native_order and prepared.device_area is None):
        return False
    if not all(type(array) is np.ndarray and array.flags.c_contiguous for array in arrays):
        return False
    return targets is None or _is_apart(arrays, targets)


def _is_apart(arrays: Sequence[Array], targets: Sequence[Array]) -> bool:
    """Whether no target overlaps an array, unless it is that array itself."""
    if len(arrays) != len(targets) or len(arrays) > _MAX_COMPARED_LEAVES or any(map(_is_on_device, targets)):
        return False
    return not any(
        np.may_share_memory(array, target)
        for number, array in enumerate(arrays)
        for other, target in enumerate(targets)
        if number != other or not is_same(array, target)
    )


def _is_on_device(target: object) -> bool:
    return isinstance(target, DeviceArray)


def is_same(array: Array, target: Array) -> bool:
    """Whether both are the same elements of the same memory."""
    alike = array.dtype == target.dtype and array.shape == target.shape and array.strides == target.strides
    return alike and array.__array_interface__["data"][0] == target.__array_interface__["data"][0]
