"""Rows: how values are cut along their first axis, as clients and workers count them alike."""

from __future__ import annotations

from collections.abc import Sequence

from collectived_proto.types import AllToAll, AxisOperation, Collective


def split_evenly(length: int, size: int) -> tuple[int, ...]:
    """Return rows by rank. The first ranks get one of the remaining rows each."""
    return tuple(length // size + (rank < length % size) for rank in range(size))


def extract_rows(collective: Collective) -> tuple[int, ...]:
    """Return the lengths that ranks exchange where they differ: the first length of each leaf, or its `sizes`."""
    operation = collective.operation
    return operation.sizes if isinstance(operation, AllToAll) else tuple(leaf.shape[0] for leaf in collective.leaves)


def lacks_axis(collective: Collective) -> bool:
    """Whether an array of it has no axis along which it could be cut or joined."""
    return isinstance(collective.operation, AxisOperation) and any(not leaf.shape for leaf in collective.leaves)


def encode_rows(rows: Sequence[int]) -> bytes:
    """Return numbers in as few bytes as each needs: seven bits a byte, the last byte of a number below 128."""
    encoded = bytearray()
    for number in rows:
        while number >= 128:
            encoded.append(number & 127 | 128)
            number >>= 7
        encoded.append(number)
    return bytes(encoded)


def decode_rows(encoded: bytes, count: int) -> tuple[int, ...]:
    """
    Raises:
        ValueError: these are not so many numbers, or one is beyond 2**62.
    """
    rows, number, shift = [], 0, 0
    for byte in encoded:
        number |= (byte & 127) << shift
        shift += 7
        if shift > 70 or number >> 62:
            raise ValueError("a number of rows beyond 2**62")
        if byte < 128:
            rows.append(number)
            number = shift = 0
    if shift or len(rows) != count:
        raise ValueError(f"{len(rows)} numbers of rows where there are {count}")
    return tuple(rows)
