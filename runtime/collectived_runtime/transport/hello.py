"""The first words on a link: dialler and acceptor, the group generation and channel, and proof of the job's secret.

    dialler  → acceptor   Hello: both tasks, key, generation, channel, a fresh nonce
    acceptor → dialler    a fresh nonce, HMAC-SHA256(secret, "accept" + hello + nonce)
    dialler  → acceptor   HMAC-SHA256(secret, "dial" + hello + nonce)

Both nonces are in both proofs, so that neither side can replay a proof that it has received. All three have a fixed
size: no side reads a byte beyond them, and frames may follow the last at once. The secret itself never travels. It is
the job's, or where that has none one that the coordinator has made; an empty one proves nothing, because it is known to
all.

The first says which versions of the protocol the dialler speaks. Where the acceptor speaks none of them its answer has
the same size, begins with `_VERSION_MISMATCH` and says what it speaks itself; then it hangs up. So does one that has no
room for a link just now: its answer begins with `_NO_ROOM`, and says why by a number.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass

from collectived_proto.errors import FailedPreconditionError
from collectived_proto.version import OUR_VERSIONS, VersionRange, negotiate_version, sanitize_versions

NONCE_BYTES = 16
PROOF_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
_HELLO = struct.Struct("<4sHHIIQQHxx16s")
HELLO_BYTES = _HELLO.size
PROBE_CHANNEL = 0xFFFF  # of key 0, generation 0: no group uses this link, it is to be measured
_MAGIC = b"CDL\x01"
_VERSION_MISMATCH = b"no version alike"  # in the place of a nonce, which has as many bytes and is never this
_RANGE = struct.Struct(f"<{NONCE_BYTES}sHH")
_NO_ROOM = b"no room just now"  # in the same place
MAX_EARLY_LINKS = 4096  # links that have come before a group loop expects them


class NoRoom(enum.IntEnum):
    """Why an acceptor takes no link just now: a number, for no text of a peer that has proved nothing is shown."""

    UNSPECIFIED = 0
    DESCRIPTORS = 1
    EARLY_LINKS = 2


_NO_ROOM_TEXTS = {
    NoRoom.UNSPECIFIED: "it has no room for a link just now",
    NoRoom.DESCRIPTORS: "it has hardly any file descriptors left (RLIMIT_NOFILE of that worker)",
    NoRoom.EARLY_LINKS: f"{MAX_EARLY_LINKS} unexpected links wait there already",
}


class HelloRefused(Exception):
    """The other side is not the expected one, or speaks another protocol.

    Attributes:
        answer: the bytes to send to it before the connection is closed; empty: none.
    """

    def __init__(self, why: str, answer: bytes = b"") -> None:
        super().__init__(why)
        self.answer = answer


class HandshakeCut(HelloRefused):
    """The other side has ended the connection, or has no room just now: the dialler may try again."""


@dataclass(frozen=True, slots=True)
class LinkHello:
    dialler: int
    acceptor: int
    key: int
    generation: int
    channel: int
    nonce: bytes

    @property
    def is_probe(self) -> bool:
        return (self.key, self.generation, self.channel) == (0, 0, PROBE_CHANNEL)

    def encode(self, versions: VersionRange = OUR_VERSIONS) -> bytes:
        return _HELLO.pack(
            _MAGIC,
            versions.lowest,
            versions.highest,
            self.dialler,
            self.acceptor,
            self.key,
            self.generation,
            self.channel,
            self.nonce,
        )


def parse(data: bytes) -> LinkHello:
    """Raise HelloRefused where this is no hello, or of versions of which we speak none; then with an answer."""
    magic, lowest, highest, dialler, acceptor, key, generation, channel, nonce = _HELLO.unpack(data)
    if magic != _MAGIC:
        raise HelloRefused("the first bytes are not those of a collectived link")
    try:
        negotiate_version(sanitize_versions(lowest, highest), f"worker {dialler}", "this worker")
    except FailedPreconditionError as error:
        raise HelloRefused(str(error), encode_version_mismatch()) from None
    return LinkHello(dialler, acceptor, key, generation, channel, nonce)


def encode_version_mismatch(versions: VersionRange = OUR_VERSIONS) -> bytes:
    """The answer to a dialler that speaks other versions than these; of the release as much as there is room for."""
    said = _RANGE.pack(_VERSION_MISMATCH, versions.lowest, versions.highest) + versions.release.encode()
    return said[:ANSWER_BYTES].ljust(ANSWER_BYTES, b"\0")


def decode_version_mismatch(answer: bytes) -> VersionRange | None:
    """Return the versions in an acceptor's refusal because it speaks none of the dialler's; None for another answer.

    Raises:
        HelloRefused: it names no versions.
    """
    if not answer.startswith(_VERSION_MISMATCH):
        return None
    _, lowest, highest = _RANGE.unpack_from(answer)
    if not 1 <= lowest <= highest:
        raise HelloRefused(
            f"the peer says that it speaks versions {lowest} to {highest} of the protocol, which are none"
        )
    return sanitize_versions(lowest, highest, answer[_RANGE.size :].rstrip(b"\0").decode(errors="replace"))


def encode_no_room(why: NoRoom) -> bytes:
    """The answer to a dialler for whose link there is no room just now."""
    return (_NO_ROOM + bytes([why])).ljust(ANSWER_BYTES, b"\0")


def check_answer(answer: bytes, acceptor: int) -> None:
    """Check whether an answer goes on.

    Raises:
        HandshakeCut: the acceptor has no room just now.
        HelloRefused: it speaks other versions than we.
    """
    if answer.startswith(_NO_ROOM):
        number = answer[NONCE_BYTES]
        known = NoRoom(number) if number in set(NoRoom) else NoRoom.UNSPECIFIED
        raise HandshakeCut(_NO_ROOM_TEXTS[known])
    theirs = decode_version_mismatch(answer)
    if theirs is None:
        return
    try:
        negotiate_version(theirs, f"worker {acceptor}", "this worker")
    except FailedPreconditionError as error:
        raise HelloRefused(str(error)) from None
    raise HelloRefused(
        f"worker {acceptor} ({theirs}) says that it speaks other versions of the protocol than this worker"
    )


def proof(secret: str, side: str, hello: bytes, nonce: bytes) -> bytes:
    """The proof that only a holder of the secret can make. `side` is "accept" or "dial".

    Raises:
        HelloRefused: there is no secret.
    """
    if not secret:
        raise HelloRefused(
            "this worker has no secret by which its peers are known: start all daemons of the job with one, or all "
            "without one, and then with a coordinator of this release, which makes one for them"
        )
    return hmac.new(secret.encode(), side.encode() + hello + nonce, hashlib.sha256).digest()


def verify_proof(secret: str, side: str, hello: bytes, nonce: bytes, shown: bytes) -> None:
    """Raise HelloRefused unless `shown` is the proof; take the same time either way. Without a secret nothing is."""
    if not hmac.compare_digest(proof(secret, side, hello, nonce), shown):
        raise HelloRefused("the peer does not know this job's secret")
