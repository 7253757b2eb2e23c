"""What workers and the coordinator say to each other, from protobuf to values and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from collectived_proto import codec, group_codec
from collectived_proto.types import Verdict
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_proto.v1 import status_pb2
from collectived_proto.version import OUR_VERSIONS
from collectived_runtime.coordinator.core.events import (
    AbandonedCollective,
    AttachedGroup,
    DrainOrder,
    Event,
    FaultReported,
    Heartbeat,
    JoinAsk,
    JoinAsked,
    JoinCancelled,
    JoinDone,
    JoinRefused,
    JoinUpdate,
    LinkMeasured,
    MeasureLink,
    Message,
    PositionQuery,
    Promised,
    Propose,
    QueryAnswered,
    WaitingCount,
    Welcome,
    WorkerDrained,
    WorkerHello,
)

CACHE_SIZE = 4  # encoded groups, and as many verdicts


def hello_from_proto(message: pb.Hello) -> WorkerHello:
    return WorkerHello(
        message.task,
        message.incarnation,
        message.host,
        message.pid,
        tuple(message.devices),
        message.address,
        message.link_address,
        message.highest_epoch,
        tuple(
            AttachedGroup(
                codec.group_from_proto(item.group),
                tuple(item.ranks),
                tuple(codec.verdict_from_proto(verdict) for verdict in item.verdicts),
                item.idle,
            )
            for item in message.groups
        ),
        message.draining,
        codec.versions_from_proto(message.protocol),
        message.link_secret,
        message.nccl,
    )


def event_from_proto(task: int, message: pb.WorkerMessage) -> Event | None:
    """What a worker's message means to the mind; None for those that concern the shell alone, or are not known."""
    match message.WhichOneof("message"):
        case "heartbeat":
            return _heartbeat_from_proto(task, message.heartbeat)
        case "join":
            return JoinAsked(task, _join_from_proto(message.join))
        case "join_cancel":
            return JoinCancelled(task, message.join_cancel.request, message.join_cancel.reason)
        case "report":
            return FaultReported(task, codec.report_from_proto(message.report))
        case "position":
            return QueryAnswered(task, message.position.query, codec.positions_from_proto(message.position.ranks))
        case "measured":
            told = message.measured
            link = (told.peer, told.latency_seconds, told.bytes_per_second)
            return LinkMeasured(task, told.generation, *link, told.text)
        case "promised":
            return Promised(task, *_promise_from_proto(message.promised))
        case "drained":
            told_cut = tuple(cut_from_proto(cut, task) for cut in message.drained.cut)
            return WorkerDrained(task, message.drained.drain, told_cut)
        case _:
            return None


def _promise_from_proto(message: pb.Promised) -> tuple[int, int, int]:
    return message.proposal, message.from_instance, message.next_instance


def cut_from_proto(cut: status_pb2.Cut, task: int) -> AbandonedCollective:
    return AbandonedCollective(cut.generation, cut.instance, cut.op, cut.site, task, tuple(cut.missing))


def cut_to_proto(cut: AbandonedCollective) -> status_pb2.Cut:
    return status_pb2.Cut(
        group=cut.group,
        generation=cut.generation,
        instance=cut.instance,
        op=cut.op,
        site=cut.site,
        worker=cut.worker,
        missing=cut.missing,
    )


def _heartbeat_from_proto(task: int, message: pb.Heartbeat) -> Heartbeat:
    if not message.standings:  # as most are, and there are many
        return Heartbeat(task, more=message.more)
    moved = tuple((one.generation, codec.positions_from_proto(one.ranks)) for one in message.standings)
    return Heartbeat(task, moved, message.more)


def _join_from_proto(message: pb.JoinAsk) -> JoinAsk:
    return JoinAsk(
        message.request,
        message.name,
        message.min_size,
        message.max_size,
        message.settle_seconds,
        message.rank if message.HasField("rank") else None,
        message.device,
        message.host,
        message.pid,
        message.label,
        message.last_instance if message.HasField("last_instance") else -1,
        message.idle,
    )


_Made = TypeVar("_Made")


class _Recent(Generic[_Made]):
    """The last few of what was made of large values, found by their identity: to compare these costs too much."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], tuple[tuple[object, ...], _Made]] = {}

    def get(self, make: Callable[[], _Made], *sources: object) -> _Made:
        identity = tuple(map(id, sources))
        if identity not in self._made:
            if len(self._made) == CACHE_SIZE:
                del self._made[next(iter(self._made))]
            self._made[identity] = (sources, make())  # they are kept, so that nothing else gets their identity
        return self._made[identity][1]


class Encoder:
    """Messages to protobuf. What goes to many workers, a verdict or a group, is encoded once."""

    def __init__(self) -> None:
        self._verdicts: _Recent[pb.CoordinatorMessage] = _Recent()
        self._groups: _Recent[bytes] = _Recent()

    def encode(self, message: Message) -> pb.CoordinatorMessage:
        match message:
            case Welcome(epoch, heartbeat, stall, link_secret):
                welcome = pb.Welcome(
                    epoch=epoch,
                    heartbeat_seconds=heartbeat,
                    stall_seconds=stall,
                    protocol=codec.versions_to_proto(OUR_VERSIONS),
                    link_secret=link_secret,
                )
                return pb.CoordinatorMessage(welcome=welcome)
            case JoinUpdate(request, present, expected, text):
                update = pb.JoinUpdate(request=request, present=present, expected=expected, text=text)
                return pb.CoordinatorMessage(join_update=update)
            case JoinDone(request, group, rank, peers, table, idle):
                same = (group, peers, table, idle)  # for all ranks
                formed = self._groups.get(lambda: group_codec.formed_to_bytes(*same), *same)
                return pb.CoordinatorMessage(join_done=pb.JoinDone(request=request, rank=rank, formed=formed))
            case JoinRefused(request, code, text):
                return pb.CoordinatorMessage(join_refused=pb.JoinRefused(request=request, code=code, message=text))
            case PositionQuery(key, generation, instance, query):
                asked = pb.Query(key=key, generation=generation, instance=instance, query=query)
                return pb.CoordinatorMessage(query=asked)
            case MeasureLink(generation, peer, address):
                wanted = pb.Measure(generation=generation, peer=peer, link_address=address)
                return pb.CoordinatorMessage(measure=wanted)
            case Propose(key, generation, proposal):
                wish = pb.Propose(key=key, generation=generation, proposal=proposal)
                return pb.CoordinatorMessage(propose=wish)
            case WaitingCount(key, generation, proposal, from_instance, waiting):
                told = pb.Newcomers(
                    key=key, generation=generation, proposal=proposal, from_instance=from_instance, waiting=waiting
                )
                return pb.CoordinatorMessage(newcomers=told)
            case DrainOrder(request, timeout, generations, leave, stay):
                order = pb.DrainOrder(
                    drain=request, timeout_seconds=timeout, generations=generations, leave=leave, stay=stay
                )
                return pb.CoordinatorMessage(drain=order)
            case Verdict():
                return self._verdicts.get(lambda: _encode_verdict(message), message)


def _encode_verdict(verdict: Verdict) -> pb.CoordinatorMessage:
    return pb.CoordinatorMessage(verdict=group_codec.compact_verdict_to_proto(verdict))
