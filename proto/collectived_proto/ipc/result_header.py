"""Outlines: what a result looks like, where that was not known when the collective was prepared.

An outline lies in the result slot before the data. A result leaf is its *pieces*, one after another, each some rows of
it; pieces that follow each other in memory are written as one, so that most leaves are one piece. Rows are along the
first axis of the leaf as it travels. A rank that keeps its value takes rows of its own from there, not from the slot:
the offset of such a piece is OWN_ROWS plus the number of the first of them.

    u64  bytes from the outline's start to the slot's end
    u64  bytes of the description that follows the pieces; 0: the leaves are those of the prepared collective
    u64  leaves
    per leaf: u64 pieces, then per piece u64 offset in bytes from the outline's start, u64 rows
    the description, a serialized collectived.v1.Collective
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

OWN_ROWS = 1 << 63

_HEAD = struct.Struct("<3Q")
_PIECES = struct.Struct("<Q")
_PIECE = struct.Struct("<2Q")

Pieces = tuple[tuple[int, int], ...]  # (offset in bytes from the outline's start, or OWN_ROWS and a row; rows)


class ResultHeader(NamedTuple):
    """`extent` is the bytes from the outline's start to the slot's end."""

    extent: int
    leaves: tuple[Pieces, ...]
    description: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes that `encode` makes."""
        pieces = sum(_PIECES.size + _PIECE.size * len(leaf) for leaf in self.leaves)
        return _HEAD.size + pieces + len(self.description)

    def encode(self) -> bytes:
        parts = [_HEAD.pack(self.extent, len(self.description), len(self.leaves))]
        for leaf in self.leaves:
            parts.append(_PIECES.pack(len(leaf)))
            parts.extend(_PIECE.pack(offset, rows) for offset, rows in leaf)
        return b"".join((*parts, self.description))


def parse_header(memory: memoryview | bytes) -> ResultHeader:
    """The outline at the start of `memory`.

    Raises:
        ValueError: there is none, or it reaches beyond that memory.
    """
    try:
        extent, described, count = _HEAD.unpack_from(memory)
        if extent > len(memory):
            raise ValueError(f"an outline of {extent} bytes in {len(memory)}")
        at = _HEAD.size
        leaves = []
        for _ in range(count):
            (pieces,) = _PIECES.unpack_from(memory, at)
            at += _PIECES.size
            if pieces * _PIECE.size > extent - at:
                raise ValueError(f"an outline with {pieces} pieces in {extent} bytes")
            leaves.append(tuple(_PIECE.iter_unpack(memory[at : at + pieces * _PIECE.size])))
            at += pieces * _PIECE.size
        if at + described > extent:
            raise ValueError(f"a description of {described} bytes in an outline of {extent}")
        return ResultHeader(extent, tuple(leaves), bytes(memory[at : at + described]))
    except struct.error as error:
        raise ValueError(f"an outline that ends early: {error}") from None


def merge_adjacent(pieces: Sequence[tuple[int, int]], row_bytes: int) -> Pieces:
    """The same with neighbours in memory as one; pieces without rows are left out."""
    found: list[tuple[int, int]] = []
    for offset, rows in pieces:
        if not rows:
            continue
        if found and found[-1][0] + found[-1][1] * row_bytes == offset:
            found[-1] = (found[-1][0], found[-1][1] + rows)
        else:
            found.append((offset, rows))
    return tuple(found)
