"""Batches: how `num_packs`, or a limit of small gradients, puts tensors together before an all-reduce.

A *batch* is a vector of leaves of one type, one behind the other; its *cuts* are the spans that travel, each as one
collective. With `num_packs` all leaves of a type are one batch with that many cuts, right through leaves; otherwise a
*run* of small neighbours is one batch with one cut, and everything else travels alone. Rules of tf.contrib.distribute,
except that a run has at most `max_group` leaves, that leaves of any type are batched, each type by itself, and that
what would be empty does not travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from collectived_proto.types import DType, Leaf
from collectived_runtime.plan.moves import Span


@dataclass(frozen=True, slots=True)
class Batch:
    """Leaves by index, where each begins, and `count` elements in all, which travel in `parts` spans."""

    dtype: DType
    leaves: tuple[int, ...]
    offsets: tuple[int, ...]
    count: int
    parts: int

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans that travel."""
        return split_elements(self.count, self.parts)


def batches(leaves: Sequence[Leaf], num_packs: int = 0, max_bytes: int = 0, max_group: int = 0) -> tuple[Batch, ...]:
    """All leaves, each in one batch; the caller puts results back by index.

    Args:
        leaves: what is to be reduced.
        num_packs: cuts per type; 0: not at all. Comes before the other two.
        max_bytes: leaves of at most this many bytes are small; 0: none is.
        max_group: the most leaves of a run.

    Raises:
        ValueError: a negative argument.
    """
    for name, value in (("num_packs", num_packs), ("max_bytes", max_bytes), ("max_group", max_group)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if num_packs:
        types = dict.fromkeys(leaf.dtype for leaf in leaves)
        return tuple(_batch(leaves, [n for n, leaf in enumerate(leaves) if leaf.dtype is t], num_packs) for t in types)
    runs = list(_runs(leaves, max_bytes, max_group))
    # Stable: long runs first, then what travels alone, each in order of input.
    runs.sort(key=lambda run: len(run) == 1)
    return tuple(_batch(leaves, run, 1) for run in runs)


def split_elements(count: int, parts: int) -> tuple[Span, ...]:
    """Spans of count // parts elements; the last one has the remainder as well.

    Empty ones carry nothing and are left out, so that fewer elements than parts are one span. So are no elements.
    """
    share = count // parts
    if not share:
        return (Span(0, count),)
    return (*(Span(part * share, (part + 1) * share) for part in range(parts - 1)), Span((parts - 1) * share, count))


def count_pack_tasks(count: int, parts: int, shards: int) -> int:
    """How many spans `split_elements` makes, each in at most so many shards of at least one element."""
    share = count // parts
    if not share:
        return min(shards, max(1, count))
    return (parts - 1) * min(shards, share) + min(shards, count - (parts - 1) * share)


def _batch(leaves: Sequence[Leaf], indices: Sequence[int], parts: int) -> Batch:
    *offsets, count = accumulate((leaves[index].count for index in indices), initial=0)
    return Batch(leaves[indices[0]].dtype, tuple(indices), tuple(offsets), count, parts)


def _runs(leaves: Sequence[Leaf], max_bytes: int, max_group: int) -> Iterator[list[int]]:
    run: list[int] = []
    for index, leaf in enumerate(leaves):
        small = max_bytes > 0 and leaf.nbytes <= max_bytes
        fits = small and run and len(run) < max_group and leaf.dtype is leaves[run[0]].dtype
        if run and not fits:
            yield run
            run = []
        if small:
            run.append(index)
        else:
            yield [index]
    if run:
        yield run
