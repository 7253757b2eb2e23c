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


SLICES.__name__ = IndexedSlices.__name__  # what ranks compare, and people read


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


def select_leaves(spec: Spec, wanted: set[int]) -> Spec:
    """The spec with None for every leaf but those of these numbers, and for every `dense_shape`, which may differ."""
    numbers = count()

    def walk(spec: Spec) -> Spec:
        if not isinstance(spec, Node):
            return LEAF if spec == LEAF and next(numbers) in wanted else NONE
        children = tuple([walk(child) for child in spec.children])
        return spec._replace(children=(*children[:2], NONE) if spec.kind is SLICES else children)

    return walk(spec)
