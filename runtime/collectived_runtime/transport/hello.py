"""The first words on a link: who dials whom, for which group generation and channel, and proof of the job's secret.

    dialler  → acceptor   Hello: both tasks, key, generation, channel, a fresh nonce
    acceptor → dialler    a fresh nonce, HMAC-SHA256(secret, "accept" + hello + nonce)
    dialler  → acceptor   HMAC-SHA256(secret, "dial" + hello + nonce)

Both nonces are in both proofs, so that neither side can replay what it has heard. All three have a fixed size: nobody
reads a byte beyond them, and frames may follow the last at once. The secret itself never travels.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

NONCE_BYTES = 16
PROOF_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
_HELLO = struct.Struct("<4sHHIIQQHxx16s")
HELLO_BYTES = _HELLO.size
PROBE_CHANNEL = 0xFFFF  # of key 0, generation 0: no group uses this link, it is to be measured
_MAGIC = b"CDL\x01"
_LOWEST = _HIGHEST = 1


class Refused(Exception):
    """The other side is not who it should be, or speaks another protocol."""


@dataclass(frozen=True, slots=True)
class Hello:
    dialler: int
    acceptor: int
    key: int
    generation: int
    channel: int
    nonce: bytes

    @property
    def probe(self) -> bool:
        return (self.key, self.generation, self.channel) == (0, 0, PROBE_CHANNEL)

    def encode(self) -> bytes:
        return _HELLO.pack(
            _MAGIC,
            _LOWEST,
            _HIGHEST,
            self.dialler,
            self.acceptor,
            self.key,
            self.generation,
            self.channel,
            self.nonce,
        )


def parse(data: bytes) -> Hello:
    """Raises Refused where this is no hello, or of versions that we do not speak."""
    magic, lowest, highest, dialler, acceptor, key, generation, channel, nonce = _HELLO.unpack(data)
    if magic != _MAGIC:
        raise Refused("the first bytes are not those of a collectived link")
    if lowest > _HIGHEST or highest < _LOWEST:
        raise Refused(
            f"the peer speaks link protocol {lowest} to {highest}, this worker {_LOWEST} to {_HIGHEST}; "
            "upgrade the older"
        )
    return Hello(dialler, acceptor, key, generation, channel, nonce)


def proof(secret: str, side: str, hello: bytes, nonce: bytes) -> bytes:
    """What only a holder of the secret can say. `side` is "accept" or "dial"."""
    return hmac.new(secret.encode(), side.encode() + hello + nonce, hashlib.sha256).digest()


def check(secret: str, side: str, hello: bytes, nonce: bytes, shown: bytes) -> None:
    """Raises Refused unless `shown` is the proof; takes the same time either way."""
    if not hmac.compare_digest(proof(secret, side, hello, nonce), shown):
        raise Refused("the peer does not know this job's secret")
