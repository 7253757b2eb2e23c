"""The part of a rank's result that is its own value. It is taken from the caller's arrays, and does not come back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectived.calls.prepare import PreparedCall
from collectived.gpu.array import DeviceArray
from collectived.values.leaves import Array
from collectived_proto.types import AllGather, AllToAll, Broadcast, Gather, Scatter

_MAX_COMPARED_LEAVES = 16  # each with each
_JOINED = (AllGather, Gather, Scatter, AllToAll)  # of whose results rows are a rank's own


def can_keep(prepared: PreparedCall, arrays: Sequence[Array], targets: Sequence[Array] | None) -> bool:
    """Whether its value is the result, or gives rows to it, and can be read in the caller's arrays until the end.

    Args:
        targets: where the result is put; None: into new arrays.
    """
    is_part = isinstance(prepared.collective.operation, (Broadcast, *_JOINED)) and prepared.contributes
    if not (is_part and prepared.receives and arrays and prepared.is_native_order and prepared.device_area is None):
        return False
    if not all(type(array) is np.ndarray and array.flags.c_contiguous for array in arrays):
        return False
    return targets is None or _is_apart(arrays, targets, is_whole=prepared.result_spec is None)


def list_unread(prepared: PreparedCall, generation: int) -> Sequence[range] | None:
    """The rows of each leaf that the worker does not read, as an earlier result of that generation has shown.

    None: it reads all of them, or nothing is known.
    """
    known = prepared.own_rows
    if known is None or known[0] != generation or isinstance(prepared.collective.operation, AllGather):
        return None
    return known[1]


def _is_apart(arrays: Sequence[Array], targets: Sequence[Array], is_whole: bool) -> bool:
    """Whether no target overlaps an array, unless it is that array itself and takes all of it."""
    if len(arrays) != len(targets) or len(arrays) > _MAX_COMPARED_LEAVES or any(map(_is_on_device, targets)):
        return False
    return not any(
        np.may_share_memory(array, target)
        for number, array in enumerate(arrays)
        for other, target in enumerate(targets)
        if not is_whole or number != other or not is_same(array, target)
    )


def _is_on_device(target: object) -> bool:
    return isinstance(target, DeviceArray)


def is_same(array: Array, target: Array) -> bool:
    """Whether both are the same elements of the same memory."""
    alike = array.dtype == target.dtype and array.shape == target.shape and array.strides == target.strides
    return alike and array.__array_interface__["data"][0] == target.__array_interface__["data"][0]
