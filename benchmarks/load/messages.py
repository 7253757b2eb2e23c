"""The messages of a simulated worker to the coordinator, as bytes, and the kinds of its answers. Pure."""

from __future__ import annotations

from collectived_proto.codec import versions_to_proto
from collectived_proto.group_codec import formed_from_bytes
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_proto.version import OUR_VERSIONS

GROUP = "load/world"


def hello(task: int) -> bytes:
    message = pb.Hello(
        protocol=versions_to_proto(OUR_VERSIONS),
        task=task,
        incarnation=f"simulated-{task}",
        host=f"node-{task:04}",
        pid=10_000 + task,
        devices=[f"/job:worker/replica:0/task:{task}/device:CPU:{index}" for index in range(8)],
        address=f"node-{task:04}:7451",
        link_address=f"node-{task:04}:7452",
    )
    return pb.WorkerMessage(hello=message).SerializeToString()


def ask(task: int, size: int, name: str = GROUP) -> bytes:
    """One rank of this worker wants to join."""
    message = pb.JoinAsk(
        request=f"request-{name}-{task}",
        name=name,
        min_size=size,
        max_size=size,
        device=f"/job:worker/replica:0/task:{task}/device:CPU:0",
        host=f"node-{task:04}",
        pid=20_000 + task,
    )
    return pb.WorkerMessage(join=message).SerializeToString()


def heartbeat() -> bytes:
    return pb.WorkerMessage(heartbeat=pb.Heartbeat()).SerializeToString()


def lost(done: pb.JoinDone) -> bytes:
    """The client of the rank that `done` was for has ended."""
    group = formed_from_bytes(done.formed).group
    report = pb.Report(key=group.key, generation=group.generation, kind=pb.Report.LOST, instance=-1, rank=done.rank)
    return pb.WorkerMessage(report=report).SerializeToString()


def position(query: pb.Query, rank: int) -> bytes:
    """Nothing was submitted yet."""
    standing = pb.RankPosition(rank=rank, submitted=-1, finished=-1)
    answer = pb.Position(
        key=query.key, generation=query.generation, instance=query.instance, query=query.query, ranks=[standing]
    )
    return pb.WorkerMessage(position=answer).SerializeToString()


_NAMES = {number: field.name for number, field in pb.CoordinatorMessage.DESCRIPTOR.fields_by_number.items()}


def kind(data: bytes) -> str:
    """Which of the coordinator's messages these bytes are: all have one field, whose number comes first."""
    tag, shift = 0, 0
    for byte in data:
        tag |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return _NAMES.get(tag >> 3, "")
