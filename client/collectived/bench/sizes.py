"""Which sizes are measured."""

from __future__ import annotations

from collectived.bench.operation_kinds import BenchOperation, Extent, compute_extent


def compute_sizes(min_bytes: int, max_bytes: int, factor: int, step_bytes: int = 0) -> list[int]:
    """From `min_bytes` up to `max_bytes`, each `factor` times the one before, or `step_bytes` more where that is given.

    Raises:
        ValueError: they would not grow.
    """
    if step_bytes <= 0 and (factor < 2 or min_bytes < 1):
        raise ValueError(f"sizes from {min_bytes} by the factor {factor} do not grow: expected 1 or more and 2 or more")
    found = []
    nbytes = min_bytes
    while nbytes <= max_bytes:
        found.append(nbytes)
        nbytes = nbytes + step_bytes if step_bytes > 0 else nbytes * factor
    return found


def compute_extents(kind: BenchOperation, wished: list[int], itemsize: int, ranks: int) -> list[Extent]:
    """What is measured for these sizes, each once: small ones may round to the same number of elements."""
    return list(dict.fromkeys(compute_extent(kind, nbytes, itemsize, ranks) for nbytes in wished))
