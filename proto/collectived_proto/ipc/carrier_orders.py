"""Orders of a worker to the carrier of a rank, and its answers.

A carrier is a native thread of a rank's process (`native/.../carrier.h`). In a group whose workers have one rank each,
it sends a large value from the rank's arrays and receives the result there, over the links of its worker, so that
nothing is copied to the worker and back. The rank asks for one with its submissions; it gets the socket for orders with
CARRIER, over the doorbell. Each order and each answer is one packet; integers are little-endian.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

from collectived_proto.ipc.messages import MalformedMessage, MessageType

HEADER_BYTES = 64  # of a frame
MAX_ORDER = 64 << 10  # bytes of one packet
_CARRIER = struct.Struct("<BxxxxxxxQ")
_RUN = struct.Struct("<BxxxIQiiqQQ")
_MOVE = struct.Struct("<BBBBIIxxxxQQ64s")
_LINK = struct.Struct("<BxxxIQ")
_NUMBERED = struct.Struct("<BxxxxxxxQ")
_ANSWER = struct.Struct("<BxxxIixxxxQ64s")
_PLACE = struct.Struct("<Q")

MOST_MOVES = (MAX_ORDER - _RUN.size) // _MOVE.size
VALUE, SCRATCH, RESULT = range(3)  # the memory of a move
NOT_FOLDED = 255


class OrderKind(enum.IntEnum):
    RUN = 1  # carry out the moves of an instance
    STAGE = 2  # copy the value of an instance to where the worker reads it
    PING = 3
    LINK = 4  # a connection to a peer rides along, unless it is known; bytes that have been read of it follow


class AnswerKind(enum.IntEnum):
    DONE = 1
    STAGED = 2
    PONG = 3
    BROKEN = 4  # a link: its peer, the system's error (0: it has ended), or the header that came in place of another
    REFUSED = 5  # the rank has withdrawn its arrays, or the order asks for what it cannot do


def encode_carrier(generation: int) -> bytes:
    """Encode the message with which a rank gets the socket of its carrier."""
    return _CARRIER.pack(MessageType.CARRIER, generation)


def parse_carrier(data: bytes) -> int:
    """Return the generation."""
    if len(data) != _CARRIER.size:
        raise MalformedMessage(f"a message about a carrier of {len(data)} bytes")
    generation: int = _CARRIER.unpack(data)[1]
    return generation


class MoveOrder(NamedTuple):
    """A move of an order; the moves of a round run side by side.

    Attributes:
        kind: `core.MOVE_SEND`, `MOVE_RECEIVE`, `MOVE_FINISH` or `MOVE_COPY`.
        memory: sent or finished from there, received or copied there.
        mine: a receive is folded with what is there, a copy is of it; NOT_FOLDED: neither.
        left: whether the received part stands left.
        at, elements: the span there.
        header: of the frame. Of a copy, or what is finished, the element where it begins at the other end.
    """

    kind: int
    memory: int
    mine: int
    left: bool
    round: int
    peer: int
    at: int
    elements: int
    header: bytes

    def encode(self) -> bytes:
        return _MOVE.pack(*self)


def encode_place(element: int) -> bytes:
    """Encode where a copy, or what is finished, begins at the other end, in the place of a header."""
    return _PLACE.pack(element)


class RunOrder(NamedTuple):
    """RUN. `scratch` is in bytes, `row` the bytes of an element; nothing is folded with a `reduce_op` of 0."""

    instance: int
    dtype: int
    reduce_op: int
    divisor: int
    scratch: int
    row: int

    def encode(self, moves: Sequence[MoveOrder]) -> bytes:
        head = _RUN.pack(OrderKind.RUN, len(moves), *self)
        return head + b"".join(move.encode() for move in moves)


def encode_stage(instance: int) -> bytes:
    return _NUMBERED.pack(OrderKind.STAGE, instance)


def encode_ping(number: int) -> bytes:
    return _NUMBERED.pack(OrderKind.PING, number)


def encode_link(peer: int, unread: bytes) -> bytes:
    """Encode a LINK, with the bytes that its worker has read and not taken."""
    return _LINK.pack(OrderKind.LINK, peer, len(unread)) + unread


class Answer(NamedTuple):
    """An answer; `number` is the instance, or that of a ping."""

    kind: AnswerKind
    peer: int
    error: int
    number: int
    header: bytes


def parse_answer(data: bytes) -> Answer:
    if len(data) != _ANSWER.size:
        raise MalformedMessage(f"an answer of a carrier of {len(data)} bytes")
    kind, *facts = _ANSWER.unpack(data)
    try:
        return Answer(AnswerKind(kind), *facts)
    except ValueError:
        raise MalformedMessage(f"an answer of a carrier of kind {kind}") from None
