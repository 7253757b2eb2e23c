"""The descriptions of messages: made once for sends that come again, and read once."""

from __future__ import annotations

from functools import lru_cache

from google.protobuf.message import DecodeError

from collectived_proto.codec import collective_from_proto
from collectived_proto.errors import InvalidArgumentError
from collectived_proto.v1 import common_pb2
from collectived_runtime.engine.compile import negotiation
from collectived_runtime.engine.run.message import MessageLayout
from collectived_runtime.engine.submit.contracts import PreparedCollective
from collectived_runtime.transport.link import LinkProtocolError

SHORT_BYTES = 4096  # of a description; longer ones are not kept, for a client chooses their length
MAX_DESCRIPTIONS = 64  # that are kept


class SentDescriptions:
    """The descriptions of sends; short ones are kept, for most sends are like the ones before."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[PreparedCollective, bytes]] = {}  # by identity

    def encode(self, prepared: PreparedCollective) -> bytes:
        known = self._known.get(id(prepared))
        if known is not None:
            return known[1]
        description = negotiation.encode_announcement(prepared.collective)
        if len(description) <= SHORT_BYTES:
            if len(self._known) >= MAX_DESCRIPTIONS:
                self._known.clear()
            self._known[id(prepared)] = prepared, description
        return description


def read_layout(description: bytes, nbytes: int) -> MessageLayout:
    """How a message of so many bytes lies in a slot; raise LinkProtocolError where it is not what it describes."""
    try:
        layout, described = (_read_short if len(description) <= SHORT_BYTES else _read)(description)
    except (DecodeError, InvalidArgumentError) as error:
        raise LinkProtocolError(f"a message whose description cannot be read: {error}") from None
    if nbytes != described:
        raise LinkProtocolError(f"a message of {nbytes} bytes, which is not what it describes")
    return layout


def _read(description: bytes) -> tuple[MessageLayout, int]:
    """How what is described lies in a slot, and how many bytes its leaves have."""
    collective = collective_from_proto(common_pb2.Collective.FromString(description))
    layout = MessageLayout.for_collective(collective, description)
    return layout, sum(leaf.nbytes for leaf in collective.leaves)


_read_short = lru_cache(maxsize=MAX_DESCRIPTIONS)(_read)  # most messages are like the ones before
