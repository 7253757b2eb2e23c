"""Every parser of bytes that come from another process, with examples of what it should take and what it may raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message

from collectived.values import structure
from collectived_proto import announcements, codec
from collectived_proto.devices import DeviceName
from collectived_proto.errors import Code, CollectiveError
from collectived_proto.local import outline, wire
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
from collectived_runtime.coordinator import messages
from collectived_runtime.engine.preliminary import prepare
from collectived_runtime.engine.topology import Topology
from collectived_runtime.transport import frame, hello

MEMBERS = tuple(
    Member(rank, str(DeviceName(rank, "CPU", 0)), rank, f"host{rank}", 100 + rank, "a label", 7, "sum")
    for rank in range(2)
)
GROUP = GroupInfo("world", 1 << 40, (1 << 40) + 1, MEMBERS)
PEERS = tuple(Peer(rank, "a-b", f"host{rank}", "127.0.0.1:1", (rank,)) for rank in range(2))
TOPOLOGY = Topology(GROUP, PEERS, 0, (Tier("ring", 1, -1, 0),))
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


@dataclass(frozen=True)
class Parser:
    """`read` takes bytes; whatever else than one of `refuses` it raises is a defect."""

    name: str
    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    refuses: tuple[type[Exception], ...]


def _doorbell_of_clients(data: bytes) -> object:
    match wire.kind_of(data):
        case wire.Kind.RING:
            return wire.parse_ring(data)
        case wire.Kind.RELEASE:
            return wire.parse_release(data)
        case wire.Kind.ARENA_ASK | wire.Kind.ARENA_DROP | wire.Kind.DEVICE_ASK:
            return wire.parse_arena(data)
        case wire.Kind.DEVICE_OPEN:
            return wire.parse_lent(data)
        case wire.Kind.EVENT:
            return wire.parse_event(data)
        case _:
            return wire.text_of(data)


def _doorbell_of_workers(data: bytes) -> object:
    match wire.kind_of(data):
        case wire.Kind.DONE:
            return wire.parse_done(data)
        case wire.Kind.LAUNCHED:
            return wire.parse_launched(data)
        case wire.Kind.FAILED:
            instance, verdict = wire.parse_failed(data)
            return instance, codec.verdict_from_proto(common_pb2.Verdict.FromString(verdict))
        case wire.Kind.WAITING:
            return wire.parse_waiting(data)
        case wire.Kind.REFUSED:
            return wire.parse_refused(data)
        case wire.Kind.DEVICE_OPENED | wire.Kind.NOT_OPENED:
            return wire.parse_lending(data)
        case _:
            return wire.parse_arena(data)


def _frame(data: bytes) -> object:
    return frame.parse(data[: frame.HEADER_BYTES].ljust(frame.HEADER_BYTES, b"\0"))


def _hello(data: bytes) -> object:
    return hello.parse(data[: hello.HELLO_BYTES].ljust(hello.HELLO_BYTES, b"\0"))


def _answer(data: bytes) -> object:
    return hello.apart_from(data[: hello.ANSWER_BYTES].ljust(hello.ANSWER_BYTES, b"\0"))


def _described(data: bytes) -> object:
    """As a worker thinks about a collective that a client or another worker describes."""
    return prepare(codec.collective_from_proto(common_pb2.Collective.FromString(data)), 0, TOPOLOGY)


def _worker_message(data: bytes) -> object:
    message = coordinator_pb2.WorkerMessage.FromString(data)
    if message.WhichOneof("message") == "hello":
        return messages.hello_from_proto(message.hello)
    return messages.event_from_proto(0, message)


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
        wire.parse_hello,
        (wire.hello(b"t" * wire.TOKEN_BYTES), b"CDL1" + b"t" * wire.TOKEN_BYTES),
        (wire.Malformed,),
    ),
    Parser(
        "doorbell, from clients",
        _doorbell_of_clients,
        (
            wire.Ring(1, 2, 3, 0.5, False, ((1, 2), (3, 4)), (5, 6), 1.0).encode(),
            wire.Ring(1, 2, 3, 0.0, True, ((1, 64),)).encode(),
            wire.release((1, 2, 3)),
            wire.bare(wire.Kind.ABORT, "loss is NaN"),
            wire.bare(wire.Kind.LEAVE),
            wire.arena(wire.Kind.ARENA_ASK, 0, 1 << 20),
            wire.Lent(0, 7, b"h" * 64).encode(),
        ),
        (wire.Malformed,),
    ),
    Parser(
        "doorbell, from workers",
        _doorbell_of_workers,
        (
            wire.Done(3, 0, True, True, 1, 64, 5).encode(),
            wire.Launched(3, wire.WORKER_EVENT, b"h" * 64).encode(),
            wire.failed(3, codec.verdict_to_proto(VERDICT).SerializeToString()),
            wire.waiting(3),
            wire.refused(8, "too much"),
            wire.arena(wire.Kind.ARENA, 1, 4096),
            wire.Lending(7, 3, 1 << 20).encode(),
            wire.Lending(7, why="it has ended").encode(),
        ),
        (wire.Malformed, DecodeError),
    ),
    Parser(
        "frame",
        _frame,
        (frame.Frame(frame.FrameKind.DATA, 0, 1, 2, 3, 4, 5, b"p" * 8, b"c" * 8, 0, 64).encode(), frame.bye(1, 2)),
        (frame.BadFrame,),
    ),
    Parser("hello of a link", _hello, (hello.Hello(0, 1, 2, 3, 4, b"n" * 16).encode(),), (hello.Refused,)),
    Parser("answer on a link", _answer, (hello.apart(), bytes(hello.ANSWER_BYTES)), (hello.Refused,)),
    Parser(
        "outline",
        outline.parse,
        (outline.Outline(512, (((128, 3),), ((256, 1), (300, 2))), b"described").encode().ljust(512, b"\0"),),
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
        lambda data: announcements.ruling_from_proto(common_pb2.Verdict.FromString(data), MEMBERS),
        _serialized(announcements.ruling_to_proto(VERDICT), codec.verdict_to_proto(VERDICT)),
        (DecodeError,),
    ),
    Parser(
        "group that has formed",
        announcements.formed_from_bytes,
        (announcements.formed_to_bytes(GROUP, PEERS, (Tier("ring", 1, -1, 0),), False),),
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
