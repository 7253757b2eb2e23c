"""Joins under way: what clients of this worker ask of the coordinator, and its answers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

from collectived_proto.devices import DeviceName
from collectived_proto.errors import (
    Code,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    error_class,
    error_from_verdict,
)
from collectived_proto.types import Verdict
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_proto.v1 import worker_pb2
from collectived_runtime.auth.acl import AclRule, is_permitted
from collectived_runtime.worker.grpc_errors import complete_verdict
from collectived_runtime.worker.prepared import check_name
from collectived_runtime.worker.sessions import HeldRank, Session, disconnect_rank

AWAY_NOTICE_SECONDS = 2.0  # after which a joining client gets a notice that the coordinator is away, if it is
PARENT_LOOK_SECONDS = 0.1  # between two looks whether a group that is split has failed
COORDINATOR_AWAY = "the coordinator cannot be reached; the join waits for it"

JoinAnswer = worker_pb2.JoinEvent | pb.JoinRefused


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where the clients of a worker are: on which host, and on which of its devices."""

    task: int
    host: str
    devices: tuple[DeviceName, ...]

    @property
    def name(self) -> str:
        return f"/job:worker/task:{self.task}"


@dataclass(slots=True)
class ClientJoin:
    """One of them.

    Attributes:
        takes_segment: its client can carry out collectives itself.
        token: by which its client gives it up; empty: not at all.
        parent: of a part of a group that is split: its client's rank in that.
    """

    request: pb.JoinAsk
    session: Session
    takes_segment: bool
    token: bytes = b""
    parent: HeldRank | None = None
    answers: asyncio.Queue[JoinAnswer] = field(default_factory=asyncio.Queue)


class ClientJoins:
    """All of one worker, in its event loop.

    Args:
        send: sends a message to the coordinator.
        is_connected: whether the coordinator can be reached.

    Attributes:
        outcomes: how many have ended, by outcome.
    """

    def __init__(self, send: Callable[[pb.WorkerMessage], None], is_connected: Callable[[], bool]) -> None:
        self._send = send
        self._is_connected = is_connected
        self._joins: dict[str, ClientJoin] = {}  # by their names with the coordinator
        self.outcomes: Counter[str] = Counter()

    async def wait(self, join: ClientJoin) -> AsyncGenerator[worker_pb2.JoinEvent]:
        """Ask the coordinator; progress, then Joined.

        Raises:
            CollectiveError: the coordinator refuses, or the session has ended.
        """
        outcome = "withdrawn"
        self._joins[join.request.request] = join
        self._send(pb.WorkerMessage(join=join.request))
        ended = asyncio.ensure_future(join.session.ended.wait())
        answer: asyncio.Future[JoinAnswer] = asyncio.get_running_loop().create_future()
        interval = AWAY_NOTICE_SECONDS if join.parent is None else PARENT_LOOK_SECONDS
        heard_at = monotonic()
        try:
            while True:
                answer = asyncio.ensure_future(join.answers.get())
                try:
                    await asyncio.wait({answer, ended}, timeout=interval, return_when=asyncio.FIRST_COMPLETED)
                    is_silent = not answer.done() and not ended.done() and not self._is_connected()
                    if is_silent and monotonic() - heard_at > AWAY_NOTICE_SECONDS - PARENT_LOOK_SECONDS:
                        heard_at = monotonic()
                        yield worker_pb2.JoinEvent(progress=worker_pb2.JoinProgress(text=COORDINATOR_AWAY))
                finally:
                    answer.cancel()  # which changes nothing where it is there
                if not answer.done() and not ended.done():
                    if (fault := _find_parent_fault(join)) is not None:
                        outcome = "refused"
                        raise error_from_verdict(fault)
                    continue
                if answer.cancelled() or not answer.done():
                    raise join.session.ended_error
                event, heard_at = answer.result(), monotonic()
                if isinstance(event, pb.JoinRefused):
                    outcome = "withdrawn" if event.code == Code.CANCELLED else "refused"
                    raise error_class(event.code)(event.message)
                if event.HasField("joined"):
                    outcome = "granted"  # its client may hang up as soon as it has the answer
                yield event
                if event.HasField("joined"):
                    return
        finally:
            ended.cancel()
            self.outcomes[outcome] += 1
            if self.take(join.request.request) is not None:
                self._cancel(join)
            elif outcome == "withdrawn":
                _give_place_up(join, answer)

    def answer(self, request: str, answer: JoinAnswer) -> None:
        """Give one an answer; one that is not known any more is ignored."""
        if (join := self._joins.get(request)) is not None:
            join.answers.put_nowait(answer)

    def take(self, request: str) -> ClientJoin | None:
        """One that waits no more; None where it is not known any more."""
        return self._joins.pop(request, None)

    def withdraw(self, session: Session, token: bytes) -> None:
        """Give the joins of that token up."""
        for name, join in [one for one in self._joins.items() if one[1].session is session and one[1].token == token]:
            del self._joins[name]
            self._cancel(join)
            join.answers.put_nowait(pb.JoinRefused(code=Code.CANCELLED, message="its client has given this join up"))

    def _cancel(self, join: ClientJoin) -> None:
        cancel = pb.JoinCancel(request=join.request.request, reason="the client has withdrawn")
        self._send(pb.WorkerMessage(join_cancel=cancel))

    def resend(self) -> None:
        """The coordinator may have forgotten them; it knows by their names those that it has not."""
        for join in self._joins.values():
            self._send(pb.WorkerMessage(join=join.request))


def _find_parent_fault(join: ClientJoin) -> Verdict | None:
    """The verdict that has ended the group that is split: the ranks that this client waits for may have gone."""
    if join.parent is None:
        return None
    group_loop = join.parent.group_loop
    fault = group_loop.tracker.fault
    if fault is None or fault.successor:
        return None
    return complete_verdict(fault, replace(group_loop.topology.group, name=group_loop.name))


def _give_place_up(join: ClientJoin, latest: asyncio.Future[JoinAnswer]) -> None:
    """Its client has hung up; it may have been given its place in that moment, and does not know."""
    unheard = [latest.result()] if latest.done() and not latest.cancelled() else []
    while not join.answers.empty():
        unheard.append(join.answers.get_nowait())
    for event in unheard:
        if isinstance(event, worker_pb2.JoinEvent) and event.HasField("joined"):
            with contextlib.suppress(NotFoundError):  # it has left since
                held = join.session.find_held_rank(event.joined.group.key, event.joined.rank)
                disconnect_rank(held, "its client hung up while it joined")


def make_join_ask(
    session: Session, request: worker_pb2.JoinRequest, place: WorkerPlace, rules: Sequence[AclRule]
) -> pb.JoinAsk:
    """Make the request to the coordinator for a client.

    Raises:
        CollectiveError: the request is wrong, or it is not for this session.
    """
    if not request.name:
        raise InvalidArgumentError("a group needs a name")
    check_name("the name of a group", request.name)
    check_name("device", request.device)
    if not 1 <= request.min_size <= request.max_size:
        raise InvalidArgumentError(
            f"a group's size must be at least 1 and its minimum at most its maximum, "
            f"got {request.min_size} to {request.max_size}"
        )
    client = session.client
    scoped = request.name if request.name.startswith("/") else f"{client.job}/{request.name}"
    if not is_permitted(rules, scoped, session.caller):
        raise PermissionDeniedError(
            f"a rule of this worker (`group_rules`) restricts group {request.name!r}, and does not name you: "
            "ask the worker's administrator, or choose another name"
        )
    ask = pb.JoinAsk(
        request=f"{place.task}-{secrets.token_hex(8)}",
        name=scoped,
        min_size=request.min_size,
        max_size=request.max_size,
        settle_seconds=request.settle_seconds,
        device=str(_choose_device(session, request.device, place)),
        host=place.host,
        pid=client.pid,
        label=client.label,
        idle=request.idle,
    )
    if request.HasField("rank"):
        ask.rank = request.rank
    if request.HasField("last_instance"):
        ask.last_instance = request.last_instance
    return ask


def _choose_device(session: Session, text: str, place: WorkerPlace) -> DeviceName:
    """The device that is asked for, of those that the session may have; without one the first."""
    if not text:
        if not session.devices:
            raise PermissionDeniedError(
                "the rules of this worker (`device_rules`) give you no device: ask its administrator"
            )
        return session.devices[0]
    try:
        device = DeviceName.parse(text, place.task)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    if device not in session.devices:
        offered = ", ".join(known.short for known in session.devices) or "none"
        elsewhere = " for this session" if device in place.devices else ""
        raise NotFoundError(f"{text!r} is not a device of worker {place.task}{elsewhere}, which has {offered}")
    return device
