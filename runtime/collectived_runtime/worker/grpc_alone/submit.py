"""One `Submit`: a value comes in chunks, is rung when its turn comes, and its results go back pack by pack.

Runs in the event loop and never holds it for more than a millisecond: values and results are moved in chunks, and what
thinks about values of many leaves is done beside it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import NamedTuple

from collectived_proto.deadline import Deadline
from collectived_proto.errors import (
    CollectiveError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from collectived_proto.local import wire
from collectived_proto.v1 import worker_pb2
from collectived_runtime.engine.results import Exhausted
from collectived_runtime.worker.descriptions import Description, Descriptions, Span, posted
from collectived_runtime.worker.grpc_alone.flights import Flight
from collectived_runtime.worker.grpc_alone.parcel import Parcel
from collectived_runtime.worker.grpc_alone.remote import Remote
from collectived_runtime.worker.grpc_alone.uploads import NOTHING

log = logging.getLogger("collectived.worker")

CHUNK = 1 << 20  # bytes of a data message
AT_A_STRETCH = 512  # leaves moved before others have their turn

Requests = AsyncIterator[worker_pb2.SubmitRequest]
Replies = AsyncGenerator[worker_pb2.SubmitReply, None]


class RemoteRank(NamedTuple):
    """A rank of a session whose client submits over gRPC."""

    remote: Remote
    descriptions: Descriptions


async def submit(requests: Requests, find: Callable[[worker_pb2.SubmitHeader], RemoteRank]) -> Replies:
    """Answers one submission.

    Args:
        find: the rank that a header speaks of.

    Raises:
        CollectiveError: the request is wrong and nothing was submitted, or the collective failed: with a verdict.
    """
    header = await _header(requests)
    remote, descriptions = find(header)
    try:
        remote.check()
        number, described = await descriptions.find(header.collective)
        with remote.stream(posted(described.collective.operation)):
            flight = await _rung(requests, header, remote, number, described)
            try:
                async for reply in _results(remote, flight, described):
                    yield reply
            finally:
                remote.finished(flight)
    except CollectiveError as error:
        if error.verdict is not None:
            remote.given(error.verdict)
        raise


async def _header(requests: Requests) -> worker_pb2.SubmitHeader:
    async for request in requests:
        if request.HasField("header"):
            return request.header
        break
    raise InvalidArgumentError("a Submit begins with a header, and this one does not")


# In


async def _rung(
    requests: Requests, header: worker_pb2.SubmitHeader, remote: Remote, prepared: int, described: Description
) -> Flight:
    timeout = header.timeout_seconds
    if not timeout >= 0.0:
        raise InvalidArgumentError(f"timeout_seconds must not be negative or NaN, got {timeout}")
    deadline = Deadline.after(timeout)
    asked = max(timeout, header.asked_seconds)
    post = posted(described.collective.operation)
    instance = header.instance if header.HasField("instance") else None
    if instance is not None and (instance >= wire.POST) != post:
        raise InvalidArgumentError(
            f"{described.prepared.op} cannot be instance {instance}: send and recv are numbered from 2**62, and "
            "everything else from 0"
        )
    with remote.order.numbered(header.generation, instance, post) as number:
        upload = Upload(remote, described)
        try:
            async with asyncio.timeout_at(deadline.at if deadline.is_set else None) as limit:
                with remote.limited(limit):
                    await upload.receive(requests)
                    number = await remote.order.turn(number, header.generation, post)
        except BaseException as error:
            upload.drop()
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
                await remote.late(number or remote.order.following(header.generation, post), op, asked)
            raise
        remaining = deadline.wire()
        ring = wire.Ring(
            number[0],
            prepared,
            number[1],
            remaining,
            bool(described.spans),
            ((upload.number, 0),) if described.spans else (),
            timeout=asked if remaining else 0.0,
        )
        return remote.ring(number, ring)


class Upload:
    """The bytes of a value on their way into memory, laid out as a staging slot."""

    def __init__(self, remote: Remote, described: Description) -> None:
        """
        Raises:
            ResourceExhaustedError: the worker has no memory for it.
        """
        self._remote = remote
        self._described = described
        self._spans = described.spans
        self._leaf = self._filled = 0  # the leaf that is next, and how many bytes of it have come
        self._came = 0
        self._complete = False
        self.number = NOTHING
        self._memory = memoryview(b"")
        if described.spans and described.gives:
            try:
                self.number, memory = remote.uploads.take(described.layout.staging_bytes)
            except Exhausted as error:
                raise ResourceExhaustedError(f"no memory for the value of {described.prepared.op}: {error}") from None
            self._memory = memory.data

    @property
    def progress(self) -> str:
        """How far it is, for people."""
        if self._complete:
            return "its value had come, but not what is numbered before it"
        return f"{self._came} of {self._described.nbytes} bytes had come"

    def drop(self) -> None:
        """It will not be rung."""
        self._remote.uploads.give(self.number)

    async def receive(self, requests: Requests) -> None:
        """Takes chunks until the client says that there are no more.

        Raises:
            InvalidArgumentError: a chunk is too large, there are too many bytes, or too few.
        """
        total = self._described.nbytes
        async for request in requests:
            if not request.HasField("data"):
                raise InvalidArgumentError("after its header a Submit has data alone")
            if len(request.data) > CHUNK:
                raise InvalidArgumentError(f"a chunk of {len(request.data)} bytes: at most {CHUNK} may come at once")
            self._came += len(request.data)
            if self._came > total:
                raise InvalidArgumentError(f"{self._came} bytes came for a value of {total} bytes")
            if self._described.gives:
                await self._write(memoryview(request.data))
        if self._came != total and (self._described.gives or self._came):
            raise InvalidArgumentError(f"{self._came} bytes came for a value of {total} bytes")
        self._complete = True

    async def _write(self, data: memoryview) -> None:
        moved = 0
        while data:
            start, stop = self._spans[self._leaf]
            start += self._filled
            part = data[: stop - start]
            self._memory[start : start + len(part)] = part
            data = data[len(part) :]
            self._filled += len(part)
            if start + len(part) == stop:
                self._leaf, self._filled = self._leaf + 1, 0
            moved += 1
            if moved % AT_A_STRETCH == 0:
                await asyncio.sleep(0)


# Out


async def _results(remote: Remote, flight: Flight, described: Description) -> Replies:
    parcel: Parcel | None = None
    while True:
        done = await flight.next()
        if not done.result:  # this rank receives nothing; it is told when all is over
            yield worker_pb2.SubmitReply(result=worker_pb2.SubmitResult(), waiting=flight.waiting)
            return
        memory = remote.arena(done.arena)[done.offset :]
        if not described.outlined:
            shipment = described.shipments[done.pack]
        elif described.collective.open and not done.last:
            continue
        else:
            if parcel is None:
                parcel = await Parcel.read(memory, described)
            shipment = await parcel.shipment(None if described.collective.open else done.pack)
        yield worker_pb2.SubmitReply(result=shipment.header, waiting=flight.waiting)
        for parts in _parts(memory, shipment.spans):
            data = b"".join(parts)
            remote.hear()
            flight.check()
            remote.check()  # so far it was ours
            yield worker_pb2.SubmitReply(data=data)
        if done.last:
            return


def _parts(memory: memoryview, spans: Sequence[Span]) -> Iterator[list[memoryview]]:
    """What lies there, in lists of pieces that make at most one chunk."""
    parts: list[memoryview] = []
    size = 0
    for start, stop in spans:
        while start < stop:
            part = memory[start : min(stop, start + CHUNK - size)]
            parts.append(part)
            size += len(part)
            start += len(part)
            if size == CHUNK or len(parts) == AT_A_STRETCH:
                yield parts
                parts, size = [], 0
    if parts:
        yield parts
