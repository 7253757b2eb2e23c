"""Every parser of bytes that come from another process, with examples of what it should take and what it may raise."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message

from collectived.shared.message_forms import describe_value, parse_description
from collectived.shared.rank_link import IncomingLink
from collectived.values import structure
from collectived_proto import codec, group_codec
from collectived_proto.devices import DeviceName
from collectived_proto.errors import Code, CollectiveError
from collectived_proto.ipc import messages, rank_messages, result_header
from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    CommunicationImplementation,
    DType,
    GroupInfo,
    Leaf,
    Member,
    Peer,
    ReduceOp,
    Scatter,
    Send,
    Tier,
    Verdict,
)
from collectived_proto.v1 import common_pb2, coordinator_pb2, worker_pb2
from collectived_runtime.coordinator import codec as coordinator_codec
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.compile.negotiation import prepare
from collectived_runtime.transport import frame, hello

MEMBERS = tuple(
    Member(rank, str(DeviceName(rank, "CPU", 0)), rank, f"host{rank}", 100 + rank, "a label", 7, "sum")
    for rank in range(2)
)
GROUP = GroupInfo("world", 1 << 40, (1 << 40) + 1, MEMBERS)
PEERS = tuple(Peer(rank, "a-b", f"host{rank}", "127.0.0.1:1", (rank,)) for rank in range(2))
TOPOLOGY = GroupTopology(GROUP, PEERS, 0, (Tier("ring", 1, -1, 0),))
VERDICT = Verdict(
    "world", GROUP.key, GROUP.generation, Code.DEADLINE_EXCEEDED, "rank 1 is missing", 3,
    missing=(MEMBERS[1],), members=MEMBERS,
)  # fmt: skip
LEAVES = (Leaf("['a']", DType.FLOAT32, (3, 4)), Leaf("[1]", DType.INT64, ()))
COLLECTIVES = tuple(
    Collective(operation, "{'a': *}", LEAVES[:1], 0, CommunicationImplementation.AUTO, "train.py:3")
    for operation in (
        AllReduce(ReduceOp.SUM),
        Broadcast(1),
        AllGather(0),
        Scatter(0, 0, (1, 2)),
        AllToAll(0),
        Send(1, 2),
    )
)

_MOST_KEPT = 1 << 20  # bytes


@dataclass(frozen=True)
class Parser:
    """`read` takes bytes; whatever else than one of `refuses` it raises is a defect."""

    name: str
    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    refuses: tuple[type[Exception], ...]


def _doorbell_of_clients(data: bytes) -> object:
    match messages.parse_type(data):
        case messages.MessageType.SUBMIT:
            return messages.parse_submit(data)
        case messages.MessageType.RELEASE:
            return messages.parse_release(data)
        case messages.MessageType.ARENA_REQUEST | messages.MessageType.ARENA_DROP | messages.MessageType.DEVICE_REQUEST:
            return messages.parse_arena(data)
        case messages.MessageType.DEVICE_OPEN:
            return messages.parse_ipc_open(data)
        case messages.MessageType.EVENT:
            return messages.parse_event(data)
        case messages.MessageType.CANCEL | messages.MessageType.WITHDRAWN:
            return messages.parse_withdrawal(data)
        case messages.MessageType.OVERDUE:
            return messages.parse_overdue(data)
        case messages.MessageType.MATCHING:
            return rank_messages.parse_matching(data)
        case messages.MessageType.UNCLAIMED:
            return rank_messages.parse_unclaimed(data)
        case _:
            return messages.parse_text(data)


def _doorbell_of_workers(data: bytes) -> object:
    match messages.parse_type(data):
        case messages.MessageType.DONE:
            return messages.parse_done(data)
        case messages.MessageType.LAUNCHED:
            return messages.parse_launched(data)
        case messages.MessageType.WITHDRAWN:
            return messages.parse_withdrawal(data)
        case messages.MessageType.FAILED:
            instance, verdict = messages.parse_failed(data)
            return instance, codec.verdict_from_proto(common_pb2.Verdict.FromString(verdict))
        case messages.MessageType.WAITING_JOINERS:
            return messages.parse_waiting(data)
        case messages.MessageType.REFUSED:
            return messages.parse_refused(data)
        case messages.MessageType.DEVICE_OPENED | messages.MessageType.NOT_OPENED:
            return messages.parse_ipc_open_result(data)
        case messages.MessageType.MESSAGE:
            return rank_messages.parse_delivery(data)
        case messages.MessageType.RANK_LINK:
            return rank_messages.parse_link_offer(data)
        case _:
            return messages.parse_arena(data)


def _frame(data: bytes) -> object:
    return frame.parse(data[: frame.HEADER_BYTES].ljust(frame.HEADER_BYTES, b"\0"))


def _messages_of_ranks(data: bytes) -> object:
    """As a receiver reads what comes over a rank link, and thinks about the values."""
    near, far = socket.socketpair()
    with near, far:
        far.sendall(data)
        near.setblocking(False)
        keeper = _Keeper()
        IncomingLink(near, 1, keeper).advance()
        return [parse_description(description) for description in keeper.descriptions]


class _Keeper:
    """Takes each message of a rank, unless it is long."""

    def __init__(self) -> None:
        self.descriptions: list[bytes] = []

    def take_expected(self, source: int, memory: bytearray, begin: int, end: int) -> int:
        return 0

    def may_read(self, source: int, header: rank_messages.Header) -> bool:
        return True

    def begin(self, source: int, header: rank_messages.Header, description: bytes) -> tuple[object, list[memoryview]]:
        if header.nbytes > _MOST_KEPT:
            raise ConnectionAbortedError("too long")
        self.descriptions.append(description)
        return None, [memoryview(bytearray(header.nbytes))]

    def finish(self, source: int, taker: object) -> None: ...

    def on_sent(self, sender: object) -> None: ...

    def on_advanced(self) -> None: ...

    def on_broken(self, peer: int, why: str, is_outgoing: bool) -> None: ...

    def on_failure(self, error: BaseException) -> None: ...

    def look(self) -> bool:
        return False


def _message_of_a_rank(value: bytes) -> bytes:
    described = describe_value(COLLECTIVES[-1])
    return rank_messages.Header(3, len(described), len(value), 0).encode() + described + value


def _hello(data: bytes) -> object:
    return hello.parse(data[: hello.HELLO_BYTES].ljust(hello.HELLO_BYTES, b"\0"))


def _answer(data: bytes) -> object:
    answer = data[: hello.ANSWER_BYTES].ljust(hello.ANSWER_BYTES, b"\0")
    with contextlib.suppress(hello.HelloRefused):  # which is all that it may raise
        hello.check_answer(answer, 1)
    return hello.decode_version_mismatch(answer)


def _described(data: bytes) -> object:
    """As a worker thinks about a collective that a client or another worker describes."""
    return prepare(codec.collective_from_proto(common_pb2.Collective.FromString(data)), 0, TOPOLOGY)


def _worker_message(data: bytes) -> object:
    message = coordinator_pb2.WorkerMessage.FromString(data)
    if message.WhichOneof("message") == "hello":
        return coordinator_codec.hello_from_proto(message.hello)
    return coordinator_codec.event_from_proto(0, message)


def _serialized(*found: Message) -> tuple[bytes, ...]:
    return tuple(message.SerializeToString() for message in found)


_REPORT = coordinator_pb2.WorkerMessage(report=coordinator_pb2.Report(kind="PENDING", key=1, generation=2))
_HELLO = coordinator_pb2.WorkerMessage(
    hello=coordinator_pb2.Hello(task=1, incarnation="a-b", host="h", devices=["CPU:0"], address="unix:/a")
)
_ASK = coordinator_pb2.WorkerMessage(
    join=coordinator_pb2.JoinAsk(request="r", name="world", min_size=2, max_size=2, rank=1, device="CPU:0")
)
_BEAT = coordinator_pb2.WorkerMessage(heartbeat=coordinator_pb2.Heartbeat())

PARSERS = (
    Parser(
        "token",
        messages.parse_hello,
        (messages.encode_hello(b"t" * messages.TOKEN_BYTES), b"CDL1" + b"t" * messages.TOKEN_BYTES),
        (messages.MalformedMessage,),
    ),
    Parser(
        "doorbell, from clients",
        _doorbell_of_clients,
        (
            messages.Submit(1, 2, 3, 0.5, False, ((1, 2), (3, 4)), (5, 6), 1.0).encode(),
            messages.Submit(1, 2, 3, 0.0, True, ((1, 64),)).encode(),
            messages.encode_release((1, 2, 3)),
            messages.Withdrawal(1, messages.P2P_BASE + 2).encode(),
            messages.Withdrawal(1, messages.P2P_BASE + 2, 4).encode(),
            messages.OverdueReceive(1, messages.P2P_BASE + 2, 3).encode(),
            rank_messages.encode_matching(1 << 40),
            rank_messages.Unclaimed(1, 3, 4, 1 << 20, 5).encode(),
            messages.encode_bare(messages.MessageType.ABORT, "loss is NaN"),
            messages.encode_bare(messages.MessageType.LEAVE),
            messages.encode_arena(messages.MessageType.ARENA_REQUEST, 0, 1 << 20),
            messages.IpcOpen(0, 7, b"h" * 64).encode(),
        ),
        (messages.MalformedMessage,),
    ),
    Parser(
        "doorbell, from workers",
        _doorbell_of_workers,
        (
            messages.Completion(3, 0, True, True, 1, 64, 5).encode(),
            messages.Launched(3, messages.WORKER_EVENT_BASE, b"h" * 64).encode(),
            messages.encode_failed(3, codec.verdict_to_proto(VERDICT).SerializeToString()),
            messages.encode_waiting(3),
            messages.encode_refused(8, "too much"),
            messages.encode_arena(messages.MessageType.ARENA, 1, 4096),
            messages.IpcOpenResult(7, 3, 1 << 20).encode(),
            messages.IpcOpenResult(7, reason="it has ended").encode(),
            rank_messages.Delivery(1, 3, 4, 1, 64, 5).encode(),
            rank_messages.LinkOffer(1, 3, True, 1 << 20).encode(),
        ),
        (messages.MalformedMessage, DecodeError),
    ),
    Parser(
        "frame",
        _frame,
        (
            frame.Frame(frame.FrameKind.DATA, 0, 1, 2, 3, 4, 5, b"p" * 8, b"c" * 8, 0, 64).encode(),
            frame.encode_bye(1, 2),
        ),
        (frame.BadFrame,),
    ),
    Parser(
        "messages on a rank link",
        _messages_of_ranks,
        (_message_of_a_rank(b"v" * 48), _message_of_a_rank(b"") * 3),
        (ValueError, OSError),
    ),
    Parser("hello of a link", _hello, (hello.LinkHello(0, 1, 2, 3, 4, b"n" * 16).encode(),), (hello.HelloRefused,)),
    Parser(
        "answer on a link",
        _answer,
        (hello.encode_version_mismatch(), hello.encode_no_room(hello.NoRoom.DESCRIPTORS), bytes(hello.ANSWER_BYTES)),
        (hello.HelloRefused,),
    ),
    Parser(
        "outline",
        result_header.parse_header,
        (
            result_header.ResultHeader(512, (((128, 3),), ((256, 1), (300, 2))), b"described")
            .encode()
            .ljust(512, b"\0"),
        ),
        (ValueError,),
    ),
    Parser(
        "collective",
        _described,
        _serialized(*map(codec.collective_to_proto, COLLECTIVES)),
        (DecodeError, CollectiveError),
    ),
    Parser(
        "verdict",
        lambda data: group_codec.compact_verdict_from_proto(common_pb2.Verdict.FromString(data), MEMBERS),
        _serialized(group_codec.compact_verdict_to_proto(VERDICT), codec.verdict_to_proto(VERDICT)),
        (DecodeError,),
    ),
    Parser(
        "group that has formed",
        group_codec.formed_from_bytes,
        (group_codec.formed_to_bytes(GROUP, PEERS, (Tier("ring", 1, -1, 0),), False),),
        (CollectiveError,),
    ),
    Parser(
        "layout",
        lambda data: codec.layout_from_proto(common_pb2.Layout.FromString(data)),
        (b"",),
        (DecodeError, CollectiveError),
    ),
    Parser(
        "words of a worker to the coordinator",
        _worker_message,
        _serialized(_HELLO, _ASK, _BEAT, _REPORT),
        (DecodeError, CollectiveError),
    ),
    Parser(
        "submission",
        worker_pb2.SubmitRequest.FromString,
        _serialized(worker_pb2.SubmitRequest(data=b"123"), worker_pb2.SubmitRequest()),
        (DecodeError,),
    ),
    Parser(
        "device",
        lambda data: DeviceName.parse(data.decode(errors="replace")),
        (b"/job:worker/task:1/device:CPU:0", b"cpu:3"),
        (ValueError,),
    ),
    Parser(
        "structure",
        lambda data: structure.parse(data.decode(errors="replace")),
        (b"{'a': [*, None], 'b': (*,)}", b"*"),
        (ValueError,),
    ),
)
