"""Outlines as a worker makes them: where the results lie of those who did not know what comes."""

from __future__ import annotations

from collections.abc import Sequence

from collectived_proto.codec import collective_to_proto
from collectived_proto.ipc.result_header import OWN_ROWS, Pieces, ResultHeader
from collectived_proto.types import AxisOperation, Collective, Layout
from collectived_runtime.engine.compile.partition import Partition
from collectived_runtime.plan.packing import align_up


def encode_result_headers(
    collective: Collective,
    packs: Layout,
    cuts: Sequence[Partition | None],
    receivers: Sequence[int],
    strangers: Sequence[int],
) -> tuple[bytes, dict[int, int]]:
    """Build the headers that say where results lie, and return them with the offset in the slot for each receiver.

    Args:
        packs: whose result offsets count from behind what is returned here.
        cuts: by pack.
        strangers: receivers that do not know what comes.
    """
    knowing = isinstance(collective.operation, AxisOperation)
    description = collective_to_proto(collective).SerializeToString() if strangers else b""
    by_contents: dict[tuple[tuple[Pieces, ...], bytes], list[int]] = {}
    for rank in receivers:
        if knowing or rank in strangers:
            leaves = _find_pieces(collective, packs, cuts, rank)
            by_contents.setdefault((leaves, description if rank in strangers else b""), []).append(rank)
    sizes = [align_up(ResultHeader(0, leaves, told).nbytes) for leaves, told in by_contents]
    total, at = sum(sizes), 0
    parts: list[bytes] = []
    found: dict[int, int] = {}
    for ((leaves, told), ranks), size in zip(by_contents.items(), sizes, strict=True):
        moved = tuple(tuple((_move(offset, total - at), rows) for offset, rows in leaf) for leaf in leaves)
        outline = ResultHeader(total - at + packs.result_bytes, moved, told)
        parts.append(outline.encode().ljust(size, bytes(1)))
        found |= dict.fromkeys(ranks, at)
        at += size
    return b"".join(parts), found


def _find_pieces(
    collective: Collective, packs: Layout, cuts: Sequence[Partition | None], rank: int
) -> tuple[Pieces, ...]:
    """For every leaf of a rank's result its pieces: bytes behind the head, rows."""
    found: list[Pieces] = []
    for leaf, place in zip(collective.leaves, packs.places, strict=True):
        pack = packs.packs[place.pack]
        itemsize = pack.result_dtype.itemsize
        how = cuts[place.pack]
        if how is None:
            rows = leaf.shape[0] if leaf.shape else 1
            found.append(((pack.result_offset + place.offset * itemsize, rows),))
        else:
            pieces = how.pieces[rank]
            found.append(tuple((_move(at, pack.result_offset, itemsize), rows) for at, rows in pieces))
    return tuple(found)


def _move(offset: int, by: int, unit: int = 1) -> int:
    """Convert an offset to bytes from a point that lies `by` bytes earlier. A row of the rank's own value stays."""
    return offset if offset & OWN_ROWS else offset * unit + by
