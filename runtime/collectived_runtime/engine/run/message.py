"""A letter: what one send carries, and how it lies in the receiver's result slot. Pure.

On a link it is a frame with the description, then the bytes of the leaves, one after another; its length stands in the
frame. In the slot the leaves are aligned, behind an outline.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectived_proto.ipc.result_header import ResultHeader
from collectived_proto.types import Collective
from collectived_runtime.plan.packing import align_up
from collectived_runtime.transport import frame as frames

_BETWEEN = struct.Struct("<II")
_TAG = struct.Struct("<Q")
MAX_DESCRIPTION = 4 << 20  # bytes

MessageAddress = tuple[int, int, int]
"""(receiver, sender, tag): letters of one address arrive in the order in which they were sent."""


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """How a message lies in a slot: `head` first, then leaf i in `leaves[i]`, (offset, bytes)."""

    head: bytes
    leaves: tuple[tuple[int, int], ...]
    size: int

    @classmethod
    def for_collective(cls, collective: Collective, description: bytes) -> MessageLayout:
        rows = [leaf.shape[0] if leaf.shape else 1 for leaf in collective.leaves]
        start = align_up(ResultHeader(0, tuple(((0, one),) for one in rows), description).nbytes)
        leaves = []
        at = start
        for leaf in collective.leaves:
            leaves.append((at, leaf.nbytes))
            at += align_up(leaf.nbytes)
        pieces = tuple(((offset, one),) for (offset, _), one in zip(leaves, rows, strict=True))
        return cls(ResultHeader(at, pieces, description).encode(), tuple(leaves), at)

    def prepare_slot(self, slot: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """Writes the head; the memory of every leaf."""
        slot[: len(self.head)] = np.frombuffer(self.head, np.uint8)
        return [slot[offset : offset + size] for offset, size in self.leaves]


def encode_header(
    key: int, generation: int, address: MessageAddress, description: bytes, leaves: Sequence[NDArray[np.uint8]]
) -> bytes:
    """The frame that begins a message; its payload is the description."""
    receiver, sender, tag = address
    between = _BETWEEN.pack(sender, receiver)
    nbytes = sum(len(leaf) for leaf in leaves)
    kind = frames.FrameKind.MESSAGE
    return frames.Frame(kind, 0, 0, 0, key, generation, 0, between, _TAG.pack(tag), nbytes, len(description)).encode()


def encode_rank_link(key: int, generation: int, sender: int, receiver: int) -> bytes:
    """The one frame on a link that two workers lend to two of their ranks."""
    between = _BETWEEN.pack(sender, receiver)
    return frames.Frame(frames.FrameKind.RANK_LINK, 0, 0, 0, key, generation, 0, between, bytes(8), 0, 0).encode()


def parse_rank_link(frame: frames.Frame) -> tuple[int, int]:
    """(sender, receiver)."""
    sender, receiver = _BETWEEN.unpack(frame.plan)
    return sender, receiver


def parse_address(frame: frames.Frame) -> MessageAddress:
    """Whom a message is for, and from."""
    sender, receiver = _BETWEEN.unpack(frame.plan)
    return receiver, sender, _TAG.unpack(frame.chain)[0]
