"""One `Submit`: a value comes in chunks, is rung when its turn comes, and its results go back pack by pack.

Runs in the event loop and never holds it for more than a millisecond: values and results are moved in chunks, and what
thinks about values of many leaves is done beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import NamedTuple

from collectived_proto.deadline import Deadline
from collectived_proto.errors import (
    CollectiveError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from collectived_proto.ipc import messages
from collectived_proto.types import Recv
from collectived_proto.v1 import worker_pb2
from collectived_runtime.engine.base.memory_budget import MemoryExhausted
from collectived_runtime.worker.prepared import PreparedCache, Span, Submittable, is_point_to_point
from collectived_runtime.worker.remote_ranks.in_flight import RemoteInstance
from collectived_runtime.worker.remote_ranks.remote_rank import RemoteRankSession
from collectived_runtime.worker.remote_ranks.result_header import RemoteResult
from collectived_runtime.worker.remote_ranks.uploads import NO_UPLOAD

log = logging.getLogger("collectived.worker")

CHUNK_BYTES = 1 << 20  # bytes of a data message
LEAVES_PER_SLICE = 512  # leaves moved before others have their turn
SKIP_SECONDS = 1.0  # that the rest of a refused submission is read for
SKIP_IDLE_SECONDS = 0.2  # without a message, after which there is no more to wait for

Requests = AsyncIterator[worker_pb2.SubmitRequest]
Replies = AsyncGenerator[worker_pb2.SubmitReply, None]


class RemoteRank(NamedTuple):
    """A rank of a session whose client submits over gRPC."""

    remote: RemoteRankSession
    prepared_cache: PreparedCache


async def handle_submit(requests: Requests, find: Callable[[worker_pb2.SubmitHeader], RemoteRank]) -> Replies:
    """Answer one submission.

    Args:
        find: the rank that a header speaks of.

    Raises:
        CollectiveError: the request is wrong and nothing was submitted, or the collective failed: with a verdict.
    """
    header = await _read_header(requests)
    remote, descriptions = find(header)
    try:
        remote.check_open()
        number, described = await descriptions.find(header.collective)
        with remote.acquire_stream(is_point_to_point(described.collective.operation)):
            flight = await _receive_and_submit(requests, header, remote, number, described)
            try:
                async for reply in _stream_results(remote, flight, described):
                    yield reply
            finally:
                remote.abandon(flight)
    except CollectiveError as error:
        if error.verdict is not None:
            remote.on_verdict_delivered(error.verdict)
        raise


async def skip_requests(requests: Requests) -> None:
    """Read what a client is still sending of a submission that is refused.

    A client of grpc.aio whose message meets a call that has ended reports INTERNAL instead of why it was refused.
    """
    clock = asyncio.get_running_loop().time
    last, rest = clock() + SKIP_SECONDS, aiter(requests)
    with contextlib.suppress(TimeoutError, StopAsyncIteration):
        while (now := clock()) < last:
            async with asyncio.timeout_at(min(last, now + SKIP_IDLE_SECONDS)):
                await anext(rest)


async def _read_header(requests: Requests) -> worker_pb2.SubmitHeader:
    async for request in requests:
        if request.HasField("header"):
            return request.header
        break
    raise InvalidArgumentError("a Submit begins with a header, and this one does not")


# In


async def _receive_and_submit(
    requests: Requests,
    header: worker_pb2.SubmitHeader,
    remote: RemoteRankSession,
    prepared: int,
    described: Submittable,
) -> RemoteInstance:
    timeout = header.timeout_seconds
    if not timeout >= 0.0:
        raise InvalidArgumentError(f"timeout_seconds must not be negative or NaN, got {timeout}")
    deadline = Deadline.after(timeout)
    asked = max(timeout, header.asked_seconds)
    post = is_point_to_point(described.collective.operation)
    instance = header.instance if header.HasField("instance") else None
    if instance is not None and (instance >= messages.P2P_BASE) != post:
        raise InvalidArgumentError(
            f"{described.prepared.op} cannot be instance {instance}: send and recv are numbered from 2**62, and "
            "everything else from 0"
        )
    with remote.sequencer.reserve_number(header.generation, instance, post) as number:
        upload = Upload(remote, described)
        try:
            # A receive ends alone: its group loop gets it all the same, and ends it.
            ends_all = deadline.is_set and not isinstance(described.collective.operation, Recv)
            async with asyncio.timeout_at(deadline.at if ends_all else None) as limit:
                with remote.bind_timeout(limit):
                    await upload.receive(requests)
                    number = await remote.sequencer.wait_turn(number, header.generation, post)
        except BaseException as error:
            upload.discard()
            if isinstance(error, TimeoutError) and not isinstance(error, CollectiveError):
                op = described.prepared.op
                log.info(
                    "group %s: rank %d did not submit %s within %g s: %s",
                    remote.group.name,
                    remote.rank,
                    op,
                    asked,
                    upload.progress,
                )
                await remote.expire_submission(
                    number or remote.sequencer.next_number(header.generation, post), op, asked
                )
            raise
        remaining = deadline.to_wire()
        ring = messages.Submit(
            number[0],
            prepared,
            number[1],
            remaining,
            bool(described.staging_spans),
            ((upload.number, 0),) if described.staging_spans else (),
            timeout=asked if remaining else 0.0,
        )
        return remote.start_instance(number, ring)


class Upload:
    """The bytes of a value on their way into memory, laid out as a staging slot."""

    def __init__(self, remote: RemoteRankSession, described: Submittable) -> None:
        """
        Raises:
            ResourceExhaustedError: the worker has no memory for it.
        """
        self._remote = remote
        self._submittable = described
        self._spans = described.staging_spans
        self._leaf = self._leaf_bytes = 0  # the leaf that is next, and how many bytes of it have come
        self._received_bytes = 0
        self._complete = False
        self.number = NO_UPLOAD
        self._memory = memoryview(b"")
        if described.staging_spans and described.has_input:
            try:
                self.number, memory = remote.uploads.acquire(described.layout.staging_bytes)
            except MemoryExhausted as error:
                raise ResourceExhaustedError(f"no memory for the value of {described.prepared.op}: {error}") from None
            self._memory = memory.data

    @property
    def progress(self) -> str:
        """How far it is, for people."""
        if self._complete:
            return "its value had come, but not what is numbered before it"
        return f"{self._received_bytes} of {self._submittable.nbytes} bytes had come"

    def discard(self) -> None:
        """Give its memory back: it will not be submitted."""
        self._remote.uploads.release(self.number)

    async def receive(self, requests: Requests) -> None:
        """Take chunks until the client says that there are no more.

        Raises:
            InvalidArgumentError: a chunk is too large, there are too many bytes, or too few.
        """
        total = self._submittable.nbytes
        async for request in requests:
            if not request.HasField("data"):
                raise InvalidArgumentError("after its header a Submit has data alone")
            if len(request.data) > CHUNK_BYTES:
                raise InvalidArgumentError(
                    f"a chunk of {len(request.data)} bytes: at most {CHUNK_BYTES} may come at once"
                )
            self._received_bytes += len(request.data)
            if self._received_bytes > total:
                raise InvalidArgumentError(f"{self._received_bytes} bytes came for a value of {total} bytes")
            if self._submittable.has_input:
                await self._write(memoryview(request.data))
        if self._received_bytes != total and (self._submittable.has_input or self._received_bytes):
            raise InvalidArgumentError(f"{self._received_bytes} bytes came for a value of {total} bytes")
        self._complete = True

    async def _write(self, data: memoryview) -> None:
        moved = 0
        while data:
            start, stop = self._spans[self._leaf]
            start += self._leaf_bytes
            part = data[: stop - start]
            self._memory[start : start + len(part)] = part
            data = data[len(part) :]
            self._leaf_bytes += len(part)
            if start + len(part) == stop:
                self._leaf, self._leaf_bytes = self._leaf + 1, 0
            moved += 1
            if moved % LEAVES_PER_SLICE == 0:
                await asyncio.sleep(0)


# Out


async def _stream_results(remote: RemoteRankSession, flight: RemoteInstance, described: Submittable) -> Replies:
    parcel: RemoteResult | None = None
    while True:
        done = await flight.next_completion()
        if done is None:
            yield worker_pb2.SubmitReply(withdrawn=flight.withdrawn)
            return
        if not done.has_result:  # this rank receives nothing; it gets a message when all is over
            yield worker_pb2.SubmitReply(result=worker_pb2.SubmitResult(), waiting=flight.waiting_joiners)
            return
        memory = remote.get_arena(done.arena)[done.offset :]
        if not described.has_result_header:
            shipment = described.result_chunks[done.pack]
        elif described.collective.open and not done.is_last:
            continue
        else:
            if parcel is None:
                parcel = await RemoteResult.parse(memory, described)
            shipment = await parcel.make_chunk(None if described.collective.open else done.pack)
        if done.source is not None:
            shipment.header.source = done.source
        yield worker_pb2.SubmitReply(result=shipment.header, waiting=flight.waiting_joiners)
        for parts in _split_chunks(memory, shipment.result_spans):
            data = b"".join(parts)
            remote.process_messages()
            flight.raise_if_failed()
            remote.check_open()  # so far the result belonged to this call
            yield worker_pb2.SubmitReply(data=data)
        if done.is_last:
            return


def _split_chunks(memory: memoryview, spans: Sequence[Span]) -> Iterator[list[memoryview]]:
    """Split the bytes at `spans` into lists of pieces that make at most one chunk."""
    parts: list[memoryview] = []
    size = 0
    for start, stop in spans:
        while start < stop:
            part = memory[start : min(stop, start + CHUNK_BYTES - size)]
            parts.append(part)
            size += len(part)
            start += len(part)
            if size == CHUNK_BYTES or len(parts) == LEAVES_PER_SLICE:
                yield parts
                parts, size = [], 0
    if parts:
        yield parts
