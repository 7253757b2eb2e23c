"""Messages of the Unix SOCK_SEQPACKET sockets between a client and the worker of its host.

Two kinds of socket, each admitted by a one-time token in its first message:

- the *session socket*, one per session: input arenas, of the host and of GPUs, are asked for and handed over as
  descriptors, and memory of a GPU that is the client's own is lent;
- a *doorbell*, one per joined rank, straight into its group's lane: submissions one way, completions the other.

One message is one packet; integers are little-endian. Whatever arrives is checked here; `Malformed` says why. In the
first message the versions of the protocol that the client speaks follow the token; what may one day stand behind them
is passed over.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from collectived_proto.protocol import FIRST, OURS, Versions, told

TOKEN_BYTES = 16
MAX_MESSAGE = 128 << 10  # well below the kernel's default send buffer, so that one message always fits
MAX_TEXT = 4096  # bytes of a reason
MAX_OUTSTANDING = 64  # instances that one rank may have in flight
MAX_PACKS = 4096  # of one collective
POST = 1 << 62  # sends and recvs of a rank are numbered from here, apart from the group's instances
WORKER_EVENT = 1 << 62  # the worker's events are numbered from here, apart from result slots: both are released alike

_HELLO = struct.Struct("<4s16s")
_VERSIONS = struct.Struct("<HH")
_MAGIC = b"CDL1"
_RING = struct.Struct("<BBHHHQQQdd")
_SLOT = struct.Struct("<Q")
_ADDRESS = struct.Struct("<IQ")
_DONE = struct.Struct("<BBHIQQQ")
_FAILED = struct.Struct("<BBxxxxxxq")
_FREED = struct.Struct("<BxxxxxxxQQ")
_WAITING = struct.Struct("<BxxxI")
_ARENA = struct.Struct("<BxxxIQ")
_EVENT = struct.Struct("<BxxxI64s")
_OPEN = struct.Struct("<BxxxIQ64s")
_OPENED = struct.Struct("<BxxxIQQ")
_NOT_OPENED = struct.Struct("<BxxxxxxxQ")
_LAUNCHED = struct.Struct("<BxxxxxxxQQ64s")


class Malformed(ValueError):
    """A message that the other side should not have sent."""


@enum.unique
class Kind(enum.IntEnum):
    # client → worker, doorbell
    RING = 1  # start an instance
    RELEASE = 2  # result slots, and events of the worker, are free again
    LEAVE = 3  # no further instances from this rank
    ABORT = 4  # end the generation for all; text follows
    PING = 5  # are you there?
    EVENT = 6  # an event of a GPU, by a number and CUDA's handle of it
    # worker → client, doorbell
    DONE = 16  # one pack of an instance is complete
    FAILED = 17  # an instance ended with a verdict (a serialized collectived.v1.Verdict follows)
    PONG = 18  # with a text where memory of this rank is still in use
    WAITING = 21  # how many wait to join the group, from the next completion on
    WITHDRAWN = 22  # no result will lie in this arena any more
    LAUNCHED = 24  # all of an instance is on the device, in front of an event of the worker
    FREED = 28  # memory of an instance that failed, which was said to be in use, is not any more
    # both sockets, worker → client: a descriptor rides along
    ARENA = 19
    DEVICE_ARENA = 23  # of the memory of a GPU, on a session socket
    REFUSED = 20  # a request cannot be granted: code, text
    # worker → client, session socket
    DEVICE_OPENED = 25  # memory of the client's own is an arena now, until it is dropped
    NOT_OPENED = 26  # it cannot be: why; nothing else of the session is concerned
    # client → worker, session socket
    ARENA_ASK = 32
    ARENA_DROP = 33
    DEVICE_ASK = 34  # an arena in the memory of a GPU: its index, and a size; DEVICE_ARENA answers
    DEVICE_OPEN = 35  # an allocation of its own, by CUDA's handle of it; only where `SessionOpened.openings` allows it


STAGED = 1  # flag of a ring: one address, of a staging slot laid out as Prepare said
OUTPUT = 2  # flag of a ring: the last address is where the result is to be written
ORDERED = 4  # flag of a ring: the caller goes on in stream order, and is to be told when all is LAUNCHED
LAST = 1  # flag of DONE: the last pack of its instance
RESULT = 2  # flag of DONE: this rank receives a result
IN_USE = 1  # flag of FAILED: a GPU may still be reading and writing the rank's memory; FREED follows


def hello(token: bytes, versions: Versions = OURS) -> bytes:
    """The first message on either socket."""
    return _HELLO.pack(_MAGIC, token) + _VERSIONS.pack(versions.lowest, versions.highest)


def parse_hello(data: bytes) -> tuple[bytes, Versions]:
    """The token of a first message, and what its sender speaks: the first version where it does not say."""
    told_all = len(data) >= _HELLO.size + _VERSIONS.size
    if not data.startswith(_MAGIC) or not (told_all or len(data) == _HELLO.size):
        raise Malformed("the first message is not a hello of this protocol")
    token = bytes(data[4 : _HELLO.size])
    return token, told(*_VERSIONS.unpack_from(data, _HELLO.size)) if told_all else FIRST


class Ring(NamedTuple):
    """Start instance `instance` of the prepared collective `prepared`.

    `addresses` are (arena, byte offset) per leaf, or the one of the staging slot where `staged`. `remaining` is the
    time until the deadline in seconds, 0 for none; `timeout` is what the caller had asked for, for messages.
    `released` are result slots, and events of the worker, that this rank needs no longer. `output` is memory of a GPU
    in which the result is to be written, laid out as Prepare said; None: in a result slot. `event` is the number of one
    behind which the value is there, from 1; 0: it is there now. With `ordered` the rank is told when all is launched;
    a worker that does not know how says only when it is done.
    """

    generation: int
    prepared: int
    instance: int
    remaining: float
    staged: bool
    addresses: tuple[tuple[int, int], ...]
    released: tuple[int, ...] = ()
    timeout: float = 0.0
    output: tuple[int, int] | None = None
    event: int = 0
    ordered: bool = False

    def encode(self) -> bytes:
        if self.output is not None:
            inputs = self._replace(output=None).encode()
            counted = struct.pack("<BBH", Kind.RING, inputs[1] | OUTPUT, len(self.addresses) + 1)
            return counted + inputs[4:] + _ADDRESS.pack(*self.output)
        head = _RING.pack(
            Kind.RING,
            (STAGED if self.staged else 0) | (ORDERED if self.ordered else 0),
            len(self.addresses),
            len(self.released),
            self.event,
            self.generation,
            self.prepared,
            self.instance,
            self.remaining,
            max(self.timeout, self.remaining),  # what is left of next to nothing is rounded up
        )
        if len(self.addresses) == 1 and len(self.released) < 2:  # as small collectives go on
            tail = _ADDRESS.pack(*self.addresses[0])
            return head + _SLOT.pack(self.released[0]) + tail if self.released else head + tail
        slots = struct.pack(f"<{len(self.released)}Q", *self.released)
        return head + slots + b"".join(_ADDRESS.pack(arena, offset) for arena, offset in self.addresses)


def parse_ring(data: bytes) -> Ring:
    if len(data) < _RING.size:
        raise Malformed(f"a ring of {len(data)} bytes is too short")
    _, flags, leaves, released, event, generation, prepared, instance, remaining, timeout = _RING.unpack_from(data)
    start = _RING.size + 8 * released
    if len(data) != start + _ADDRESS.size * leaves:
        raise Malformed(f"a ring of {len(data)} bytes announces {leaves} addresses and {released} releases")
    if not remaining >= 0.0:
        raise Malformed(f"a ring with a remaining time of {remaining}")
    if not timeout >= remaining:
        raise Malformed(f"a ring with a timeout of {timeout} of which {remaining} remain")
    if leaves == 1 and released < 2:  # as small collectives go on
        addresses: tuple[tuple[int, int], ...] = (_ADDRESS.unpack_from(data, start),)
        slots: tuple[int, ...] = _SLOT.unpack_from(data, _RING.size) if released else ()
    else:
        addresses = tuple(_ADDRESS.iter_unpack(data[start:]))
        slots = struct.unpack_from(f"<{released}Q", data, _RING.size)
    output = None
    if flags & OUTPUT:
        if not addresses:
            raise Malformed("a ring that says where its result is to be written, without an address")
        addresses, output = addresses[:-1], addresses[-1]
    staged, ordered = bool(flags & STAGED), bool(flags & ORDERED)
    return Ring(generation, prepared, instance, remaining, staged, addresses, slots, timeout, output, event, ordered)


def release(slots: tuple[int, ...]) -> bytes:
    return bytes((Kind.RELEASE,)) + struct.pack(f"<{len(slots)}Q", *slots)


def parse_release(data: bytes) -> tuple[int, ...]:
    if (len(data) - 1) % _SLOT.size:
        raise Malformed(f"a release of {len(data)} bytes")
    return struct.unpack(f"<{(len(data) - 1) // 8}Q", data[1:])


def bare(kind: Kind, text: str = "") -> bytes:
    """LEAVE, PING, PONG, and ABORT with its reason."""
    return bytes((kind,)) + _encoded(text)


def text_of(data: bytes) -> str:
    return data[1:].decode(errors="replace")


class Done(NamedTuple):
    """Pack `pack` of an instance is complete; with `result`, it lies in result slot `slot` at (arena, offset).

    Where the result's layout was not known at Prepare, an outline (`local/outline.py`) for this rank begins there.
    """

    instance: int
    pack: int
    last: bool
    result: bool
    arena: int = 0
    offset: int = 0
    slot: int = 0

    def encode(self) -> bytes:
        flags = (LAST if self.last else 0) | (RESULT if self.result else 0)
        return _DONE.pack(Kind.DONE, flags, self.pack, self.arena, self.instance, self.slot, self.offset)


def parse_done(data: bytes) -> Done:
    if len(data) != _DONE.size:
        raise Malformed(f"a completion of {len(data)} bytes")
    _, flags, pack, arena, instance, slot, offset = _DONE.unpack(data)
    return Done(instance, pack, bool(flags & LAST), bool(flags & RESULT), arena, offset, slot)


class Launched(NamedTuple):
    """All that remains of an instance is on the device, before an event: its number, from WORKER_EVENT, and handle."""

    instance: int
    event: int
    handle: bytes

    def encode(self) -> bytes:
        return _LAUNCHED.pack(Kind.LAUNCHED, *self)


def parse_launched(data: bytes) -> Launched:
    if len(data) != _LAUNCHED.size:
        raise Malformed(f"a launch of {len(data)} bytes")
    _, instance, event, handle = _LAUNCHED.unpack(data)
    if event < WORKER_EVENT:
        raise Malformed(f"a launch with event {event}")
    return Launched(instance, event, handle)


def failed(instance: int, verdict: bytes, in_use: bool = False) -> bytes:
    return _FAILED.pack(Kind.FAILED, IN_USE if in_use else 0, instance) + verdict


def parse_failed(data: bytes) -> tuple[int, bytes]:
    """(instance, serialized verdict); see `in_use` too."""
    if len(data) < _FAILED.size:
        raise Malformed(f"a failure of {len(data)} bytes")
    return _FAILED.unpack_from(data)[2], data[_FAILED.size :]


def in_use(data: bytes) -> bool:
    """Of a FAILED or PONG: whether memory of the rank is still in use."""
    return bool(data[1:]) if data[0] == Kind.PONG else bool(data[1] & IN_USE)


def freed(generation: int, instance: int) -> bytes:
    return _FREED.pack(Kind.FREED, generation, instance)


def parse_freed(data: bytes) -> tuple[int, int]:
    """(generation, instance)."""
    if len(data) != _FREED.size:
        raise Malformed(f"a release of {len(data)} bytes")
    _, generation, instance = _FREED.unpack(data)
    return generation, instance


def waiting(count: int) -> bytes:
    return _WAITING.pack(Kind.WAITING, count)


def parse_waiting(data: bytes) -> int:
    """How many wait to join."""
    if len(data) != _WAITING.size:
        raise Malformed(f"a count of {len(data)} bytes")
    count: int = _WAITING.unpack(data)[1]
    return count


def arena(kind: Kind, number: int, size: int) -> bytes:
    """ARENA, DEVICE_ARENA (a descriptor rides along), ARENA_ASK (number unused), DEVICE_ASK (number: that of the GPU),
    ARENA_DROP and WITHDRAWN (size unused)."""
    return _ARENA.pack(kind, number, size)


def parse_arena(data: bytes) -> tuple[int, int]:
    """(number, size)."""
    if len(data) != _ARENA.size:
        raise Malformed(f"an arena message of {len(data)} bytes")
    _, number, size = _ARENA.unpack(data)
    return number, size


def event(number: int, handle: bytes) -> bytes:
    return _EVENT.pack(Kind.EVENT, number, handle)


def parse_event(data: bytes) -> tuple[int, bytes]:
    """(number, handle)."""
    if len(data) != _EVENT.size:
        raise Malformed(f"an event of {len(data)} bytes")
    _, number, handle = _EVENT.unpack(data)
    if not 0 < number <= MAX_OUTSTANDING:
        raise Malformed(f"an event of number {number}")
    return number, handle


class Lent(NamedTuple):
    """An allocation of the client's on that GPU of the worker, by the handle of CUDA's legacy IPC.

    `identity` is the allocation's number, which the client's process never gives to another one.
    """

    gpu: int
    identity: int
    handle: bytes

    def encode(self) -> bytes:
        return _OPEN.pack(Kind.DEVICE_OPEN, *self)


def parse_lent(data: bytes) -> Lent:
    if len(data) != _OPEN.size:
        raise Malformed(f"a handle of memory in {len(data)} bytes")
    return Lent(*_OPEN.unpack(data)[1:])


class Lending(NamedTuple):
    """What has become of the allocation `identity`: arena `number` of `size` bytes; 0: it was not opened, and why."""

    identity: int
    number: int = 0
    size: int = 0
    why: str = ""

    def encode(self) -> bytes:
        if self.number:
            return _OPENED.pack(Kind.DEVICE_OPENED, self.number, self.size, self.identity)
        return _NOT_OPENED.pack(Kind.NOT_OPENED, self.identity) + _encoded(self.why)


def parse_lending(data: bytes) -> Lending:
    """Of DEVICE_OPENED or NOT_OPENED."""
    if kind_of(data) is Kind.NOT_OPENED and len(data) >= _NOT_OPENED.size:
        why = data[_NOT_OPENED.size :].decode(errors="replace")
        return Lending(_NOT_OPENED.unpack_from(data)[1], why=why)
    if kind_of(data) is not Kind.DEVICE_OPENED or len(data) != _OPENED.size:
        raise Malformed(f"an answer of {len(data)} bytes to a handle of memory")
    _, number, size, identity = _OPENED.unpack(data)
    if not number:
        raise Malformed("memory that was opened as arena 0")
    return Lending(identity, number, size)


def refused(code: int, text: str) -> bytes:
    return bytes((Kind.REFUSED, code)) + _encoded(text)


def parse_refused(data: bytes) -> tuple[int, str]:
    """(canonical code, text)."""
    if len(data) < 2:
        raise Malformed("a refusal without a code")
    return data[1], data[2:].decode(errors="replace")


def _encoded(text: str) -> bytes:
    """A text of people, cut; names of files may hold what is no character."""
    return text.encode(errors="backslashreplace")[:MAX_TEXT]


def kind_of(data: bytes) -> Kind:
    """The kind of a message after the hello."""
    try:
        return Kind(data[0])
    except (IndexError, ValueError):
        raise Malformed(f"message of unknown kind {data[:1].hex() or 'nothing'}") from None
