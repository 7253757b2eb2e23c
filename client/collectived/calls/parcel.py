"""Parcels: results whose layout was not known when their collective was prepared. An outline tells it.

See `collectived_proto.local.outline`. What a parcel says of its slot is checked when it is made.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from collectived.calls.places import Backing, Slot
from collectived.values import axes
from collectived.values.leaves import Array
from collectived_proto.local.outline import Pieces, parse
from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import Collective


class Form(NamedTuple):
    """What is known of a parcel before it comes.

    Attributes:
        leaves: dtype and shape of each as it travels; None: the parcel describes them.
        joined: whether their rows are what the pieces have, put along `axis`; else shapes are as said.
    """

    leaves: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...] | None
    joined: bool
    axis: int = 0


class _Content(NamedTuple):
    """One leaf."""

    dtype: np.dtype[Any]
    travelling: tuple[int, ...]  # its shape, rows first
    shape: tuple[int, ...]  # in the caller's order of axes
    pieces: Pieces


class Parcel:
    """One result.

    Attributes:
        extent: bytes from the outline's start to the slot's end.
        structure: of the value, and `paths` of its leaves, where it describes them itself; else "" and ().
    """

    def __init__(self, form: Form, slot: Slot) -> None:
        """
        Raises:
            ValueError: the outline is none, does not fit, or reaches beyond its slot.
        """
        outline = parse(memoryview(slot.memory)[slot.offset :])
        self.extent = outline.extent
        self.structure = ""
        self.paths: tuple[str, ...] = ()
        leaves = form.leaves
        if leaves is None:
            described = _described(outline.description)
            self.structure = described.structure
            self.paths = tuple(leaf.path for leaf in described.leaves)
            leaves = tuple((to_numpy(leaf.dtype), leaf.shape) for leaf in described.leaves)
        if len(leaves) != len(outline.leaves):
            raise ValueError(f"an outline of {len(outline.leaves)} leaves where there are {len(leaves)}")
        self._slot = slot
        self._axis = form.axis if form.joined else 0
        self._contents = tuple(
            _content(dtype, shape, pieces, outline.extent, form)
            for (dtype, shape), pieces in zip(leaves, outline.leaves, strict=True)
        )

    def __len__(self) -> int:
        return len(self._contents)

    def type_of(self, index: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Dtype and shape of a leaf, in the caller's order of axes."""
        content = self._contents[index]
        return content.dtype, content.shape

    def array(self, index: int) -> Array:
        """A leaf in an array of its own, row-major."""
        content = self._contents[index]
        made = np.empty(content.shape, content.dtype)
        self.copy(index, made)
        return made

    def copy(self, index: int, into: Array) -> None:
        """Copies a leaf into an array of its shape."""
        content = self._contents[index]
        rows = np.moveaxis(into, self._axis, 0) if self._axis else np.atleast_1d(into)
        at = 0
        for offset, count in content.pieces:
            np.copyto(rows[at : at + count], self._rows(content, offset, count, self._slot.memory, self._slot.offset))
            at += count

    def shared(self, index: int, backing: Backing) -> Array | None:
        """A leaf as a view of `backing`, the whole parcel; None where it does not lie there as the caller wants it."""
        content = self._contents[index]
        if len(content.pieces) != 1:
            return None
        view = axes.back(self._rows(content, *content.pieces[0], backing, 0), self._axis)
        return view.reshape(content.shape) if view.flags.c_contiguous else None

    def _rows(self, content: _Content, offset: int, count: int, memory: Any, start: int) -> Array:
        return np.ndarray((count, *content.travelling[1:]), content.dtype, memory, start + offset)


def _described(description: bytes) -> Collective:
    # Imported late because they bring protobuf, and `import collectived` is to be quick.
    from google.protobuf.message import DecodeError

    from collectived_proto.codec import collective_from_proto
    from collectived_proto.v1 import common_pb2

    try:
        return collective_from_proto(common_pb2.Collective.FromString(description))
    except DecodeError as error:
        raise ValueError(f"a description that cannot be read: {error}") from None


def _content(dtype: np.dtype[Any], shape: tuple[int, ...], pieces: Pieces, extent: int, form: Form) -> _Content:
    travelling = shape or (1,)
    row_bytes = dtype.itemsize * math.prod(travelling[1:])
    rows = sum(count for _, count in pieces)
    if form.joined:
        if not -len(shape) <= form.axis < len(shape):
            raise ValueError(f"rows along axis {form.axis} of a leaf of {list(shape)}")
        travelling = (rows, *shape[1:])
        shape = axes.shape_back(travelling, form.axis)
    elif not row_bytes * travelling[0]:
        pieces = ()
    elif rows != travelling[0]:
        raise ValueError(f"{rows} rows of a leaf of {list(shape)}")
    for offset, count in pieces:
        if offset + count * row_bytes > extent:
            raise ValueError(f"{count} rows of {row_bytes} bytes at {offset} in an outline of {extent} bytes")
    return _Content(dtype, travelling, shape, pieces)
