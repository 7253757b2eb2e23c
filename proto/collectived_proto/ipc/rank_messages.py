"""Messages between two ranks that match by themselves, and the connections over which they send them.

A rank says MATCHING before its first send or recv of a generation. From then on its worker hands over each message for
it with MESSAGE, in the order in which they have come, and matches none. For two ranks that send to each other again and
again, the workers open a *rank link*: a connection of its own for one direction, which both ranks get with RANK_LINK.
The receiver writes `READY` on it when it has taken it. From then on the sender writes its messages there: a header, the
description of the value (a serialized collectived.v1.Collective), and the bytes of its leaves.

Messages that a sender gave to its worker before it used the link may come later than those on the link. So each header
says how many these were, and the receiver reads the link only when it has got as many from that sender.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from collectived_proto.ipc.messages import MalformedMessage, MessageType

READY = b"R"
MAX_DESCRIPTION = 4 << 20  # bytes
_MAGIC = b"CDM\x01"
_HEADER = struct.Struct("<4sIQQQ")
HEADER_BYTES = _HEADER.size
_MATCHING = struct.Struct("<BxxxxxxxQ")
_LINK = struct.Struct("<BBxxIQQ")
_UNCLAIMED = struct.Struct("<BxxxIQQQI")
_MESSAGE = struct.Struct("<BxxxIQIIQQ")


def encode_matching(generation: int) -> bytes:
    return _MATCHING.pack(MessageType.MATCHING, generation)


def parse_matching(data: bytes) -> int:
    """Return the generation."""
    if len(data) != _MATCHING.size:
        raise MalformedMessage(f"a message about matching of {len(data)} bytes")
    generation: int = _MATCHING.unpack(data)[1]
    return generation


class Unclaimed(NamedTuple):
    """UNCLAIMED: of the rank `source` there is no room for a message of `nbytes` under `tag`.

    `kept` bytes of messages that have come over rank links wait for a receive already.
    """

    generation: int
    source: int
    tag: int
    nbytes: int
    kept: int

    def encode(self) -> bytes:
        return _UNCLAIMED.pack(MessageType.UNCLAIMED, self.source, self.generation, self.nbytes, self.kept, self.tag)


def parse_unclaimed(data: bytes) -> Unclaimed:
    if len(data) != _UNCLAIMED.size:
        raise MalformedMessage(f"a message about unclaimed messages of {len(data)} bytes")
    _, source, generation, nbytes, kept, tag = _UNCLAIMED.unpack(data)
    return Unclaimed(generation, source, tag, nbytes, kept)


class LinkOffer(NamedTuple):
    """RANK_LINK: a connection rides along, to the rank `peer` where `is_outgoing`, else from it.

    `most_unexpected` is how many bytes of messages this rank may keep that no receive of its own has asked for.
    """

    generation: int
    peer: int
    is_outgoing: bool
    most_unexpected: int

    def encode(self) -> bytes:
        return _LINK.pack(MessageType.RANK_LINK, self.is_outgoing, self.peer, self.generation, self.most_unexpected)


def parse_link_offer(data: bytes) -> LinkOffer:
    if len(data) != _LINK.size:
        raise MalformedMessage(f"an offer of a link of {len(data)} bytes")
    _, is_outgoing, peer, generation, most = _LINK.unpack(data)
    return LinkOffer(generation, peer, bool(is_outgoing), most)


class Delivery(NamedTuple):
    """MESSAGE: one of the rank `source` under `tag` lies in slot `slot` at (arena, offset), behind an outline."""

    generation: int
    source: int
    tag: int
    arena: int
    offset: int
    slot: int

    def encode(self) -> bytes:
        return _MESSAGE.pack(
            MessageType.MESSAGE, self.arena, self.generation, self.source, self.tag, self.offset, self.slot
        )


def parse_delivery(data: bytes) -> Delivery:
    if len(data) != _MESSAGE.size:
        raise MalformedMessage(f"a message of {len(data)} bytes")
    _, arena, generation, source, tag, offset, slot = _MESSAGE.unpack(data)
    return Delivery(generation, source, tag, arena, offset, slot)


class Header(NamedTuple):
    """The header of a message on a rank link.

    `described` and `nbytes` are the lengths in bytes of the description and of the leaves. `before` is how many
    messages its sender gave to its worker for the same receiver.
    """

    tag: int
    described: int
    nbytes: int
    before: int

    def encode(self) -> bytes:
        return _HEADER.pack(_MAGIC, self.tag, self.described, self.nbytes, self.before)


def parse_header(data: bytes | bytearray | memoryview, begin: int = 0) -> Header:
    """Parse the first `HEADER_BYTES` of a message that begins there.

    Raises:
        ValueError: they are no header.
    """
    magic, *numbers = _HEADER.unpack_from(data, begin)
    header = Header(*numbers)
    if magic != _MAGIC or header.described > MAX_DESCRIPTION:
        raise ValueError(f"no header of a message: {bytes(data[begin : begin + HEADER_BYTES])!r}")
    return header
