"""Rows: how values are cut along their first axis, as clients and workers count them alike."""

from __future__ import annotations

from collectived_proto.types import AllToAll, AxisOperation, Collective


def split_evenly(length: int, size: int) -> tuple[int, ...]:
    """Return rows by rank; what remains goes to the first ranks."""
    return tuple(length // size + (rank < length % size) for rank in range(size))


def extract_rows(collective: Collective) -> tuple[int, ...]:
    """Return what a rank tells the others where lengths differ: the first length of each leaf, or its `sizes`."""
    operation = collective.operation
    return operation.sizes if isinstance(operation, AllToAll) else tuple(leaf.shape[0] for leaf in collective.leaves)


def lacks_axis(collective: Collective) -> bool:
    """Whether an array of it has no axis along which it could be cut or joined."""
    return isinstance(collective.operation, AxisOperation) and any(not leaf.shape for leaf in collective.leaves)
