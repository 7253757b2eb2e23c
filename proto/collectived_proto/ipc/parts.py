"""Messages of a doorbell about results that are taken piece by piece, while the rest of them is still coming."""

from __future__ import annotations

import struct
from typing import NamedTuple

from collectived_proto.ipc.messages import MalformedMessage, MessageType

_RESULT_PART = struct.Struct("<BxxxIQQQQQ")


class ResultPart(NamedTuple):
    """RESULT_PART: bytes [start, stop), counted from (arena, offset), where the result begins, are final.

    It begins where the completion will say so, with an outline where that has one. Bytes that no RESULT_PART names are
    final with the completion.
    """

    instance: int
    arena: int
    offset: int
    slot: int
    start: int
    stop: int

    def encode(self) -> bytes:
        return _RESULT_PART.pack(
            MessageType.RESULT_PART, self.arena, self.instance, self.offset, self.slot, self.start, self.stop
        )


def parse_result_part(data: bytes) -> ResultPart:
    if len(data) != _RESULT_PART.size:
        raise MalformedMessage(f"a part of a result of {len(data)} bytes")
    _, arena, instance, offset, slot, start, stop = _RESULT_PART.unpack(data)
    if not start < stop:
        raise MalformedMessage(f"a part of a result from byte {start} to {stop}")
    return ResultPart(instance, arena, offset, slot, start, stop)
