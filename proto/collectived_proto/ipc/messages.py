"""Messages of the Unix SOCK_SEQPACKET sockets between a client and the worker of its host.

Three kinds of socket, each admitted by a one-time token in its first message:

- the *session socket*, one per session: input arenas, of the host and of GPUs, are asked for and handed over as
  descriptors, and memory of a GPU that is the client's own is lent;
- a *doorbell*, one per joined rank, straight into its group's group loop: submissions one way, completions the other;
- one per session over which the worker asks where the client's threads are, which a thread of the client answers.

One message is one packet; integers are little-endian. Whatever arrives is checked here; `MalformedMessage` says why.
In the first message the versions of the protocol that the client speaks follow the token. Later versions may append
more there, which is ignored.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from collectived_proto.cause import RANK_FAILURES, Cause
from collectived_proto.version import FIRST_VERSIONS, OUR_VERSIONS, VersionRange, sanitize_versions

TOKEN_BYTES = 16
MAX_MESSAGE = 128 << 10  # well below the kernel's default send buffer, so that one message always fits
MAX_TEXT = 4096  # bytes of a reason,
MAX_STACK = 2048  # and of what a process says about its threads
MAX_OUTSTANDING = 64  # instances that one rank may have in flight,
MAX_P2P_OUTSTANDING = 1 << 16  # and sends and recvs: a posted recv costs little, and memory limits what is sent
MAX_PACKS = 4096  # of one collective
P2P_BASE = 1 << 62  # sends and recvs of a rank are numbered from here, apart from the group's instances
WORKER_EVENT_BASE = 1 << 62  # the worker's events, apart from result slots: both are released alike

_HELLO = struct.Struct("<4s16s")
_VERSIONS = struct.Struct("<HH")
_MAGIC = b"CDL1"
_SUBMIT = struct.Struct("<BBHHHQQQdd")
_SLOT = struct.Struct("<Q")
_ADDRESS = struct.Struct("<IQ")
_DONE = struct.Struct("<BBHIQQQ")
_SOURCE = struct.Struct("<I")
_WITHDRAWAL = struct.Struct("<BBxxxxxxQQ")
_OVERDUE = struct.Struct("<BxxxIQQ")
_FAILED = struct.Struct("<BBxxxxxxq")
_FREED = struct.Struct("<BxxxxxxxQQ")
_WAITING = struct.Struct("<BxxxI")
_ARENA = struct.Struct("<BxxxIQ")
_EVENT = struct.Struct("<BxxxI64s")
_SEGMENT = struct.Struct("<BxxxIQ")
_OPEN = struct.Struct("<BxxxIQ64s")
_OPENED = struct.Struct("<BxxxIQQ")
_NOT_OPENED = struct.Struct("<BxxxxxxxQ")
_LAUNCHED = struct.Struct("<BxxxxxxxQQ64s")


class MalformedMessage(ValueError):
    """A message that the other side should not have sent."""


@enum.unique
class MessageType(enum.IntEnum):
    # client → worker, doorbell
    SUBMIT = 1  # start an instance
    RELEASE = 2  # result slots, and events of the worker, are free again
    LEAVE = 3  # no further instances from this rank
    ABORT = 4  # end the generation for all; text follows
    PING = 5  # are you there?
    FAIL = 7  # the same because of a failure of this rank: its cause (a Cause, one byte) and text follow
    EVENT = 6  # an event of a GPU, by a number and CUDA's handle of it
    OVERDUE = 9  # of a message that a rank in a segment receives a part has come, and by its deadline not the rest
    CANCEL = 8  # take a receive back, unless a message is there for it
    MATCHING = 10  # this rank matches its receives and messages by itself; see ipc/rank_messages.py
    UNCLAIMED = 11  # it has no room for what a rank sends to it, because it has not received what came before
    # worker → client, doorbell; DONE also back, of a send or recv that ranks in a segment carry out themselves
    DONE = 16  # one pack of an instance is complete
    WITHDRAWN = 27  # the same: a receive has ended alone, with a code, and has taken nothing
    FAILED = 17  # an instance ended with a verdict (a serialized collectived.v1.Verdict follows)
    PONG = 18  # with a text where memory of this rank is still in use
    WAITING_JOINERS = 21  # how many wait to join the group, from the next completion on
    ARENA_RETIRED = 22  # no result will lie in this arena any more
    LAUNCHED = 24  # all of an instance is on the device, in front of an event of the worker
    SEGMENT = 29  # where the ranks of this host meet in a generation; its memory rides along
    KNOCKER = 30  # an eventfd rides along, by which ranks in a segment say that they wait
    NO_SEGMENT = 31  # the ranks do not meet in shared memory: their worker carries out what they submit
    FREED = 28  # memory of an instance that failed, which was said to be in use, is not any more
    # both sockets, worker → client: a descriptor rides along
    ARENA = 19
    DEVICE_ARENA = 23  # of the memory of a GPU, on a session socket
    REFUSED = 20  # a request cannot be granted: code, text
    # worker → client, session socket
    DEVICE_OPENED = 25  # memory of the client's own is an arena now, until it is dropped
    NOT_OPENED = 26  # it cannot be: why; nothing else of the session is concerned
    # the socket for questions about threads: worker → client, and the answer, a text
    STACK_ASKED = 40
    STACK = 41
    # worker → client, doorbell
    RESULT_PART = 42  # bytes of a result are final; see ipc/parts.py
    MESSAGE = 43  # a message for a rank that matches by itself; see ipc/rank_messages.py
    RANK_LINK = 44  # a connection rides along, over which two ranks send messages themselves; see there
    CARRIER = 45  # a socket rides along, over which its carrier gets orders; see ipc/carrier_orders.py
    # client → worker, session socket
    ARENA_REQUEST = 32
    ARENA_DROP = 33
    DEVICE_REQUEST = 34  # an arena in the memory of a GPU: its index, and a size; DEVICE_ARENA answers
    DEVICE_OPEN = 35  # an allocation of its own, by CUDA's handle of it; only where `SessionOpened.openings` allows it


SUBMIT_STAGED = 1  # flag of a ring: one address, of a staging slot laid out as Prepare said
SUBMIT_OUTPUT = 2  # flag of a ring: the last address is where the result is to be written
SUBMIT_ORDERED = 4  # flag of a ring: the caller goes on in stream order, and gets LAUNCHED when all is launched
SUBMIT_KEEPS_OWN = 8  # flag of a ring: what the result has of its own value the rank takes from there
SUBMIT_TAKES_PARTS = 16  # flag of a ring: the rank takes parts of the result before all of it is there
SUBMIT_WATCHED = 32  # flag of a ring: the rank carries out a send or recv by itself, and its worker watches it
SUBMIT_MAY_LEND = 64  # flag of a ring: with a carrier the rank could have let its arrays be read and written
SUBMIT_LENT = 128  # flag of a ring: it does so, and has not copied its value to the staging slot
DONE_LAST = 1  # flag of DONE: the last pack of its instance
DONE_RESULT = 2  # flag of DONE: this rank receives a result
FAILED_IN_USE = 1  # flag of FAILED: a GPU may still be reading and writing the rank's memory; FREED follows


def encode_hello(token: bytes, versions: VersionRange = OUR_VERSIONS) -> bytes:
    """Encode the first message on either socket."""
    return _HELLO.pack(_MAGIC, token) + _VERSIONS.pack(versions.lowest, versions.highest)


def parse_hello(data: bytes) -> tuple[bytes, VersionRange]:
    """The token of a first message, and what its sender speaks: the first version where it does not say."""
    told_all = len(data) >= _HELLO.size + _VERSIONS.size
    if not data.startswith(_MAGIC) or not (told_all or len(data) == _HELLO.size):
        raise MalformedMessage("the first message is not a hello of this protocol")
    token = bytes(data[4 : _HELLO.size])
    return token, sanitize_versions(*_VERSIONS.unpack_from(data, _HELLO.size)) if told_all else FIRST_VERSIONS


class Submit(NamedTuple):
    """Start instance `instance` of the prepared collective `prepared`.

    `addresses` are (arena, byte offset) per leaf, or the one of the staging slot where `staged`. `remaining` is the
    time until the deadline in seconds, 0 for none; `timeout` is the timeout that the caller gave, for messages.
    `released_slots` are result slots, and events of the worker, that this rank needs no longer. `output` is memory of
    a GPU in which the result is to be written, laid out as Prepare said; None: in a result slot. `event` is the number
    of one behind which the value is there, from 1; 0: it is there now. With `ordered` the rank gets a message when all
    is launched; a worker that does not know how says only when it is done. With `keeps_own` the rank takes what its own
    value gives to the result from its own arrays, and with `takes_parts` it gets a message for each part of a long
    result. With `watched` the rank carries out a send or recv by itself. `lending`: SUBMIT_MAY_LEND, SUBMIT_LENT, or 0.
    """

    generation: int
    prepared: int
    instance: int
    remaining: float
    staged: bool
    addresses: tuple[tuple[int, int], ...]
    released_slots: tuple[int, ...] = ()
    timeout: float = 0.0
    output: tuple[int, int] | None = None
    event: int = 0
    ordered: bool = False
    keeps_own: bool = False
    takes_parts: bool = False
    watched: bool = False
    lending: int = 0

    def encode(self) -> bytes:
        if self.output is not None:
            inputs = self._replace(output=None).encode()
            counted = struct.pack("<BBH", MessageType.SUBMIT, inputs[1] | SUBMIT_OUTPUT, len(self.addresses) + 1)
            return counted + inputs[4:] + _ADDRESS.pack(*self.output)
        head = _SUBMIT.pack(
            MessageType.SUBMIT,
            self.staged * SUBMIT_STAGED
            | self.ordered * SUBMIT_ORDERED
            | self.keeps_own * SUBMIT_KEEPS_OWN
            | self.takes_parts * SUBMIT_TAKES_PARTS
            | self.watched * SUBMIT_WATCHED
            | self.lending,
            len(self.addresses),
            len(self.released_slots),
            self.event,
            self.generation,
            self.prepared,
            self.instance,
            self.remaining,
            max(self.timeout, self.remaining),  # a tiny rest is rounded up
        )
        if len(self.addresses) == 1 and len(self.released_slots) < 2:  # as small collectives go on
            tail = _ADDRESS.pack(*self.addresses[0])
            return head + _SLOT.pack(self.released_slots[0]) + tail if self.released_slots else head + tail
        slots = struct.pack(f"<{len(self.released_slots)}Q", *self.released_slots)
        return head + slots + b"".join(_ADDRESS.pack(arena, offset) for arena, offset in self.addresses)


def parse_submit(data: bytes) -> Submit:
    if len(data) < _SUBMIT.size:
        raise MalformedMessage(f"a ring of {len(data)} bytes is too short")
    _, flags, leaves, released, event, generation, prepared, instance, remaining, timeout = _SUBMIT.unpack_from(data)
    start = _SUBMIT.size + 8 * released
    if len(data) != start + _ADDRESS.size * leaves:
        raise MalformedMessage(f"a ring of {len(data)} bytes announces {leaves} addresses and {released} releases")
    if not remaining >= 0.0:
        raise MalformedMessage(f"a ring with a remaining time of {remaining}")
    if not timeout >= remaining:
        raise MalformedMessage(f"a ring with a timeout of {timeout} of which {remaining} remain")
    if leaves == 1 and released < 2:  # as small collectives go on
        addresses: tuple[tuple[int, int], ...] = (_ADDRESS.unpack_from(data, start),)
        slots: tuple[int, ...] = _SLOT.unpack_from(data, _SUBMIT.size) if released else ()
    else:
        addresses = tuple(_ADDRESS.iter_unpack(data[start:]))
        slots = struct.unpack_from(f"<{released}Q", data, _SUBMIT.size)
    output = None
    if flags & SUBMIT_OUTPUT:
        if not addresses:
            raise MalformedMessage("a ring that says where its result is to be written, without an address")
        addresses, output = addresses[:-1], addresses[-1]
    staged, ordered = bool(flags & SUBMIT_STAGED), bool(flags & SUBMIT_ORDERED)
    keeps, takes, watched = flags & SUBMIT_KEEPS_OWN, flags & SUBMIT_TAKES_PARTS, flags & SUBMIT_WATCHED
    more = event, ordered, bool(keeps), bool(takes), bool(watched), flags & (SUBMIT_MAY_LEND | SUBMIT_LENT)
    return Submit(generation, prepared, instance, remaining, staged, addresses, slots, timeout, output, *more)


def encode_release(slots: tuple[int, ...]) -> bytes:
    return bytes((MessageType.RELEASE,)) + struct.pack(f"<{len(slots)}Q", *slots)


def parse_release(data: bytes) -> tuple[int, ...]:
    if (len(data) - 1) % _SLOT.size:
        raise MalformedMessage(f"a release of {len(data)} bytes")
    return struct.unpack(f"<{(len(data) - 1) // 8}Q", data[1:])


def encode_bare(kind: MessageType, text: str = "") -> bytes:
    """Encode LEAVE, PING, PONG, STACK_ASKED, STACK with its text, or ABORT with its reason."""
    return bytes((kind,)) + _encode_text(text)


def parse_text(data: bytes) -> str:
    return data[1:].decode(errors="replace")


def encode_end(cause: Cause, reason: str) -> bytes:
    """Encode what ends the generation for all: ABORT, or FAIL where a failure of this rank is the cause."""
    if cause is Cause.ABORTED:
        return encode_bare(MessageType.ABORT, reason)
    return bytes((MessageType.FAIL, cause)) + _encode_text(reason)


def parse_end(data: bytes) -> tuple[Cause, str]:
    """Parse ABORT or FAIL. A cause that is no failure of one rank counts as an abort."""
    if parse_type(data) is MessageType.ABORT:
        return Cause.ABORTED, parse_text(data)
    if len(data) < 2:
        raise MalformedMessage("a FAIL without its cause")
    cause = Cause(data[1]) if data[1] in RANK_FAILURES else Cause.ABORTED
    return cause, data[2:].decode(errors="replace")


class Completion(NamedTuple):
    """Pack `pack` of an instance is complete; with `has_result`, it lies in result slot `slot` at (arena, offset).

    Where the result's layout was not known at Prepare, an outline (`ipc/result_header.py`) for this rank begins there.
    `source` is the rank that sent it, where a receive took a message of any rank.
    """

    instance: int
    pack: int
    is_last: bool
    has_result: bool
    arena: int = 0
    offset: int = 0
    slot: int = 0
    source: int | None = None

    def encode(self) -> bytes:
        flags = (DONE_LAST if self.is_last else 0) | (DONE_RESULT if self.has_result else 0)
        told = _DONE.pack(MessageType.DONE, flags, self.pack, self.arena, self.instance, self.slot, self.offset)
        return told if self.source is None else told + _SOURCE.pack(self.source)


def parse_done(data: bytes) -> Completion:
    if len(data) not in (_DONE.size, _DONE.size + _SOURCE.size):
        raise MalformedMessage(f"a completion of {len(data)} bytes")
    _, flags, pack, arena, instance, slot, offset = _DONE.unpack_from(data)
    source: int | None = _SOURCE.unpack_from(data, _DONE.size)[0] if len(data) > _DONE.size else None
    return Completion(instance, pack, bool(flags & DONE_LAST), bool(flags & DONE_RESULT), arena, offset, slot, source)


class Withdrawal(NamedTuple):
    """CANCEL, where `code` is 0, or WITHDRAWN with the canonical code of the error with which a receive has ended."""

    generation: int
    instance: int
    code: int = 0

    def encode(self) -> bytes:
        kind = MessageType.WITHDRAWN if self.code else MessageType.CANCEL
        return _WITHDRAWAL.pack(kind, self.code, self.generation, self.instance)


def parse_withdrawal(data: bytes) -> Withdrawal:
    if len(data) != _WITHDRAWAL.size:
        raise MalformedMessage(f"a withdrawal of {len(data)} bytes")
    kind, code, generation, instance = _WITHDRAWAL.unpack(data)
    if (kind == MessageType.WITHDRAWN) != bool(code) or instance < P2P_BASE:
        raise MalformedMessage(f"a withdrawal of instance {instance} with code {code}")
    return Withdrawal(generation, instance, code)


class OverdueReceive(NamedTuple):
    """OVERDUE: a receive, and the rank that has sent a part of its value."""

    generation: int
    instance: int
    source: int

    def encode(self) -> bytes:
        return _OVERDUE.pack(MessageType.OVERDUE, self.source, self.generation, self.instance)


def parse_overdue(data: bytes) -> OverdueReceive:
    if len(data) != _OVERDUE.size:
        raise MalformedMessage(f"an overdue receive of {len(data)} bytes")
    _, source, generation, instance = _OVERDUE.unpack(data)
    return OverdueReceive(generation, instance, source)


class Launched(NamedTuple):
    """All that remains of an instance is on the device, before an event: its number, from WORKER_EVENT, and handle."""

    instance: int
    event: int
    handle: bytes

    def encode(self) -> bytes:
        return _LAUNCHED.pack(MessageType.LAUNCHED, *self)


def parse_launched(data: bytes) -> Launched:
    if len(data) != _LAUNCHED.size:
        raise MalformedMessage(f"a launch of {len(data)} bytes")
    _, instance, event, handle = _LAUNCHED.unpack(data)
    if event < WORKER_EVENT_BASE:
        raise MalformedMessage(f"a launch with event {event}")
    return Launched(instance, event, handle)


def encode_failed(instance: int, verdict: bytes, in_use: bool = False) -> bytes:
    return _FAILED.pack(MessageType.FAILED, FAILED_IN_USE if in_use else 0, instance) + verdict


def parse_failed(data: bytes) -> tuple[int, bytes]:
    """(instance, serialized verdict); see `in_use` too."""
    if len(data) < _FAILED.size:
        raise MalformedMessage(f"a failure of {len(data)} bytes")
    return _FAILED.unpack_from(data)[2], data[_FAILED.size :]


def is_in_use(data: bytes) -> bool:
    """Of a FAILED or PONG: whether memory of the rank is still in use."""
    return bool(data[1:]) if data[0] == MessageType.PONG else bool(data[1] & FAILED_IN_USE)


def encode_freed(generation: int, instance: int) -> bytes:
    return _FREED.pack(MessageType.FREED, generation, instance)


def parse_freed(data: bytes) -> tuple[int, int]:
    """(generation, instance)."""
    if len(data) != _FREED.size:
        raise MalformedMessage(f"a release of {len(data)} bytes")
    _, generation, instance = _FREED.unpack(data)
    return generation, instance


def encode_waiting(count: int) -> bytes:
    return _WAITING.pack(MessageType.WAITING_JOINERS, count)


def parse_waiting(data: bytes) -> int:
    """Return how many wait to join."""
    if len(data) != _WAITING.size:
        raise MalformedMessage(f"a count of {len(data)} bytes")
    count: int = _WAITING.unpack(data)[1]
    return count


def encode_arena(kind: MessageType, number: int, size: int) -> bytes:
    """ARENA, DEVICE_ARENA (a descriptor rides along), ARENA_ASK (number unused), DEVICE_ASK (number: that of the GPU),
    ARENA_DROP and WITHDRAWN (size unused)."""
    return _ARENA.pack(kind, number, size)


def parse_arena(data: bytes) -> tuple[int, int]:
    """(number, size)."""
    if len(data) != _ARENA.size:
        raise MalformedMessage(f"a message about shared memory of {len(data)} bytes")
    _, number, size = _ARENA.unpack(data)
    return number, size


def encode_event(number: int, handle: bytes) -> bytes:
    return _EVENT.pack(MessageType.EVENT, number, handle)


def parse_event(data: bytes) -> tuple[int, bytes]:
    """(number, handle)."""
    if len(data) != _EVENT.size:
        raise MalformedMessage(f"an event of {len(data)} bytes")
    _, number, handle = _EVENT.unpack(data)
    if not 0 < number <= MAX_OUTSTANDING:
        raise MalformedMessage(f"an event of number {number}")
    return number, handle


class SegmentOffer(NamedTuple):
    """Where the ranks of this host meet in a generation: this rank's seat, and the geometry for the native core."""

    generation: int
    seat: int
    geometry: bytes

    def encode(self) -> bytes:
        return _SEGMENT.pack(MessageType.SEGMENT, self.seat, self.generation) + self.geometry


def parse_segment(data: bytes) -> SegmentOffer:
    if len(data) <= _SEGMENT.size:
        raise MalformedMessage(f"a segment of {len(data)} bytes")
    _, seat, generation = _SEGMENT.unpack_from(data)
    return SegmentOffer(generation, seat, data[_SEGMENT.size :])


class IpcOpen(NamedTuple):
    """An allocation of the client's on that GPU of the worker, by the handle of CUDA's legacy IPC.

    `buffer_id` is the allocation's number, which the client's process never gives to another one.
    """

    gpu: int
    buffer_id: int
    handle: bytes

    def encode(self) -> bytes:
        return _OPEN.pack(MessageType.DEVICE_OPEN, *self)


def parse_ipc_open(data: bytes) -> IpcOpen:
    if len(data) != _OPEN.size:
        raise MalformedMessage(f"a handle of memory in {len(data)} bytes")
    return IpcOpen(*_OPEN.unpack(data)[1:])


class IpcOpenResult(NamedTuple):
    """The outcome of opening the allocation `buffer_id`: arena `number` of `size` bytes; 0: not opened, and why."""

    buffer_id: int
    number: int = 0
    size: int = 0
    reason: str = ""

    def encode(self) -> bytes:
        if self.number:
            return _OPENED.pack(MessageType.DEVICE_OPENED, self.number, self.size, self.buffer_id)
        return _NOT_OPENED.pack(MessageType.NOT_OPENED, self.buffer_id) + _encode_text(self.reason)


def parse_ipc_open_result(data: bytes) -> IpcOpenResult:
    """Parse DEVICE_OPENED or NOT_OPENED."""
    if parse_type(data) is MessageType.NOT_OPENED and len(data) >= _NOT_OPENED.size:
        why = data[_NOT_OPENED.size :].decode(errors="replace")
        return IpcOpenResult(_NOT_OPENED.unpack_from(data)[1], reason=why)
    if parse_type(data) is not MessageType.DEVICE_OPENED or len(data) != _OPENED.size:
        raise MalformedMessage(f"an answer of {len(data)} bytes to a handle of memory")
    _, number, size, identity = _OPENED.unpack(data)
    if not number:
        raise MalformedMessage("memory that was opened as number 0")
    return IpcOpenResult(identity, number, size)


def encode_refused(code: int, text: str) -> bytes:
    return bytes((MessageType.REFUSED, code)) + _encode_text(text)


def parse_refused(data: bytes) -> tuple[int, str]:
    """(canonical code, text)."""
    if len(data) < 2:
        raise MalformedMessage("a refusal without a code")
    return data[1], data[2:].decode(errors="replace")


def _encode_text(text: str) -> bytes:
    """A text of people, cut; names of files may hold what is no character."""
    return text.encode(errors="backslashreplace")[:MAX_TEXT]


def parse_type(data: bytes) -> MessageType:
    """Return the kind of a message after the hello."""
    try:
        return MessageType(data[0])
    except (IndexError, ValueError):
        raise MalformedMessage(f"message of unknown kind {data[:1].hex() or 'nothing'}") from None
