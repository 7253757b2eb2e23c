"""The gRPC side of a session, and the one place where errors of gRPC become errors of this library.

Imported at the first `connect`, for grpc takes its time to import.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

# grpc reads this while it is imported. Without it, a child that is forked beside an open session crashes now and then
# when it connects for itself (2 of 75 times with grpcio 1.85; with it, none).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")

import grpc
from google.protobuf.message import DecodeError

from collectived.arguments import escape_surrogates
from collectived.calls.buffers import Description
from collectived.calls.local_failure import classify_failure
from collectived.calls.timeout import Timeout
from collectived.connection import environment
from collectived.connection.address import SECRET_FILE, WorkerAddress
from collectived.connection.join_request import JoinRequest
from collectived.connection.rpc_thread import RpcThread, fork_lock
from collectived.errors import (
    CancelledError,
    CollectiveError,
    DeadlineExceededError,
    InternalError,
    UnauthenticatedError,
    UnavailableError,
)
from collectived.thread_stacks import describe_threads
from collectived_proto import codec
from collectived_proto.cause import Cause
from collectived_proto.deadline import Deadline
from collectived_proto.error_status import from_rpc_error
from collectived_proto.errors import CODE_BY_CAUSE, error_class
from collectived_proto.report.phrases import short_worker_names
from collectived_proto.types import Collective, GroupInfo
from collectived_proto.v1 import common_pb2, status_pb2, worker_pb2, worker_pb2_grpc
from collectived_proto.version import OUR_VERSIONS, negotiate_version

if TYPE_CHECKING:
    from collectived_proto.tls.files import TlsMaterial

PROGRESS_INTERVAL = 10.0  # seconds
_RPC_TIMEOUT = 30.0  # seconds for RPCs that a worker answers by itself
_TELL_TIMEOUT = 1.0  # seconds for messages that the worker may miss
_GRACE = 0.15  # seconds after a deadline in which the worker's own answer is still preferred; 0.25 are promised
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a session has a connection of its own
    ("grpc.max_receive_message_length", 64 << 20),  # a layout of very many leaves
    ("grpc.max_metadata_size", 64 << 10),
    # A collective without a deadline ends within the sum of these after the worker is gone or stopped.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
)


def _explain_dial_failure(address: str, tls: TlsMaterial | None) -> str:
    from collectived_proto.tls.client import diagnose_connection

    return diagnose_connection(address, tls)


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """The answer of a worker to a new session; `socket_path` is '' where it offers no shared memory.

    `gpus` are the UUIDs of its GPUs, in order of their indices; `max_open_allocations` is how many allocations of this
    process it opens at a time on each of them. `stack_token` admits a socket over which it asks what this process does.
    """

    session: bytes
    worker: str
    devices: tuple[str, ...]
    socket_path: str
    token: bytes
    gpus: tuple[str, ...] = ()
    max_open_allocations: int = 0
    stack_token: bytes = b""


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """A local rank in a complete group."""

    group: GroupInfo
    rank: int
    socket_path: str
    token: bytes
    has_segment: bool  # the ranks meet in shared memory
    may_match: bool = False  # the rank may match its messages by itself


_JOIN_TOKEN_BYTES = 16
_GIVE_UP_SECONDS = 0.09  # in which the RPC that gives up a place must end; Ctrl-C is to be over within 0.1
_T = TypeVar("_T")


class WorkerClient:
    """A connection to a worker. Thread-safe."""

    def __init__(
        self,
        address: WorkerAddress,
        credentials: grpc.ChannelCredentials | None,
        secret: str = "",
        tls: TlsMaterial | None = None,
    ) -> None:
        """`secret` is the job's, for addresses that ask for it. `tls` is spoken with where there are no credentials."""
        self.address = address
        self._explain_dial_failure: Callable[[], str] = lambda: ""
        if credentials is None:
            self._explain_dial_failure = partial(_explain_dial_failure, address.text, tls)
        if tls is not None and credentials is None:
            from collectived_proto.tls.client import channel_credentials  # late, for it imports ssl

            credentials = channel_credentials(tls)
        self._metadata = (("authorization", f"Bearer {secret}"),) if secret else ()
        target = f"unix:{address.path}" if address.path else address.text
        self._channel = (
            grpc.insecure_channel(target, _OPTIONS)
            if credentials is None
            else grpc.secure_channel(target, credentials, _OPTIONS)
        )
        fork_lock.register_at_fork()
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._session_stream: RpcThread | None = None
        self._stream_ended = False
        self._session, self._opened_by = b"", 0  # its name, and the ident of the thread that opened it
        self._worker_name = ""
        self._lock = threading.Lock()  # over the two below
        self._pending_rpcs: set[RpcThread] = set()  # those that a thread of the caller's waits for
        self._cancel_reason = ""  # why it waits no more

    @property
    def name(self) -> str:
        """For people; of a worker that has said its name, with that."""
        where = f"at {self.address.text}"
        return f"{self._worker_name} ({where})" if self._worker_name else f"the worker {where}"

    def open_session(self, limit: Timeout, local: bool = True) -> OpenedSession:
        """Opens the session. It lasts as long as this stream or, once that is attached, the session socket.

        Args:
            limit: for the worker's answer.
            local: ask for such a socket.

        Raises:
            UnavailableError: no answer in time.
            UnauthenticatedError: the worker asks for the job's secret.
            FailedPreconditionError: it speaks no version of the protocol that we speak.
            CollectiveError: the worker refuses.
        """
        request = worker_pb2.OpenSessionRequest(
            protocol=codec.versions_to_proto(OUR_VERSIONS),
            host=escape_surrogates(socket.gethostname()),
            pid=os.getpid(),
            label=environment.label(),
            job=environment.job(),
            local=local,
            visible_gpus=environment.visible_gpus(),
            stacks=True,
        )
        self._opened_by = threading.get_ident()
        self._session_stream = RpcThread(
            lambda: self._stub.OpenSession(request, metadata=self._metadata),
            self.map_error,
            intercept=self._answer_question,
        )
        try:
            event = self._session_stream.next(limit.remaining)
        except queue.Empty:
            raise UnavailableError(
                f"{self.name} ({self.address.source}) has not answered within {limit.requested_seconds:g} s; "
                f"{self._explain_dial_failure() or 'is it a worker of collectived, and not stopped?'}"
            ) from None
        except UnavailableError:
            if reason := self._explain_dial_failure():
                raise UnavailableError(f"{self.name} ({self.address.source}) cannot be used: {reason}") from None
            raise
        except UnauthenticatedError as error:
            raise UnauthenticatedError(f"{self.name}: {error}; set {SECRET_FILE} to a file that holds it") from None
        if event is None or not event.HasField("opened"):
            raise InternalError(f"{self.name} began a session with something else than its opening")
        opened = event.opened
        self._worker_name = short_worker_names(opened.worker)
        negotiate_version(codec.versions_from_proto(opened.protocol), self.name, "this client")
        devices, gpus = tuple(opened.devices), tuple(opened.gpus)
        return OpenedSession(
            opened.session,
            opened.worker,
            devices,
            opened.door,
            opened.token,
            gpus,
            opened.openings,
            opened.stack_token,
        )

    def _answer_question(self, event: worker_pb2.SessionEvent) -> bool:
        """Answer the worker's question where the threads of this process are. False: it is another event."""
        if event.HasField("opened"):
            self._session = event.opened.session
        if not event.HasField("stack_asked"):
            return False
        told = worker_pb2.StackRequest(session=self._session, stack=describe_threads(self._opened_by))
        with contextlib.suppress(grpc.RpcError, ValueError), fork_lock:  # ValueError: the channel has been closed
            self._stub.TellStack(told, timeout=_TELL_TIMEOUT, metadata=self._metadata)
        return True

    @property
    def has_stream_ended(self) -> bool:
        """Whether the stream that opened the session is over, and with it the session, unless a socket is."""
        if self._session_stream is None or self._stream_ended:
            return self._stream_ended
        try:
            self._session_stream.next(0.0)
        except queue.Empty:
            return False
        except CollectiveError:  # which is an end too
            pass
        self._stream_ended = True
        return True

    def status(self, request: status_pb2.StatusRequest, timeout: float) -> status_pb2.StatusReply:
        """Return the status of the worker and its job.

        Raises:
            CollectiveError: no answer.
        """
        reply: status_pb2.StatusReply = self._call_unary(
            lambda: self._stub.Status.future(request, timeout=timeout, metadata=self._metadata), self.map_error
        )
        return reply

    def end_stream(self) -> None:
        """The session socket is attached, and the session is it: no RPC stays open, which would slow `os.fork` down."""
        if self._session_stream is not None:
            self._session_stream.cancel()
            self._session_stream = None

    def join(
        self, session: bytes, wish: JoinRequest, say: Callable[[str], None], enter: Callable[[JoinedGroup], _T]
    ) -> _T:
        """Wait until the group is complete, and return what `enter` makes of the place in it.

        Where that fails the place is given up at once, for the others would wait for this rank.

        Args:
            say: is called every 10 s with the ranks that have come and those that have not.

        Raises:
            DeadlineExceededError: it was not complete in time.
            CollectiveError: the worker or the coordinator refuses.
        """
        request = worker_pb2.JoinRequest(
            session=session,
            name=wish.name,
            min_size=wish.size[0],
            max_size=wish.size[1],
            settle_seconds=wish.settle,
            rank=wish.rank,
            device=wish.device,
            timeout_seconds=wish.deadline.to_wire(),
            last_instance=wish.last_instance,
            idle=wish.idle,
            segment=_has_native_core(),
            token=secrets.token_bytes(_JOIN_TOKEN_BYTES),
            parent=None if wish.parent is None else worker_pb2.HeldRank(key=wish.parent[0], rank=wish.parent[1]),
        )
        refusals: list[CollectiveError] = []  # of the worker: then there is no place

        def refuse(error: Exception) -> CollectiveError:
            refused = self.map_error(error)
            if isinstance(error, grpc.RpcError):  # else it is of this process
                refusals.append(refused)
            return refused

        try:
            with self._track_rpc(lambda: self._stub.Join(request, metadata=self._metadata), refuse) as exchange:
                return enter(self._await_join(exchange, wish, say))
        except BaseException as error:
            if not any(error is refusal for refusal in refusals):  # else the answer may be on its way
                with contextlib.suppress(Exception):  # the first error counts; the session's end ends the place, too
                    self._leave(worker_pb2.LeaveRequest(session=session, join=request.token), _GIVE_UP_SECONDS)
            raise

    def _await_join(self, exchange: RpcThread, wish: JoinRequest, say: Callable[[str], None]) -> JoinedGroup:
        deadline = wish.deadline
        due = Deadline.after(PROGRESS_INTERVAL)
        progress = "the worker has not said which ranks are here"
        while True:
            try:
                event = exchange.next(min(deadline.remaining() + _GRACE, due.remaining()))
            except queue.Empty:
                if deadline.is_set and not deadline.remaining():
                    raise DeadlineExceededError(
                        f"group {wish.name!r} was not complete within {wish.timeout:g} s: {progress}"
                    ) from None
                say(f"joining group {wish.name!r}: {progress}")
                due = Deadline.after(PROGRESS_INTERVAL)
                continue
            if event is None:
                raise UnavailableError(f"{self.name} has ended a join of group {wish.name!r} without a reason")
            if event.HasField("progress"):
                progress = event.progress.text
            elif event.HasField("joined"):
                joined = event.joined
                if joined.rank >= len(joined.group.members):
                    raise InternalError(f"{self.name} gave rank {joined.rank} of {len(joined.group.members)}")
                return JoinedGroup(
                    codec.group_from_proto(joined.group),
                    joined.rank,
                    joined.door,
                    joined.token,
                    joined.segment,
                    joined.matching,
                )

    def prepare(
        self, session: bytes, key: int, rank: int, collective: Collective, deadline: Deadline | None
    ) -> Description:
        """Describe a collective to the worker.

        Raises:
            DeadlineExceededError: no answer by the collective's deadline.
            CollectiveError: the worker refuses, or is lost.
        """
        request = worker_pb2.PrepareRequest(
            session=session, key=key, rank=rank, collective=codec.collective_to_proto(collective)
        )
        limit = min(_RPC_TIMEOUT, deadline.remaining() + _GRACE) if deadline else _RPC_TIMEOUT

        def late() -> CollectiveError:
            if limit == _RPC_TIMEOUT:
                return UnavailableError(f"{self.name} has not answered within {limit:g} s; it may be stopped")
            return DeadlineExceededError(f"{self.name} has not answered; it may be stopped or overloaded")

        def map_error(error: Exception) -> CollectiveError:
            expired = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return late() if expired else self.map_error(error)

        try:
            reply = self._call_unary(
                lambda: self._stub.Prepare.future(request, timeout=limit, metadata=self._metadata), map_error, limit
            )
        except queue.Empty:  # gRPC's own clock is the slower one
            raise late() from None
        return Description(reply.id, codec.layout_from_proto(reply.layout), reply.contract, reply.terms)

    def submit(self, requests: Iterator[worker_pb2.SubmitRequest]) -> Any:
        """Begins a `Submit`; its replies. Only in threads of the library's."""
        return self._stub.Submit(requests, metadata=self._metadata)

    def cancel_receive(self, session: bytes, key: int, rank: int, generation: int, instance: int) -> None:
        """Takes a receive back, unless a message is there for it; its `Submit` says what has come of it.

        Raises:
            CollectiveError: the worker does not answer, or refuses.
        """
        request = worker_pb2.CancelRequest(
            session=session, key=key, rank=rank, generation=generation, instance=instance
        )
        self._call_unary(
            lambda: self._stub.Cancel.future(request, timeout=_RPC_TIMEOUT, metadata=self._metadata),
            self.map_error,
        )

    def abort(self, session: bytes, key: int, rank: int, reason: str, cause: Cause = Cause.UNSPECIFIED) -> RpcThread:
        """Ends a generation for all ranks; its answer comes when nothing of it runs on the worker any more."""
        request = worker_pb2.AbortRequest(session=session, key=key, rank=rank, reason=reason, cause=cause.name)
        return RpcThread(
            lambda: self._stub.Abort.future(request, timeout=_RPC_TIMEOUT, metadata=self._metadata),
            self.map_error,
            lambda future: future.result(),
        )

    def leave(self, session: bytes, key: int, rank: int, within: float) -> common_pb2.Verdict | None:
        """Says that a rank submits nothing more; a verdict that it has not been given.

        Raises:
            CollectiveError: the worker does not answer within so many seconds; the request may still reach it.
        """
        return self._leave(worker_pb2.LeaveRequest(session=session, key=key, rank=rank), within)

    def _leave(self, request: worker_pb2.LeaveRequest, within: float) -> common_pb2.Verdict | None:
        exchange = RpcThread(
            lambda: self._stub.Leave.future(request, timeout=_RPC_TIMEOUT, metadata=self._metadata),
            self.map_error,
            lambda future: future.result(),
        )
        try:
            reply = exchange.next(within)
        except queue.Empty:
            raise UnavailableError(f"{self.name} has not answered within {within:g} s; it may be stopped") from None
        return reply.unseen if reply.HasField("unseen") else None

    def map_error(self, error: Exception) -> CollectiveError:
        """Return the error to raise for an error of an RPC."""
        if self._cancel_reason:
            return CancelledError(self._cancel_reason)
        if isinstance(error, (ValueError, grpc.FutureCancelledError)):  # gRPC's words for a channel that was closed
            return CancelledError(f"the session with {self.name} was closed during a call ({error})")
        if not isinstance(error, grpc.RpcError):
            cause, text = classify_failure(error)
            return error_class(CODE_BY_CAUSE[cause])(f"{self.name} could not be called: {text}")
        try:
            return from_rpc_error(error, self.name)
        except (DecodeError, ValueError) as unreadable:  # the status, or the verdict in it
            return InternalError(f"{self.name} answered with a status that cannot be read ({unreadable}): {error}")

    def _call_unary(
        self,
        start: Callable[[], Any],
        ours: Callable[[Exception], CollectiveError],
        within: float | None = None,
    ) -> Any:
        """The one answer of a short RPC that the caller waits for.

        Raises:
            queue.Empty: it has not come within so many seconds.
        """
        with self._track_rpc(start, ours, lambda future: future.result()) as exchange:
            return exchange.next(within)

    @contextlib.contextmanager
    def _track_rpc(
        self,
        start: Callable[[], Any],
        ours: Callable[[Exception], CollectiveError],
        answer: Callable[[Any], Any] | None = None,
    ) -> Iterator[RpcThread]:
        """An RPC that the caller waits for, until the session is closed; ended with the block."""
        with self._lock:
            if self._cancel_reason:
                raise CancelledError(self._cancel_reason)
            exchange = RpcThread(start, ours, answer)
            try:
                self._pending_rpcs.add(exchange)
            except BaseException:
                exchange.cancel()
                raise
        try:
            yield exchange
        finally:
            self._pending_rpcs.discard(exchange)
            exchange.cancel()

    def cancel(self, why: str) -> None:
        """End all waits with CancelledError, because the session is being closed. Later calls raise it, too."""
        with self._lock:
            self._cancel_reason = why
            for exchange in list(self._pending_rpcs):
                exchange.fail(CancelledError(why))

    def close(self) -> None:
        """Ends the session and the connection."""
        self.end_stream()
        closing = RpcThread(self._channel.close, self.map_error, lambda closed: closed)
        with contextlib.suppress(queue.Empty):
            closing.next(_RPC_TIMEOUT)


def _has_native_core() -> bool:
    """Whether this process can carry out collectives itself."""
    try:
        from collectived_native import core  # noqa: F401
    except ImportError:
        return False
    return True
