"""The messages between workers and the coordinator, from protobuf to values and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

from collectived_proto import codec, group_codec
from collectived_proto.field_codec import Codec
from collectived_proto.types import Verdict
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_proto.v1 import status_pb2
from collectived_runtime.coordinator.core import events
from collectived_runtime.coordinator.core.events import AbandonedCollective, Event, Heartbeat, JoinDone, Message

CACHE_SIZE = 4  # encoded groups, and as many verdicts

_ATTACHED_GROUP = Codec(events.AttachedGroup, pb.Attached)


class AttachedGroups:
    """The groups that a worker brings, decoded one by one: there may be thousands, of which few are kept.

    All at once they would be so many objects that Python's pools stayed larger for good.

    Attributes:
        generations: theirs.
    """

    def __init__(self, hello: pb.Hello) -> None:
        """
        Raises:
            InvalidArgumentError: one has an enumerator that this release does not know.
        """
        self._messages = hello.groups
        self.generations = frozenset(one.group.generation for one in self)

    def __iter__(self) -> Iterator[events.AttachedGroup]:
        return map(_ATTACHED_GROUP.decode, self._messages)


hello_from_proto = Codec(events.WorkerHello, pb.Hello, renamed={"versions": "protocol"}).decode
cut_to_proto = Codec(AbandonedCollective, status_pb2.Cut).encode
_JOIN_ASK = Codec(events.JoinAsk, pb.JoinAsk)


def _heartbeat_from_proto(message: pb.Heartbeat, task: int) -> Heartbeat:
    if not message.standings:  # as most are, and there are many
        return Heartbeat(task, more=message.more)
    moved = tuple((one.generation, codec.positions_from_proto(one.ranks)) for one in message.standings)
    return Heartbeat(task, moved, message.more)


def _drained_from_proto(message: pb.Drained, task: int) -> events.WorkerDrained:
    drained = _DRAINED.decode(message, task)
    told = tuple(replace(cut, worker=task, group="") for cut in drained.abandoned)  # known already
    return replace(drained, abandoned=told)


_DRAINED = Codec(events.WorkerDrained, pb.Drained, given=1, renamed={"request": "drain", "abandoned": "cut"})
_EVENTS: dict[str, Callable[[Any, int], Event]] = {
    "heartbeat": _heartbeat_from_proto,
    "join": lambda message, task: events.JoinAsked(task, _JOIN_ASK.decode(message)),
    "join_cancel": Codec(events.JoinCancelled, pb.JoinCancel, given=1).decode,
    "report": lambda message, task: events.FaultReported(task, codec.report_from_proto(message)),
    "position": Codec(events.QueryAnswered, pb.Position, given=1, renamed={"positions": "ranks"}).decode,
    "measured": Codec(events.LinkMeasured, pb.Measured, given=1).decode,
    "promised": Codec(events.Promised, pb.Promised, given=1).decode,
    "drained": _drained_from_proto,
}  # by the name of the field that has it


def event_from_proto(task: int, message: pb.WorkerMessage) -> Event | None:
    """The event of the core for a worker's message; None for one that concerns the shell alone, or is not known."""
    name = message.WhichOneof("message")
    return _EVENTS[name](getattr(message, name), task) if name in _EVENTS else None


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


_MESSAGES: dict[type[Message], tuple[str, Codec[Any, Any]]] = {
    events.Welcome: ("welcome", Codec(events.Welcome, pb.Welcome, renamed={"versions": "protocol"})),
    events.JoinUpdate: ("join_update", Codec(events.JoinUpdate, pb.JoinUpdate)),
    events.JoinRefused: ("join_refused", Codec(events.JoinRefused, pb.JoinRefused)),
    events.PositionQuery: ("query", Codec(events.PositionQuery, pb.Query)),
    events.MeasureLink: ("measure", Codec(events.MeasureLink, pb.Measure)),
    events.Propose: ("propose", Codec(events.Propose, pb.Propose)),
    events.WaitingCount: ("newcomers", Codec(events.WaitingCount, pb.Newcomers)),
    events.DrainOrder: ("drain", Codec(events.DrainOrder, pb.DrainOrder, renamed={"request": "drain"})),
}


class Encoder:
    """Messages to protobuf. A message to many workers, a verdict or a group, is encoded once."""

    def __init__(self) -> None:
        self._verdicts: _Recent[pb.CoordinatorMessage] = _Recent()
        self._groups: _Recent[bytes] = _Recent()

    def encode(self, message: Message) -> pb.CoordinatorMessage:
        match message:
            case JoinDone(request, group, rank, peers, table, idle):
                same = (group, peers, table, idle)  # for all ranks
                formed = self._groups.get(lambda: group_codec.formed_to_bytes(*same), *same)
                return pb.CoordinatorMessage(join_done=pb.JoinDone(request=request, rank=rank, formed=formed))
            case Verdict():
                return self._verdicts.get(lambda: _encode_verdict(message), message)
        name, fields = _MESSAGES[type(message)]
        return pb.CoordinatorMessage(**{name: fields.encode(message)})


def _encode_verdict(verdict: Verdict) -> pb.CoordinatorMessage:
    return pb.CoordinatorMessage(verdict=group_codec.compact_verdict_to_proto(verdict))
