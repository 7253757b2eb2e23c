"""Membership: this worker's stream to the coordinator, kept up as long as the worker lives.

When the coordinator cannot be reached, running groups go on, what is to be said waits, and the stream is made again
with growing pauses. Everything runs in the worker's event loop, except `send`.

A worker that was given no number asks its coordinator for one, before it attaches.

The heartbeats of a worker show that it lives, and the positions of its ranks, as far as these have changed.

A lost worker cannot be asked any more: the last positions of its ranks are then known from here. Group loops are read
without locks, as for status.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from collectived_proto.codec import versions_from_proto
from collectived_proto.error_status import describe_failure
from collectived_proto.errors import FailedPreconditionError, UnavailableError
from collectived_proto.tls.files import TlsFiles
from collectived_proto.v1 import coordinator_pb2, coordinator_pb2_grpc, status_pb2, trace_pb2
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_proto.v1 import coordinator_pb2_grpc as rpc
from collectived_proto.version import negotiate_version
from collectived_runtime.auth.certificates import Certificates
from collectived_runtime.clock_sync import ClockEstimator
from collectived_runtime.engine.submit.tracker import InstanceTracker
from collectived_runtime.grpc_server.authentication import client_metadata
from collectived_runtime.process import CHANNEL_OPTIONS

log = logging.getLogger("collectived.worker")

INITIAL_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 1.0
# gRPC's own pauses between attempts to connect grow to two minutes, longer than a coordinator that came back waits.
RECONNECT_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),  # a proxy of the site's is for the world outside
)
AWAY_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,  # gRPC's code here where a stream ends during a write: the next stream shows why
)
UNREACHED_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
)
AWAY_WARNING_SECONDS = 2.0  # a coordinator that its supervisor starts again is back before
_AWAY = "it is away"
TRACE_PART_SECONDS = 2.0  # for the next part of a trace: the coordinator waits 1.5 s for each of a worker
FLUSH_POLL_SECONDS = 0.002  # between looks whether what was to be said has been
MAX_QUEUED_MESSAGES = 10_000  # kept while the coordinator is away; older ones are dropped first


@dataclass(frozen=True, slots=True)
class CoordinatorEndpoint:
    """Where the coordinator is, and how it is called.

    Attributes:
        address: `unix:/path` or `host:port`.
        secret: the job's; '' where there is none.
        tls: used over TCP; by default calls are in plain text.
    """

    address: str
    secret: str = ""
    tls: Certificates = field(default_factory=lambda: Certificates(TlsFiles()))


class CoordinatorClient:
    """Args:
    hello: makes the first message of each stream.
    heard: called with each message of the coordinator.
    rejoin: called after each Welcome, to send messages again that may have been lost.
    ledgers: of the generations that run here; heartbeats report the positions of their ranks.
    look: called before each heartbeat, so that its data are current.
    away: called when the coordinator cannot be reached any more, until `rejoin`.

    Attributes:
        welcome_count: how often the coordinator has welcomed this worker. heartbeat_count: heartbeats sent.
        link_secret: that a coordinator has given for links, where the job has no secret; '' before.
        heartbeat_seconds: between heartbeats, as the coordinator wants them.
    """

    def __init__(
        self,
        endpoint: CoordinatorEndpoint,
        hello: Callable[[int], pb.Hello],
        heard: Callable[[pb.CoordinatorMessage], None],
        rejoin: Callable[[], None],
        ledgers: Callable[[], Iterable[InstanceTracker]] = tuple,
        away: Callable[[], None] = lambda: None,
        look: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.address = endpoint.address
        self._tls = endpoint.tls
        self.epoch = 0
        self.stall_seconds = 1.0
        self.connected = asyncio.Event()
        self._metadata = client_metadata(endpoint.address, endpoint.secret)
        self._open_channel()
        self._make_hello = hello
        self._on_message = heard
        self._on_welcomed = rejoin
        self._list_trackers = ledgers
        self._on_away = away
        self._look = look
        self.link_secret = ""
        self.welcome_count = 0
        self.heartbeat_count = 0
        self._progress_deltas = ProgressDeltas()
        self.heartbeat_seconds = 5.0
        self._clock_estimator = ClockEstimator()
        self._queue: deque[pb.WorkerMessage] = deque(maxlen=MAX_QUEUED_MESSAGES)
        self._wakeup = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._stream_count = 0  # that were tried
        self._closing = False
        self._was_welcomed = False
        self._away_since = 0.0
        self._warned = ""
        self._exhausted = ""  # why it has no room for this worker, at the last attempt
        self._task = asyncio.create_task(self._run())

    @property
    def finished(self) -> asyncio.Future[None]:
        """Done when the stream is kept up no longer: after `close`, or by a defect, which is its exception."""
        return self._task

    async def wait_until_welcomed(self, timeout: float) -> None:
        """Wait until the coordinator has welcomed this worker.

        Raises:
            UnavailableError: it has not within `timeout` seconds, or has refused.
            FailedPreconditionError: it speaks no version of the protocol that we speak.
        """
        waiter = asyncio.ensure_future(self.connected.wait())
        done, _ = await asyncio.wait({waiter, self._task}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if self._task in done:
            await self._task
        if not self.connected.is_set():
            raise UnavailableError(
                f"the coordinator at {self.address} refused this worker for {timeout:g} s: {self._exhausted}"
                if self._exhausted
                else f"the coordinator at {self.address} did not answer within {timeout:g} s; "
                "is it running, and is this its address?"
            )

    def send(self, message: pb.WorkerMessage) -> None:
        """Send a message now or when the coordinator is back; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: the worker is ending
            self._loop.call_soon_threadsafe(self._enqueue, message)

    def _enqueue(self, message: pb.WorkerMessage) -> None:
        self._queue.append(message)
        self._wakeup.set()

    @property
    def _usable_stub(self) -> rpc.CoordinatorStub:
        """Raises grpc.aio.AioRpcError where this worker is ending: its channel may be closed by now."""
        if self._closing:
            raise _make_rpc_error(grpc.StatusCode.UNAVAILABLE, "this worker is ending")
        return self._stub

    async def request_status(self, request: status_pb2.StatusRequest, timeout: float) -> status_pb2.StatusReply:
        """Ask the coordinator; raises grpc.aio.AioRpcError where it does not answer."""
        call: Awaitable[status_pb2.StatusReply] = self._usable_stub.Status(
            request, timeout=timeout, metadata=self._metadata
        )
        return await call

    async def request_drain(self, request: status_pb2.DrainRequest, timeout: float) -> status_pb2.DrainReply:
        """Ask the coordinator to see to a drain; raises grpc.aio.AioRpcError where it does not."""
        call: Awaitable[status_pb2.DrainReply] = self._usable_stub.Drain(
            request, timeout=timeout, metadata=self._metadata
        )
        return await call

    async def request_trace(
        self, request: trace_pb2.TraceRequest, patience: float
    ) -> AsyncIterator[trace_pb2.TraceReply]:
        """Ask the coordinator; raises grpc.aio.AioRpcError where it does not begin to answer within `patience`
        seconds, or stops amid its answer."""
        call = self._usable_stub.Trace(request, metadata=self._metadata)
        try:
            reply = await asyncio.wait_for(call.read(), patience)
            patience = TRACE_PART_SECONDS
            while reply is not grpc.aio.EOF:
                yield reply
                reply = await asyncio.wait_for(call.read(), patience)
        except TimeoutError:
            raise make_timeout_error(f"not within {patience:g} s") from None
        finally:
            call.cancel()

    async def flush(self) -> bool:
        """Wait until all queued messages have been sent; False where the coordinator is away."""
        while self._queue and self.connected.is_set():
            await asyncio.sleep(FLUSH_POLL_SECONDS)
        return self.connected.is_set()

    async def close(self, why: str = "") -> None:
        """Say goodbye, so that the coordinator does not look for this worker; `why` is for people."""
        self._closing = True
        if self.connected.is_set():
            self._enqueue(pb.WorkerMessage(goodbye=pb.Goodbye(why=why)))
        await asyncio.wait({self._task}, timeout=1.0)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    def _open_channel(self) -> None:
        self._certificates = self._tls.load_current()
        self._channel = self._tls.channel(self.address, (*CHANNEL_OPTIONS, *RECONNECT_OPTIONS))
        self._stub = rpc.CoordinatorStub(self._channel)

    async def _check_tls(self, error: grpc.aio.AioRpcError) -> None:
        """Raise UnavailableError where a worker that was never welcomed need not try again: waiting mends nothing."""
        if self._was_welcomed or error.code() is not grpc.StatusCode.UNAVAILABLE:
            return
        if reason := await self._tls.explain_failure(self.address):
            raise UnavailableError(f"the coordinator at {self.address} cannot be used: {reason}") from error

    async def _reopen_channel_if_changed(self) -> None:
        """A channel keeps the certificates that it was made with."""
        if self._tls.load_current() is not self._certificates:
            former = self._channel
            self._open_channel()
            await former.close()

    async def _run(self) -> None:
        pause = INITIAL_BACKOFF_SECONDS
        while not self._closing:
            await self._reopen_channel_if_changed()
            try:
                await self._run_stream()
            except grpc.aio.AioRpcError as error:
                if error.code() not in AWAY_CODES and not self._was_welcomed:
                    refused = f"the coordinator at {self.address} refuses this worker: {describe_failure(error)}"
                    apart = error.code() is grpc.StatusCode.FAILED_PRECONDITION
                    raise (FailedPreconditionError if apart else UnavailableError)(refused) from error
                await self._check_tls(error)
                self._exhausted = (error.details() or "") if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else ""
                if error.code() in UNREACHED_CODES:
                    self._note_away(f"{error.code().name}: {describe_failure(error)}")
                else:
                    self._warn(f"{error.code().name}: {describe_failure(error)}")
            except FailedPreconditionError as error:
                if not self._was_welcomed:
                    raise
                self._warn(str(error))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                self._note_away("messages to it could not be sent")  # which is how gRPC shows that here
            pause = INITIAL_BACKOFF_SECONDS if self.connected.is_set() else min(2 * pause, MAX_BACKOFF_SECONDS)
            if self.connected.is_set():
                self.connected.clear()
                self._on_away()
            if not self._closing:
                await asyncio.sleep(pause)

    def _note_away(self, details: str) -> None:
        """The coordinator cannot be reached: worth a warning, once, where it is not started again soon."""
        now = time.monotonic()
        if self.connected.is_set():
            self._away_since, self._warned = now, ""
        seconds = now - self._away_since
        is_news = self._was_welcomed and seconds >= AWAY_WARNING_SECONDS and self._warned != _AWAY
        if is_news:
            self._warned = _AWAY
            text = "running groups go on, joins wait for it"
            log.warning("the coordinator at %s has been away for %.0f s: %s", self.address, seconds, text)
        log.log(logging.INFO if is_news else logging.DEBUG, "no stream to %s: %s", self.address, details)

    def _warn(self, reason: str) -> None:
        """Once for each reason: the coordinator will not have this worker back (yet)."""
        if self.connected.is_set() or reason != self._warned:
            level = logging.WARNING if self._was_welcomed else logging.DEBUG
            log.log(level, "the coordinator at %s is away: %s", self.address, reason)
        self._warned = reason

    async def _run_stream(self) -> None:
        self._stream_count += 1
        call = self._stub.Attach(self._send_stream(self._stream_count), metadata=self._metadata)
        async for message in call:
            if message.HasField("welcome"):
                theirs = versions_from_proto(message.welcome.protocol)
                negotiate_version(theirs, f"the coordinator at {self.address}", "this worker")
                self._on_welcome(message.welcome)
            elif message.HasField("echo"):
                self._clock_estimator.on_echo(message.echo.sent_at, message.echo.at, time.monotonic())
            else:
                self._handle_message(message)

    def _handle_message(self, message: pb.CoordinatorMessage) -> None:
        """Handle one message. Its errors are logged, so that later messages are read.

        The groups of a worker that reads none would wait for verdicts that never come.
        """
        try:
            self._on_message(message)
        except Exception:
            kind = message.WhichOneof("message")
            log.exception("a defect of collectived: a message of kind %s from the coordinator has had no effect", kind)

    def _on_welcome(self, welcome: pb.Welcome) -> None:
        self.welcome_count += 1
        self.epoch = max(self.epoch, welcome.epoch)
        self.heartbeat_seconds = welcome.heartbeat_seconds
        self.stall_seconds = welcome.stall_seconds
        self.link_secret = welcome.link_secret or self.link_secret
        self._was_welcomed = True
        self._progress_deltas.reset()
        self._clock_estimator.forget()
        self.connected.set()
        self._on_welcomed()
        self._wakeup.set()

    async def _send_stream(self, stream: int) -> AsyncIterator[pb.WorkerMessage]:
        """The messages of this stream. Errors are logged, for gRPC cancels the stream and does not report them."""
        try:
            async for message in self._generate_messages(stream):
                yield message
        except Exception:
            log.exception("a defect of collectived: nothing more can be said on this stream to the coordinator")
            raise

    async def _generate_messages(self, stream: int) -> AsyncIterator[pb.WorkerMessage]:
        """The messages of this stream, until it is over.

        gRPC does not end its iterator with the stream, so the iterator checks that itself: messages taken for a stream
        that is over would be lost.
        """
        yield pb.WorkerMessage(hello=self._make_hello(self.epoch))
        beaten = time.monotonic()
        while stream == self._stream_count:
            if self.connected.is_set():
                while self._queue and stream == self._stream_count:
                    message = self._queue.popleft()
                    yield message
                    if message.HasField("goodbye"):
                        return
            try:
                # A heartbeat is due beside other messages: it alone reports ranks with which nothing is wrong.
                await asyncio.wait_for(
                    self._wakeup.wait(), max(0.0, beaten + self.heartbeat_seconds - time.monotonic())
                )
            except TimeoutError:
                if self._look is not None:
                    await self._look()
                if stream != self._stream_count:
                    return
                beaten = time.monotonic()
                self.heartbeat_count += 1
                yield pb.WorkerMessage(heartbeat=self._make_heartbeat(beaten))
            if stream == self._stream_count:
                self._wakeup.clear()

    def _make_heartbeat(self, now: float) -> pb.Heartbeat:
        beat = self._progress_deltas.next_heartbeat(self._list_trackers(), now)
        beat.sent_at = self._clock_estimator.on_heartbeat(now)
        if (found := self._clock_estimator.best_offset(now)) is not None:
            # The offset from this clock to the coordinator's is the reverse of the measured one.
            beat.clock.offset_seconds, beat.clock.error_seconds = -found.seconds, found.error(now)
            beat.clock.round_trip_seconds = found.round_trip
        return beat


def make_timeout_error(why: str) -> grpc.aio.AioRpcError:
    """Return the error that gRPC itself raises where no answer comes."""
    return _make_rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, why)


def _make_rpc_error(code: grpc.StatusCode, why: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details=why)


async def enlist(coordinator: CoordinatorEndpoint, host: str, patience: float) -> int:
    """The number of this host's worker, by the coordinator, for which it looks so many seconds.

    Raises:
        UnavailableError: it did not answer, or refused.
    """
    address, tls = coordinator.address, coordinator.tls
    if reason := await tls.explain_failure(address):
        raise UnavailableError(f"the coordinator at {address} cannot be used: {reason}")
    until = time.monotonic() + (patience or math.inf)
    async with tls.channel(address, (*CHANNEL_OPTIONS, *RECONNECT_OPTIONS)) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        while True:
            try:
                reply = await stub.Enlist(
                    coordinator_pb2.EnlistRequest(host=host),
                    timeout=max(0.1, until - time.monotonic()) if patience else None,
                    metadata=client_metadata(address, coordinator.secret),
                    wait_for_ready=True,
                )
                return int(reply.task)
            except grpc.aio.AioRpcError as error:
                exhausted = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                if not exhausted or time.monotonic() + MAX_BACKOFF_SECONDS >= until:
                    raise UnavailableError(_explain_enlist_failure(error, address, patience)) from error
            await asyncio.sleep(MAX_BACKOFF_SECONDS)


def _explain_enlist_failure(error: grpc.aio.AioRpcError, address: str, patience: float) -> str:
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return (
                f"the coordinator at {address} did not answer within {patience:g} s; is it running, and is this its "
                "address?"
            )
        case grpc.StatusCode.UNIMPLEMENTED:
            return f"the coordinator at {address} is of a release that gives no numbers to workers: give --task"
        case _:
            return f"the coordinator at {address} refuses this worker: {describe_failure(error)}"


MAX_RANKS_PER_HEARTBEAT = 256  # in one heartbeat; others have their turn with the next

_RankKey = tuple[int, int]  # generation, rank
_Progress = tuple[int, int, str, str]  # submitted, finished, operation, site


class ProgressDeltas:
    """Remembers the positions that have been sent on one stream to the coordinator."""

    def __init__(self) -> None:
        self._reported: dict[_RankKey, _Progress] = {}
        self._last_reported: _RankKey = (0, 0)  # sent last, where not all could be

    def reset(self) -> None:
        """Another stream has begun: its coordinator may not know the positions of the one before."""
        self._reported.clear()

    def next_heartbeat(self, ledgers: Iterable[InstanceTracker], now: float) -> pb.Heartbeat:
        """The next heartbeat: which local ranks have moved; at most `MAX_RANKS_PER_HEARTBEAT` of them, in turns.

        Args:
            ledgers: of the generations that run.
            now: the monotonic clock, in seconds.
        """
        known = {(tracker.generation, rank): tracker for tracker in ledgers for rank in list(tracker.progress)}
        self._reported = {key: place for key, place in self._reported.items() if key in known}
        moved = sorted(key for key, one in known.items() if self._reported.get(key) != _get_progress(one, key[1]))
        beat = pb.Heartbeat(more=len(moved) > MAX_RANKS_PER_HEARTBEAT)
        if beat.more:
            moved = [key for key in moved if key > self._last_reported] + [
                key for key in moved if key <= self._last_reported
            ]
            moved = moved[:MAX_RANKS_PER_HEARTBEAT]
            self._last_reported = moved[-1]
        said: dict[int, pb.Standings] = {}
        for generation, rank in moved:
            if generation not in said:
                said[generation] = beat.standings.add(generation=generation)
            tracker = known[generation, rank]
            standing = tracker.progress[rank]
            submitted, finished, op, site = self._reported[generation, rank] = _get_progress(tracker, rank)
            said[generation].ranks.add(
                rank=rank,
                submitted=submitted,
                finished=finished,
                last_op=op,
                last_site=site,
                idle_seconds=now - standing.active_at,
                waits=standing.waits,
                waited_seconds=standing.waited_seconds,
            )
        return beat


def _get_progress(tracker: InstanceTracker, rank: int) -> _Progress:
    standing = tracker.progress[rank]
    return tracker.find_last_submitted(rank), standing.finished, standing.op, standing.site
