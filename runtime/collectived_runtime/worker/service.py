"""The worker's gRPC shell: decode, call the room that does the work, encode. Errors leave through one table."""

from __future__ import annotations

import asyncio
import functools
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from collectived_proto.codec import collective_from_proto, layout_to_proto
from collectived_proto.errors import CollectiveError, FailedPreconditionError
from collectived_proto.local.wire import TOKEN_BYTES
from collectived_proto.status import to_status
from collectived_proto.types import PROTOCOL_HIGHEST, PROTOCOL_LOWEST, RELEASE
from collectived_proto.v1 import common_pb2, status_pb2, worker_pb2, worker_pb2_grpc
from collectived_runtime.engine.preliminary import prepare
from collectived_runtime.transport.reception import Reception
from collectived_runtime.worker.groups import Groups
from collectived_runtime.worker.sessions import Client, Session, Sessions

MAX_PREPARED = 4096  # per rank; older ones are forgotten, as clients do at half of this
LONGEST_NAME = 128  # characters of a label or host that others are shown

PROTOCOL = common_pb2.Protocol(lowest=PROTOCOL_LOWEST, highest=PROTOCOL_HIGHEST, release=RELEASE)


def _translated(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, with its CollectiveErrors as gRPC statuses."""
    if inspect.isasyncgenfunction(method):

        @functools.wraps(method)
        async def stream(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                async for answer in method(self, request, context):
                    yield answer
            except CollectiveError as error:
                await context.abort_with_status(to_status(error))

        return stream

    @functools.wraps(method)
    async def unary(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await method(self, request, context)
        except CollectiveError as error:
            await context.abort_with_status(to_status(error))

    return unary


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Args:
    name: `/job:worker/task:1`.
    status: answers a status request.
    """

    def __init__(
        self,
        name: str,
        devices: tuple[str, ...],
        door: str,
        sessions: Sessions,
        groups: Groups,
        reception: Reception,
        status: Callable[[status_pb2.StatusRequest], Awaitable[status_pb2.StatusReply]],
    ) -> None:
        self._name = name
        self._devices = devices
        self._door = door
        self._sessions = sessions
        self._groups = groups
        self._reception = reception
        self._status = status

    @_translated
    async def OpenSession(
        self, request: worker_pb2.OpenSessionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.SessionEvent]:
        _check_protocol(request.protocol)
        session = self._sessions.open(_client(request))
        try:
            opened = worker_pb2.SessionOpened(
                session=session.identity, protocol=PROTOCOL, worker=self._name, devices=self._devices
            )
            if request.local:
                opened.door = self._door
                opened.token = self._admit(session)
            yield worker_pb2.SessionEvent(opened=opened)
            await session.ended.wait()
        finally:
            if not session.attached or session.ended.is_set():
                self._sessions.close(session, "its session ended")

    @_translated
    async def Join(
        self, request: worker_pb2.JoinRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.JoinEvent]:
        async for event in self._groups.join(self._sessions.find(request.session), request):
            yield event

    @_translated
    async def Prepare(
        self, request: worker_pb2.PrepareRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.PrepareReply:
        session = self._sessions.find(request.session)
        lane, seat = self._groups.seat(session, request.key, request.rank)
        made = prepare(collective_from_proto(request.collective), request.rank, lane.topology)
        identity = secrets.randbits(63)
        while len(seat.prepared) >= MAX_PREPARED:
            del seat.prepared[next(iter(seat.prepared))]
        seat.prepared[identity] = made
        return worker_pb2.PrepareReply(id=identity, layout=layout_to_proto(made.layout))

    async def Status(
        self, request: status_pb2.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> status_pb2.StatusReply:
        return await self._status(request)

    def _admit(self, session: Session) -> bytes:
        token = secrets.token_bytes(TOKEN_BYTES)
        loop = asyncio.get_running_loop()
        self._reception.admit(token, lambda connected: _hand_over(loop, session.attach, connected))
        return token


def _client(request: worker_pb2.OpenSessionRequest) -> Client:
    return Client(request.host[:LONGEST_NAME], request.pid, request.label[:LONGEST_NAME], request.job or "default")


def _hand_over(loop: asyncio.AbstractEventLoop, attach: Callable[[Any], None], connected: Any) -> None:
    """From the reception's thread into the event loop; a loop that has closed meanwhile takes no guests."""
    try:
        loop.call_soon_threadsafe(attach, connected)
    except RuntimeError:
        connected.close()


def _check_protocol(theirs: common_pb2.Protocol) -> None:
    if theirs.lowest > PROTOCOL_HIGHEST or theirs.highest < PROTOCOL_LOWEST:
        raise FailedPreconditionError(
            f"the client (release {theirs.release}) speaks protocol {theirs.lowest} to {theirs.highest}, this worker "
            f"(release {RELEASE}) {PROTOCOL_LOWEST} to {PROTOCOL_HIGHEST}; upgrade the older of the two"
        )
