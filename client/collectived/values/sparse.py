"""Sparse values inside nests: an `IndexedSlices` becomes a node of the spec, as if it were a namedtuple.

Its children are values, indices and the lengths in `dense_shape`. So it is broadcast and sent like any nest; where
values are reduced, each one is gathered by itself (`sparse_reduce`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from collectived.values import nest
from collectived.values.indexed_slices import IndexedSlices
from collectived.values.nest import LEAF, NONE, Node, Spec


class SLICES:
    """The kind of such a node; see `nest.Node`."""

    _fields = ("values", "indices", "dense_shape")

    @staticmethod
    def _make(parts: Sequence[Any]) -> IndexedSlices:
        return IndexedSlices(*parts)


SLICES.__name__ = IndexedSlices.__name__  # the name that ranks compare, and people read


def expand_slices(spec: Spec, leaves: Sequence[Any]) -> tuple[Spec, list[Any], tuple[range, ...]]:
    """The same nest with every `IndexedSlices` as a node; its leaves, and which of them belong to each, in order."""
    given = iter(leaves)
    found: list[Any] = []
    ranges: list[range] = []

    def walk(spec: Spec) -> Spec:
        if isinstance(spec, Node):
            return spec._replace(children=tuple([walk(child) for child in spec.children]))
        if spec == NONE:
            return NONE
        value = next(given)
        if not isinstance(value, IndexedSlices):
            found.append(value)
            return LEAF
        first = len(found)
        children = []
        for part in (value.values, value.indices, value.dense_shape):
            inner, inside = nest.flatten(part)
            children.append(inner)
            found.extend(inside)
        ranges.append(range(first, len(found)))
        return Node(SLICES, tuple(children))

    return walk(spec), found, tuple(ranges)


def select_leaves(spec: Spec, leaves: Sequence[Any], wanted: set[int]) -> Spec:
    """The spec with None for every leaf but those of these numbers.

    The lengths in a `dense_shape` stand there as they are, so that ranks compare them.
    """
    numbers = count()

    def walk(spec: Spec, is_dense_shape: bool = False) -> Spec:
        if isinstance(spec, Node):
            last = len(spec.children) - 1 if spec.kind is SLICES else -1
            return spec._replace(
                children=tuple([walk(child, is_dense_shape or at == last) for at, child in enumerate(spec.children)])
            )
        if spec != LEAF:
            return NONE
        number = next(numbers)
        if is_dense_shape:
            return str(int(leaves[number]))
        return LEAF if number in wanted else NONE

    return walk(spec)
