"""Membership: this worker's stream to the coordinator, kept up as long as the worker lives.

When the coordinator cannot be reached, running groups go on, what is to be said waits, and the stream is made again
with growing pauses. Everything runs in the worker's event loop, except `say`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import grpc
import grpc.aio

from collectived_proto.codec import versions_from_proto
from collectived_proto.errors import FailedPreconditionError, UnavailableError
from collectived_proto.protocol import agree
from collectived_proto.tls.files import Files
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_proto.v1 import coordinator_pb2_grpc as rpc
from collectived_proto.v1 import status_pb2, trace_pb2
from collectived_runtime.admission import client_metadata
from collectived_runtime.certificates import Certificates
from collectived_runtime.clocks import Pulse
from collectived_runtime.daemon import OPTIONS
from collectived_runtime.engine.ledger import Ledger
from collectived_runtime.worker.heartbeat import Heartbeats

log = logging.getLogger("collectived.worker")

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
# gRPC's own pauses between attempts to connect grow to two minutes, longer than a coordinator that came back waits.
RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),  # a proxy of the site's is for the world outside
)
AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.INTERNAL,  # what gRPC says here where a stream ends under a write: why it ended, the next one tells
)
PART_SECONDS = 2.0  # for the next part of a trace: the coordinator waits 1.5 s for each of a worker
DRAIN_SECONDS = 0.002  # between looks whether what was to be said has been
WAITING_MESSAGES = 10_000  # kept while the coordinator is away; older ones are dropped first


class Membership:
    """Args:
    address: of the coordinator, `unix:/path` or `host:port`.
    hello: makes the first message of each stream.
    heard: called with each message of the coordinator.
    rejoin: called after each Welcome, to say again what may have been lost.
    ledgers: of the generations that run here; heartbeats tell where their ranks stand.
    away: called when the coordinator cannot be reached any more, until `rejoin`.
    tls: with what the coordinator is called over TCP; None: in plain text.

    Attributes:
        welcomes: how often the coordinator has welcomed this worker. beats: heartbeats sent.
        link_secret: that a coordinator has given for links, where the job has no secret; '' before.
        heartbeat_seconds: between heartbeats, as the coordinator wants them.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        hello: Callable[[int], pb.Hello],
        heard: Callable[[pb.CoordinatorMessage], None],
        rejoin: Callable[[], None],
        ledgers: Callable[[], Iterable[Ledger]] = tuple,
        away: Callable[[], None] = lambda: None,
        tls: Certificates | None = None,
    ) -> None:
        self.address = address
        self._tls = tls or Certificates(Files())
        self.epoch = 0
        self.stall_seconds = 1.0
        self.connected = asyncio.Event()
        self._metadata = client_metadata(address, secret)
        self._dial()
        self._hello = hello
        self._heard = heard
        self._rejoin = rejoin
        self._ledgers = ledgers
        self._away = away
        self.link_secret = ""
        self.welcomes = 0
        self.beats = 0
        self._heartbeats = Heartbeats()
        self.heartbeat_seconds = 5.0
        self._pulse = Pulse()
        self._waiting: deque[pb.WorkerMessage] = deque(maxlen=WAITING_MESSAGES)
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._streams = 0  # that were tried
        self._closing = False
        self._welcome_once = False
        self._warned = ""
        self._task = asyncio.create_task(self._keep_up())

    @property
    def over(self) -> asyncio.Future[None]:
        """Done when the stream is kept up no longer: after `close`, or by a defect, which is its exception."""
        return self._task

    async def joined(self, timeout: float) -> None:
        """Waits until the coordinator has welcomed this worker.

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
                f"the coordinator at {self.address} did not answer within {timeout:g} s; "
                "is it running, and is this its address?"
            )

    def say(self, message: pb.WorkerMessage) -> None:
        """Sends a message now or when the coordinator is back; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: the worker is ending
            self._loop.call_soon_threadsafe(self._enqueue, message)

    def _enqueue(self, message: pb.WorkerMessage) -> None:
        self._waiting.append(message)
        self._news.set()

    async def status(self, request: status_pb2.StatusRequest, timeout: float) -> status_pb2.StatusReply:
        """Asks the coordinator; raises grpc.aio.AioRpcError where it does not answer."""
        call: Awaitable[status_pb2.StatusReply] = self._stub.Status(request, timeout=timeout, metadata=self._metadata)
        return await call

    async def drain(self, request: status_pb2.DrainRequest, timeout: float) -> status_pb2.DrainReply:
        """Asks the coordinator to see to a drain; raises grpc.aio.AioRpcError where it does not."""
        call: Awaitable[status_pb2.DrainReply] = self._stub.Drain(request, timeout=timeout, metadata=self._metadata)
        return await call

    async def trace(self, request: trace_pb2.TraceRequest, patience: float) -> AsyncIterator[trace_pb2.TraceReply]:
        """Asks the coordinator; raises grpc.aio.AioRpcError where it does not begin to answer within `patience`
        seconds, or stops amid its answer."""
        call = self._stub.Trace(request, metadata=self._metadata)
        try:
            reply = await asyncio.wait_for(call.read(), patience)
            patience = PART_SECONDS
            while reply is not grpc.aio.EOF:
                yield reply
                reply = await asyncio.wait_for(call.read(), patience)
        except TimeoutError:
            raise silent(f"not within {patience:g} s") from None
        finally:
            call.cancel()

    async def drained(self) -> bool:
        """Waits until everything that was to be said has been; False where there is nobody to hear it."""
        while self._waiting and self.connected.is_set():
            await asyncio.sleep(DRAIN_SECONDS)
        return self.connected.is_set()

    async def close(self, why: str = "") -> None:
        """Says goodbye, so that the coordinator does not look for this worker; `why` is for people."""
        self._closing = True
        if self.connected.is_set():
            self._enqueue(pb.WorkerMessage(goodbye=pb.Goodbye(why=why)))
        await asyncio.wait({self._task}, timeout=1.0)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    def _dial(self) -> None:
        self._certificates = self._tls.current()
        self._channel = self._tls.channel(self.address, (*OPTIONS, *RECONNECT))
        self._stub = rpc.CoordinatorStub(self._channel)

    async def _check_tls(self, error: grpc.aio.AioRpcError) -> None:
        """Raises UnavailableError where a worker that was never welcomed need not try again: waiting mends nothing."""
        if self._welcome_once or error.code() is not grpc.StatusCode.UNAVAILABLE:
            return
        if reason := await self._tls.why_not(self.address):
            raise UnavailableError(f"the coordinator at {self.address} cannot be used: {reason}") from error

    async def _dial_anew(self) -> None:
        """A channel keeps the certificates that it was made with."""
        if self._tls.current() is not self._certificates:
            former = self._channel
            self._dial()
            await former.close()

    async def _keep_up(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._closing:
            await self._dial_anew()
            try:
                await self._stream()
            except grpc.aio.AioRpcError as error:
                if error.code() not in AWAY and not _cut_off(error) and not self._welcome_once:
                    refused = f"the coordinator at {self.address} refuses this worker: {error.details()}"
                    apart = error.code() is grpc.StatusCode.FAILED_PRECONDITION
                    raise (FailedPreconditionError if apart else UnavailableError)(refused) from error
                await self._check_tls(error)
                self._warn(f"{error.code().name}: {error.details()}")
            except FailedPreconditionError as error:
                if not self._welcome_once:
                    raise
                self._warn(str(error))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                self._warn("what was to be said to it could not be")  # which is how gRPC shows that here
            pause = FIRST_PAUSE_SECONDS if self.connected.is_set() else min(2 * pause, LONGEST_PAUSE_SECONDS)
            if self.connected.is_set():
                self.connected.clear()
                self._away()
            if not self._closing:
                await asyncio.sleep(pause)

    def _warn(self, reason: str) -> None:
        """Once for each reason: the coordinator is away, or will not have this worker back (yet)."""
        if self.connected.is_set() or reason != self._warned:
            level = logging.WARNING if self._welcome_once else logging.DEBUG
            log.log(level, "the coordinator at %s is away: %s", self.address, reason)
        self._warned = reason

    async def _stream(self) -> None:
        self._streams += 1
        call = self._stub.Attach(self._outgoing(self._streams), metadata=self._metadata)
        async for message in call:
            if message.HasField("welcome"):
                theirs = versions_from_proto(message.welcome.protocol)
                agree(theirs, f"the coordinator at {self.address}", "this worker")
                self._welcomed(message.welcome)
            elif message.HasField("echo"):
                self._pulse.echo(message.echo.sent_at, message.echo.at, time.monotonic())
            else:
                self._hear(message)

    def _hear(self, message: pb.CoordinatorMessage) -> None:
        """Whatever one message brings about, those after it are heard: a worker that is deaf would keep its groups, and
        they would wait for verdicts that never come."""
        try:
            self._heard(message)
        except Exception:
            kind = message.WhichOneof("message")
            log.exception("a defect of collectived: a message of kind %s from the coordinator has had no effect", kind)

    def _welcomed(self, welcome: pb.Welcome) -> None:
        self.welcomes += 1
        self.epoch = max(self.epoch, welcome.epoch)
        self.heartbeat_seconds = welcome.heartbeat_seconds
        self.stall_seconds = welcome.stall_seconds
        self.link_secret = welcome.link_secret or self.link_secret
        self._welcome_once = True
        self._heartbeats.forget()
        self._pulse.forget()
        self.connected.set()
        self._rejoin()
        self._news.set()

    async def _outgoing(self, stream: int) -> AsyncIterator[pb.WorkerMessage]:
        """What is to be said on this stream; where that fails gRPC cancels it, and says nothing."""
        try:
            async for message in self._messages(stream):
                yield message
        except Exception:
            log.exception("a defect of collectived: nothing more can be said on this stream to the coordinator")
            raise

    async def _messages(self, stream: int) -> AsyncIterator[pb.WorkerMessage]:
        """gRPC does not end its iterator with the stream, so it looks for itself: what it took for a stream that is
        over, nobody would hear."""
        yield pb.WorkerMessage(hello=self._hello(self.epoch))
        beaten = time.monotonic()
        while stream == self._streams:
            if self.connected.is_set():
                while self._waiting and stream == self._streams:
                    message = self._waiting.popleft()
                    yield message
                    if message.HasField("goodbye"):
                        return
            try:
                # A beat is due whatever else is said: it alone tells where ranks stand with which nothing is wrong.
                await asyncio.wait_for(self._news.wait(), max(0.0, beaten + self.heartbeat_seconds - time.monotonic()))
            except TimeoutError:
                if stream != self._streams:
                    return
                beaten = time.monotonic()
                self.beats += 1
                yield pb.WorkerMessage(heartbeat=self._beat(beaten))
            if stream == self._streams:
                self._news.clear()

    def _beat(self, now: float) -> pb.Heartbeat:
        beat = self._heartbeats.next(self._ledgers(), now)
        beat.sent_at = self._pulse.beat(now)
        if (found := self._pulse.best(now)) is not None:
            # What is to be added to our time to get the coordinator's is the reverse of what we add to its.
            beat.clock.offset_seconds, beat.clock.error_seconds = -found.seconds, found.error(now)
            beat.clock.round_trip_seconds = found.round_trip
        return beat


def silent(why: str) -> grpc.aio.AioRpcError:
    """As gRPC itself says that nobody answers."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing, details=why)


def _cut_off(error: grpc.aio.AioRpcError) -> bool:
    """Whether the stream ended while we wrote to it: gRPC puts that in the place of what the coordinator answered."""
    return error.code() is grpc.StatusCode.INTERNAL and "Internal error from Core" in (error.details() or "")
