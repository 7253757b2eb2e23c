"""Results whose layout was not known when their collective was prepared: a header before them has it.

See `collectived_proto.ipc.result_header`. The numbers of a header are checked against its slot at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from collectived.calls.buffers import Backing, ResultBuffer
from collectived.values import axes
from collectived.values.copying import copy_into
from collectived.values.leaves import Array
from collectived.values.new_arrays import make_array
from collectived_proto.ipc.result_header import OWN_ROWS, Pieces, parse_header
from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import Collective


class ResultSpec(NamedTuple):
    """The part of a result's layout that is known before it comes.

    Attributes:
        leaves: dtype and shape of each as it travels; None: its header describes them.
        is_concatenated: whether their rows are what the pieces have, put along `axis`; else shapes are as said.
    """

    leaves: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...] | None
    is_concatenated: bool
    axis: int = 0

    def list_types(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """Dtype and shape of each leaf in the caller's order of axes; -1: a length that is not known yet."""
        if not self.is_concatenated:
            return list(self.leaves or ())
        return [(dtype, axes.restore_shape((-1, *shape[1:]), self.axis)) for dtype, shape in self.leaves or ()]


_SHORT_BYTES = 4096


class _LeafLayout(NamedTuple):
    dtype: np.dtype[Any]
    wire_shape: tuple[int, ...]  # its shape, rows first
    shape: tuple[int, ...]  # in the caller's order of axes
    pieces: Pieces

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.wire_shape[1:])


class DescribedResult:
    """One result.

    Attributes:
        extent: bytes from the header's start to the slot's end.
        structure: of the value, where it describes that itself; else "".
        own_rows: of each leaf of the rank's value, those that are in its result and do not lie in the slot; None: the
            slot has all of it.
    """

    def __init__(self, form: ResultSpec, slot: ResultBuffer, own_value: Sequence[Array] | None = None) -> None:
        """
        Args:
            own_value: of which the result may have rows, first axis first.

        Raises:
            ValueError: the header is none, does not fit, or reaches beyond its slot or that value.
        """
        outline = parse_header(memoryview(slot.memory)[slot.offset :])
        self.extent = outline.extent
        self.structure = ""
        leaves = form.leaves
        if leaves is None:
            described = _parse_description(outline.description)
            self.structure = described.structure
            leaves = tuple((to_numpy(leaf.dtype), leaf.shape) for leaf in described.leaves)
        if len(leaves) != len(outline.leaves):
            raise ValueError(f"an outline of {len(outline.leaves)} leaves where there are {len(leaves)}")
        self._slot = slot
        self._axis = form.axis if form.is_concatenated else 0
        self._leaf_layouts = tuple(
            _make_leaf_layout(dtype, shape, pieces, outline.extent, form)
            for (dtype, shape), pieces in zip(leaves, outline.leaves, strict=True)
        )
        self._own_value = own_value
        self.own_rows = self._find_own_rows()

    def _find_own_rows(self) -> tuple[range, ...] | None:
        own = self._own_value
        found = []
        for index, content in enumerate(self._leaf_layouts):
            rows = [_list_own_rows(at, count) for at, count in content.pieces if at & OWN_ROWS]
            if rows and (len(rows) > 1 or own is None or not _has_rows(own[index], rows[0], content)):
                raise ValueError(f"leaf {index} takes {rows} of the rank's own value, which has no such rows")
            found += rows or [range(0)]
        return tuple(found) if any(found) else None

    def __len__(self) -> int:
        return len(self._leaf_layouts)

    def get_type(self, index: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Dtype and shape of a leaf, in the caller's order of axes."""
        content = self._leaf_layouts[index]
        return content.dtype, content.shape

    def array(self, index: int) -> Array:
        """A leaf in an array of its own, row-major."""
        content = self._leaf_layouts[index]
        made = make_array(content.shape, content.dtype)
        self.copy(index, made)
        return made

    def copy(self, index: int, into: Array) -> None:
        """Copies a leaf into an array of its shape."""
        content = self._leaf_layouts[index]
        rows = np.moveaxis(into, self._axis, 0) if self._axis else np.atleast_1d(into)
        at = 0
        for offset, count in content.pieces:
            if not offset & OWN_ROWS:
                source = self._rows(content, offset, count, self._slot.memory, self._slot.offset)
                copy_into(rows[at : at + count], source)
            at += count
        self.copy_own_rows(index, into)

    def copy_own_rows(self, index: int, into: Array) -> None:
        """The same for those rows alone that are not in the slot."""
        content, at = self._leaf_layouts[index], 0
        rows = np.moveaxis(into, self._axis, 0) if self._axis else np.atleast_1d(into)
        for offset, count in content.pieces:
            if offset & OWN_ROWS and self._own_value is not None:
                own = _list_own_rows(offset, count)
                copy_into(rows[at : at + count], np.atleast_1d(self._own_value[index])[own.start : own.stop])
            at += count

    def list_pieces(self) -> list[tuple[np.dtype[Any], tuple[int, ...], list[tuple[int, int]]]]:
        """Of each leaf its dtype and shape, and where its bytes lie: from where on, and how many.

        None of a leaf that does not lie there as the caller wants it.
        """
        if self._axis:
            return []
        return [
            (leaf.dtype, leaf.shape, [(at, rows * leaf.row_bytes) for at, rows in leaf.pieces])
            for leaf in self._leaf_layouts
        ]

    def try_view(self, index: int, backing: Backing) -> Array | None:
        """A leaf as a view of `backing`, the whole result; None where it does not lie there as the caller wants it."""
        content = self._leaf_layouts[index]
        if len(content.pieces) != 1:
            return None
        view = axes.restore_axis(self._rows(content, *content.pieces[0], backing, 0), self._axis)
        return view.reshape(content.shape) if view.flags.c_contiguous else None

    def _rows(self, content: _LeafLayout, offset: int, count: int, memory: Any, start: int) -> Array:
        return np.ndarray((count, *content.wire_shape[1:]), content.dtype, memory, start + offset)


def _list_own_rows(offset: int, count: int) -> range:
    first = offset - OWN_ROWS
    return range(first, first + count)


def _has_rows(array: Array, rows: range, content: _LeafLayout) -> bool:
    """Whether an array has those rows, and they are as those of a result."""
    alike = array.dtype == content.dtype and np.atleast_1d(array).shape[1:] == content.wire_shape[1:]
    return alike and rows.stop <= len(np.atleast_1d(array))


def _parse_description(description: bytes) -> Collective:
    return _parse_short(description) if len(description) <= _SHORT_BYTES else _parse(description)


def _parse(description: bytes) -> Collective:
    # Imported late because they bring protobuf, and `import collectived` is to be quick.
    from google.protobuf.message import DecodeError

    from collectived_proto.codec import collective_from_proto
    from collectived_proto.v1 import common_pb2

    try:
        return collective_from_proto(common_pb2.Collective.FromString(description))
    except DecodeError as error:
        raise ValueError(f"a description that cannot be read: {error}") from None


_parse_short = lru_cache(maxsize=64)(_parse)  # most receives get what the ones before have got


def _make_leaf_layout(
    dtype: np.dtype[Any], shape: tuple[int, ...], pieces: Pieces, extent: int, form: ResultSpec
) -> _LeafLayout:
    travelling = shape or (1,)
    row_bytes = dtype.itemsize * math.prod(travelling[1:])
    rows = sum(count for _, count in pieces)
    if form.is_concatenated:
        if not -len(shape) <= form.axis < len(shape):
            raise ValueError(f"rows along axis {form.axis} of a leaf of {list(shape)}")
        travelling = (rows, *shape[1:])
        shape = axes.restore_shape(travelling, form.axis)
    elif not row_bytes * travelling[0]:
        pieces = ()
    elif rows != travelling[0]:
        raise ValueError(f"{rows} rows of a leaf of {list(shape)}")
    for offset, count in pieces:
        if not offset & OWN_ROWS and offset + count * row_bytes > extent:
            raise ValueError(f"{count} rows of {row_bytes} bytes at {offset} in an outline of {extent} bytes")
    return _LeafLayout(dtype, travelling, shape, pieces)
