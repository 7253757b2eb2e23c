"""The worker's gRPC shell: decode, call the room that does the work, encode. Errors leave through one table."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from collectived_proto.codec import layout_to_proto, verdict_to_proto, versions_from_proto, versions_to_proto
from collectived_proto.devices import DeviceName
from collectived_proto.errors import CollectiveError
from collectived_proto.local.wire import TOKEN_BYTES
from collectived_proto.protocol import OURS, agree
from collectived_proto.v1 import common_pb2, status_pb2, trace_pb2, worker_pb2, worker_pb2_grpc
from collectived_runtime.engine.ledger import Prepared
from collectived_runtime.guests.callers import Caller, Callers
from collectived_runtime.limits.pace import Rate
from collectived_runtime.pacing import REFUSED, Turns, caller_of
from collectived_runtime.transport.reception import Reception
from collectived_runtime.worker.descriptions import LONGEST_GROUP, check_length, keep, prepared, think
from collectived_runtime.worker.draining import Drainage
from collectived_runtime.worker.groups import Groups
from collectived_runtime.worker.grpc_alone.submit import RemoteRank, submit
from collectived_runtime.worker.sessions import Client, Session, Sessions
from collectived_runtime.worker.statuses import status_of

LONGEST_NAME = 128  # characters of a label or host that others are shown
LONGEST_GPUS = 4096  # characters of CUDA_VISIBLE_DEVICES
PREPARING = Rate(200, 2048)  # collectives that one session describes
JOINING = Rate(50, 256)  # groups that it joins


def _translated(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, with its CollectiveErrors as gRPC statuses."""
    if inspect.isasyncgenfunction(method):

        @functools.wraps(method)
        async def stream(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                async with contextlib.aclosing(method(self, request, context)) as answers:
                    async for answer in answers:
                        yield answer
            except CollectiveError as error:
                await _hold_back(self, request, context, error)
                await context.abort_with_status(status_of(error))

        return stream

    @functools.wraps(method)
    async def unary(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await method(self, request, context)
        except CollectiveError as error:
            await _hold_back(self, request, context, error)
            await context.abort_with_status(status_of(error))

    return unary


async def _hold_back(service: WorkerService, request: Any, context: Any, error: CollectiveError) -> None:
    """Whoever is refused again and again hears of it later and later; what a collective came to is no refusal."""
    if error.verdict is None:
        await service.refusing(getattr(request, "session", b""), context)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Args:
    name: `/job:worker/task:1`.
    devices: those that a caller may join on; it says which GPUs it sees itself (None: nothing).
    callers: who makes a call.
    status: answers a status request. trace: the same, in a stream.
    drainage: what is to be asked before a rank is taken.
    """

    def __init__(
        self,
        name: str,
        devices: Callable[[Caller, str | None], Sequence[DeviceName]],
        door: str,
        callers: Callers,
        sessions: Sessions,
        groups: Groups,
        reception: Reception,
        status: Callable[[status_pb2.StatusRequest], Awaitable[status_pb2.StatusReply]],
        trace: Callable[[trace_pb2.TraceRequest], AsyncIterator[trace_pb2.TraceReply]],
        drainage: Drainage,
    ) -> None:
        self._preparing, self._joining, self._failing = Turns(PREPARING), Turns(JOINING), Turns(REFUSED)
        self._name = name
        self._devices = devices
        self._door = door
        self._callers = callers
        self._sessions = sessions
        self._groups = groups
        self._reception = reception
        self._status = status
        self._trace = trace
        self._drainage = drainage

    async def refusing(self, session: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Returns when a refusal may be told."""
        await self._failing.wait(session if session in self._sessions else caller_of(context))

    @_translated
    async def OpenSession(
        self, request: worker_pb2.OpenSessionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.SessionEvent]:
        agree(versions_from_proto(request.protocol), "the client", "this worker")
        caller = self._callers.of(context)
        check_length("job", request.job, LONGEST_GROUP)
        check_length("visible_gpus", request.visible_gpus, LONGEST_GPUS)
        visible = request.visible_gpus if request.HasField("visible_gpus") else None
        devices = tuple(self._devices(caller, visible))
        local = request.local and caller.local is not None
        session = self._sessions.open(_client(request, caller), caller, devices, remote=not local)
        try:
            opened = worker_pb2.SessionOpened(
                session=session.identity,
                protocol=versions_to_proto(OURS),
                worker=self._name,
                devices=map(str, devices),
                gpus=self._sessions.gpus,
                openings=session.openings,
            )
            if local:
                opened.door = self._door
                opened.token = self._admit(session)
            yield worker_pb2.SessionEvent(opened=opened)
            await session.ended.wait()
        finally:
            if not session.attached or session.ended.is_set():
                session.end("its session ended")

    @_translated
    async def Join(
        self, request: worker_pb2.JoinRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.JoinEvent]:
        self._drainage.check()
        session = self._sessions.find(request.session)
        await self._joining.wait(request.session)
        async with contextlib.aclosing(self._groups.join(session, request)) as events:
            async for event in events:
                yield event

    @_translated
    async def Prepare(
        self, request: worker_pb2.PrepareRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.PrepareReply:
        holding = self._sessions.find(request.session).holding(request.key, request.rank)
        await self._preparing.wait(request.session)

        def describe() -> tuple[Prepared, common_pb2.Layout]:
            made = prepared(holding.lane, request.rank, request.collective)
            return made, layout_to_proto(made.layout)

        made, layout = await think(len(request.collective.leaves), describe)
        number = keep(holding.lane.seats[request.rank], made, request.collective.ByteSize())
        return worker_pb2.PrepareReply(id=number, layout=layout)

    @_translated
    async def Submit(
        self, requests: AsyncIterator[worker_pb2.SubmitRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.SubmitReply]:
        def find(header: worker_pb2.SubmitHeader) -> RemoteRank:
            return self._sessions.find(header.session).remote_rank(header.key, header.rank)

        async with contextlib.aclosing(submit(requests, find)) as replies:
            async for reply in replies:
                yield reply

    @_translated
    async def Abort(
        self, request: worker_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.AbortReply:
        rank = self._sessions.find(request.session).remote_rank(request.key, request.rank)
        await rank.remote.abort(request.reason)
        return worker_pb2.AbortReply()

    @_translated
    async def Leave(
        self, request: worker_pb2.LeaveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.LeaveReply:
        rank = self._sessions.find(request.session).remote_rank(request.key, request.rank)
        unseen = await rank.remote.leave()
        return worker_pb2.LeaveReply(unseen=verdict_to_proto(unseen) if unseen is not None else None)

    async def Status(
        self, request: status_pb2.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> status_pb2.StatusReply:
        return await self._status(request)

    @_translated
    async def Drain(
        self, request: status_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> status_pb2.DrainReply:
        try:
            return await self._drainage.asked(request)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "the coordinator refuses")
            raise AssertionError("abort raises") from error

    async def Trace(
        self, request: trace_pb2.TraceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[trace_pb2.TraceReply]:
        async for reply in self._trace(request):
            yield reply

    def _admit(self, session: Session) -> bytes:
        token = secrets.token_bytes(TOKEN_BYTES)
        loop = asyncio.get_running_loop()
        self._reception.admit(token, lambda connected: _hand_over(loop, session.attach, connected), session.uid)
        return token


def _client(request: worker_pb2.OpenSessionRequest, caller: Caller) -> Client:
    return Client(
        request.host[:LONGEST_NAME],
        caller.local.pid if caller.local is not None else request.pid,  # its own word only where nobody knows better
        request.label[:LONGEST_NAME],
        request.job or "default",
        versions_from_proto(request.protocol),
    )


def _hand_over(loop: asyncio.AbstractEventLoop, attach: Callable[[Any], None], connected: Any) -> None:
    """From the reception's thread into the event loop; a loop that has closed meanwhile takes no guests."""
    try:
        loop.call_soon_threadsafe(attach, connected)
    except RuntimeError:
        connected.close()
