"""Frames: what travels on a link. Every frame has a 64-byte header; the receiver checks it before it reads the payload.

A header says whose payload follows: group key, generation, instance, pack, shard and round, with a hash of how the
collective is carried out (*plan hash*) and one of everything that was agreed so far (*contract chain*). Two workers
that disagree in anything find different bytes at the same place, before a single element has been folded.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass

_HEADER = struct.Struct("<3sBBxHHHQQQ8s8sQI")
HEADER_BYTES = _HEADER.size
_MAGIC = b"CDF"
_VERSION = 1

_KEEP_CONNECTION = 1  # in the round of a BYE; 0: its sender closes the connection
MAX_PAYLOAD = 1 << 30  # longer moves travel as several frames


class FrameKind(enum.IntEnum):
    DATA = 1
    BYE = 2  # nothing more of this generation will come on this link, and that is no fault
    ANNOUNCEMENT = 3  # a description of the value that follows, for workers without it
    MESSAGE = 4  # a message of one rank to another: see engine/run/message.py
    VERDICT = 5  # verdicts of workers without an answer of the coordinator: see engine/failure/peer_consensus.py
    RANK_LINK = 6  # between which ranks a link is to be, which their workers lend them: see engine/p2p/rank_links.py


class BadFrame(Exception):
    """Bytes that are no header of this protocol."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A header. `offset` and `length` are bytes of the pack's vector."""

    kind: FrameKind
    pack: int
    shard: int
    round: int
    key: int
    generation: int
    instance: int
    plan: bytes
    chain: bytes
    offset: int
    length: int

    @property
    def keeps_connection(self) -> bool:
        """Of a BYE: whether the connection may serve on, once the other side has said the same."""
        return self.kind is FrameKind.BYE and self.round == _KEEP_CONNECTION

    def encode(self) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.kind,
            self.pack,
            self.shard,
            self.round,
            self.key,
            self.generation,
            self.instance,
            self.plan,
            self.chain,
            self.offset,
            self.length,
        )


def parse(data: bytes | bytearray) -> Frame:
    """The header in 64 received bytes.

    Raises:
        BadFrame: another protocol, or another version of this one.
    """
    magic, version, kind, pack, shard, round_, key, generation, instance, plan, chain, offset, length = _HEADER.unpack(
        data
    )
    if magic != _MAGIC or version != _VERSION:
        raise BadFrame(f"expected a frame of version {_VERSION}, got {bytes(data[:4])!r}")
    try:
        return Frame(FrameKind(kind), pack, shard, round_, key, generation, instance, plan, chain, offset, length)
    except ValueError:
        raise BadFrame(f"frame of unknown kind {kind}") from None


@dataclass(frozen=True, slots=True)
class FrameTemplate:
    """The common part of all frames of one pack and shard."""

    key: int
    generation: int
    instance: int
    pack: int
    shard: int
    plan: bytes
    chain: bytes

    def header(self, round_: int, offset: int, length: int) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            FrameKind.DATA,
            self.pack,
            self.shard,
            round_,
            self.key,
            self.generation,
            self.instance,
            self.plan,
            self.chain,
            offset,
            length,
        )


def encode_bye(key: int, generation: int, *, keeps: bool = False) -> bytes:
    return Frame(FrameKind.BYE, 0, 0, _KEEP_CONNECTION * keeps, key, generation, 0, bytes(8), bytes(8), 0, 0).encode()


def next_chain(chain: bytes, contract: bytes) -> bytes:
    """The digest of all contracts up to and with one more collective."""
    return hashlib.blake2b(chain + contract, digest_size=8).digest()
