"""Inputs that nobody should send, made of some that are sent: seeded, so that each can be made again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

_MOST = 4096  # bytes of an input
_EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)
_NOT_A_NUMBER = (b"\x00\x00\x00\x00\x00\x00\xf8\x7f", b"\x00\x00\x00\x00\x00\x00\xf0\x7f", b"\x00" * 7 + b"\x80")


def inputs(seeds: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """That many inputs: each seed as it is, then seeds changed in one to four ways, and some that are pure noise."""
    rng = random.Random(seed)
    yield from seeds[:count]
    for _ in range(count - len(seeds)):
        if rng.random() < 0.05:
            yield rng.randbytes(rng.randrange(200))
            continue
        data = rng.choice(seeds)
        for _ in range(rng.randint(1, 4)):
            data = _changed(data, rng.choice(seeds), rng)
        yield data[:_MOST]


def _changed(data: bytes, other: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(8):
        case 0:  # truncated
            return data[:at]
        case 1:  # longer
            return data[:at] + rng.randbytes(rng.randrange(1, 17)) + data[at:]
        case 2:  # a byte is another
            return data[:at] + rng.randbytes(1) + data[at + 1 :]
        case 3:  # a number is an edge case
            width = rng.choice((1, 2, 4, 8))
            return (
                data[:at] + (rng.choice(_EDGES) & ((1 << 8 * width) - 1)).to_bytes(width, "little") + data[at + width :]
            )
        case 4:  # a float is none
            return data[:at] + rng.choice(_NOT_A_NUMBER) + data[at + 8 :]
        case 5:  # spliced
            return data[:at] + other[rng.randrange(len(other) + 1) :]
        case 6:  # a part comes twice
            end = rng.randrange(at, len(data) + 1)
            return data[:end] + data[at:]
        case _:  # a part is missing
            return data[:at] + data[rng.randrange(at, len(data) + 1) :]
