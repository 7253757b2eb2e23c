"""The worker's gRPC shell: decode, call the room that does the work, encode. Errors leave through one table."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from collectived_proto.cause import RANK_FAILURES, Cause
from collectived_proto.codec import layout_to_proto, verdict_to_proto, versions_from_proto, versions_to_proto
from collectived_proto.devices import DeviceName
from collectived_proto.error_status import describe_failure
from collectived_proto.errors import CollectiveError, InvalidArgumentError
from collectived_proto.ipc.messages import TOKEN_BYTES, MalformedMessage
from collectived_proto.v1 import common_pb2, status_pb2, trace_pb2, worker_pb2, worker_pb2_grpc
from collectived_proto.version import OUR_VERSIONS, negotiate_version
from collectived_runtime.auth.callers import Caller, CallerIdentifier
from collectived_runtime.engine.submit.contracts import PreparedCollective
from collectived_runtime.grpc_server.throttling import REFUSAL_RATE, Throttle
from collectived_runtime.limits.rate_limit import Rate
from collectived_runtime.transport.connections import ConnectionServer
from collectived_runtime.worker.draining import DrainState
from collectived_runtime.worker.groups import Groups
from collectived_runtime.worker.grpc_errors import error_to_status
from collectived_runtime.worker.prepared import (
    check_length,
    check_name,
    prepare_collective,
    register_prepared,
    run_or_offload,
)
from collectived_runtime.worker.remote_ranks.submit import RemoteRank, handle_submit, skip_requests
from collectived_runtime.worker.sessions import Client, Session, Sessions

MAX_NAME_CHARS = 128  # characters of a label or host that others are shown
MAX_VISIBLE_GPUS_CHARS = 4096  # characters of CUDA_VISIBLE_DEVICES
PREPARE_RATE = Rate(200, 2048)  # collectives that one session describes
JOIN_RATE = Rate(50, 256)  # groups that it joins


def _translate_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with its CollectiveErrors as gRPC statuses."""
    if inspect.isasyncgenfunction(method):

        @functools.wraps(method)
        async def stream(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                async with contextlib.aclosing(method(self, request, context)) as answers:
                    async for answer in answers:
                        yield answer
            except CollectiveError as error:
                await _throttle_refusal(self, request, context, error)
                await context.abort_with_status(error_to_status(error))

        return stream

    @functools.wraps(method)
    async def unary(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await method(self, request, context)
        except CollectiveError as error:
            await _throttle_refusal(self, request, context, error)
            await context.abort_with_status(error_to_status(error))

    return unary


async def _throttle_refusal(service: WorkerService, request: Any, context: Any, error: CollectiveError) -> None:
    """Delay repeated refusals of a caller more and more. The verdict of a collective is no refusal."""
    if error.verdict is None:
        await service.wait_before_refusal(getattr(request, "session", b""), context)


@dataclass(frozen=True, slots=True)
class ClientAccess:
    """The callers, and the devices that they may use.

    Attributes:
        devices: those that a caller may join on; it says which GPUs it sees itself (None: nothing).
    """

    callers: CallerIdentifier
    devices: Callable[[Caller, str | None], Sequence[DeviceName]]


@dataclass(frozen=True, slots=True)
class Observation:
    """The functions that answer requests for status, and for traces."""

    status: Callable[[status_pb2.StatusRequest], Awaitable[status_pb2.StatusReply]]
    trace: Callable[[trace_pb2.TraceRequest], AsyncIterator[trace_pb2.TraceReply]]


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Serves the clients of a worker over gRPC.

    Args:
        name: `/job:worker/task:1`.
        drain_state: is asked before a rank is taken.
    """

    def __init__(
        self,
        name: str,
        access: ClientAccess,
        sessions: Sessions,
        groups: Groups,
        connection_server: ConnectionServer,
        observation: Observation,
        drain_state: DrainState,
    ) -> None:
        self._prepare_throttle, self._join_throttle, self._refusal_throttle = (
            Throttle(PREPARE_RATE),
            Throttle(JOIN_RATE),
            Throttle(REFUSAL_RATE),
        )
        self._name = name
        self._access = access
        self._sessions = sessions
        self._groups = groups
        self._connection_server = connection_server
        self._observation = observation
        self._drain_state = drain_state

    async def wait_before_refusal(self, session: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Return when a refusal may be sent."""
        known = session in self._sessions
        await self._refusal_throttle.wait(session if known else self._access.callers.get_throttle_key(context))

    @_translate_errors
    async def OpenSession(
        self, request: worker_pb2.OpenSessionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.SessionEvent]:
        negotiate_version(versions_from_proto(request.protocol), "the client", "this worker")
        caller = self._access.callers.identify(context)
        check_name("job", request.job)
        check_length("visible_gpus", request.visible_gpus, MAX_VISIBLE_GPUS_CHARS)
        visible = request.visible_gpus if request.HasField("visible_gpus") else None
        devices = tuple(self._access.devices(caller, visible))
        local = request.local and caller.unix_peer is not None
        session = self._sessions.open(_make_client(request, caller), caller, devices, remote=not local)
        try:
            opened = worker_pb2.SessionOpened(
                session=session.session_id,
                protocol=versions_to_proto(OUR_VERSIONS),
                worker=self._name,
                devices=map(str, devices),
                gpus=self._sessions.gpus,
                openings=session.max_open_allocations,
            )
            if local:
                opened.door = self._connection_server.unix_path
                opened.token = self._issue_token(session, session.attach)
                opened.stack_token = self._issue_token(session, session.stacks.attach) if request.stacks else b""
            yield worker_pb2.SessionEvent(opened=opened)
            if request.stacks and not local:
                async for _ in session.stacks.stream_questions():
                    yield worker_pb2.SessionEvent(stack_asked=worker_pb2.StackQuestion())
            await session.ended.wait()
        finally:
            if not session.has_socket or session.ended.is_set():
                session.end("its session ended")

    @_translate_errors
    async def Join(
        self, request: worker_pb2.JoinRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.JoinEvent]:
        self._drain_state.check_accepting()
        session = self._sessions.find(request.session)
        await self._join_throttle.wait(request.session)
        async with contextlib.aclosing(self._groups.join(session, request)) as events:
            async for event in events:
                yield event

    @_translate_errors
    async def Prepare(
        self, request: worker_pb2.PrepareRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.PrepareReply:
        holding = self._sessions.find(request.session).find_held_rank(request.key, request.rank)
        await self._prepare_throttle.wait(request.session)

        def describe() -> tuple[PreparedCollective, common_pb2.Layout]:
            made = prepare_collective(holding.group_loop, request.rank, request.collective)
            return made, layout_to_proto(made.layout)

        made, layout = await run_or_offload(len(request.collective.leaves), describe)
        number = register_prepared(holding.group_loop.local_ranks[request.rank], made, request.collective.ByteSize())
        return worker_pb2.PrepareReply(id=number, layout=layout, contract=made.contract, terms=made.terms)

    @_translate_errors
    async def Submit(
        self, requests: AsyncIterator[worker_pb2.SubmitRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.SubmitReply]:
        def find(header: worker_pb2.SubmitHeader) -> RemoteRank:
            return self._sessions.find(header.session).find_remote_rank(header.key, header.rank)

        try:
            async with contextlib.aclosing(handle_submit(requests, find)) as replies:
                async for reply in replies:
                    yield reply
        except CollectiveError as error:
            if error.verdict is None:
                await skip_requests(requests)
            raise

    @_translate_errors
    async def Cancel(
        self, request: worker_pb2.CancelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.CancelReply:
        rank = self._sessions.find(request.session).find_remote_rank(request.key, request.rank)
        generation = request.generation or rank.remote.sequencer.current_generation
        rank.remote.cancel((generation, request.instance))
        return worker_pb2.CancelReply()

    @_translate_errors
    async def Abort(
        self, request: worker_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.AbortReply:
        rank = self._sessions.find(request.session).find_remote_rank(request.key, request.rank)
        cause = Cause(request.cause) if int(request.cause) in map(int, RANK_FAILURES) else Cause.ABORTED
        await rank.remote.abort(request.reason, cause)
        return worker_pb2.AbortReply()

    @_translate_errors
    async def Leave(
        self, request: worker_pb2.LeaveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.LeaveReply:
        unseen = await self._groups.leave(self._sessions.find(request.session), request)
        return worker_pb2.LeaveReply(unseen=verdict_to_proto(unseen) if unseen is not None else None)

    @_translate_errors
    async def TellStack(
        self, request: worker_pb2.StackRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.StackReply:
        try:
            self._sessions.find(request.session).stacks.answer(request.stack)
        except MalformedMessage as error:
            raise InvalidArgumentError(str(error)) from None
        return worker_pb2.StackReply()

    async def Status(
        self, request: status_pb2.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> status_pb2.StatusReply:
        return await self._observation.status(request)

    @_translate_errors
    async def Drain(
        self, request: status_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> status_pb2.DrainReply:
        try:
            return await self._drain_state.handle_request(request)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), describe_failure(error))
            raise AssertionError("abort raises") from error

    async def Trace(
        self, request: trace_pb2.TraceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[trace_pb2.TraceReply]:
        async for reply in self._observation.trace(request):
            yield reply

    def _issue_token(self, session: Session, attach: Callable[[socket.socket], None]) -> bytes:
        """Return a token that admits one socket. `attach` is called with it in the event loop's thread."""
        token = secrets.token_bytes(TOKEN_BYTES)
        loop = asyncio.get_running_loop()
        self._connection_server.admit(token, lambda connected: _attach_threadsafe(loop, attach, connected), session.uid)
        return token


def _make_client(request: worker_pb2.OpenSessionRequest, caller: Caller) -> Client:
    return Client(
        request.host[:MAX_NAME_CHARS],
        caller.unix_peer.pid
        if caller.unix_peer is not None
        else request.pid,  # the client's own word only where the kernel does not say
        request.label[:MAX_NAME_CHARS],
        request.job or "default",
        versions_from_proto(request.protocol),
    )


def _attach_threadsafe(
    loop: asyncio.AbstractEventLoop, attach: Callable[[socket.socket], None], connected: socket.socket
) -> None:
    """From the connection server's thread into the event loop; a loop that has closed meanwhile takes no guests."""
    try:
        loop.call_soon_threadsafe(attach, connected)
    except RuntimeError:
        connected.close()
