"""Carries out one participant's plan over links: the one place where moves become bytes.

A running plan is a generator. It yields what it waits for: pairs of a link and poll events, or nothing at all ("step me
again; other work may want the thread first"). It never blocks and starts no thread, so that any number of them run
side by side in one group loop. Closing the generator stops the plan where it stands.

Invariant: after the last round every receive has been folded and every send accepted by the system below.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from collectived_runtime.engine.base.aligned import allocate_like
from collectived_runtime.engine.clients.result_parts import ResultParts
from collectived_runtime.engine.compile.partition import Window
from collectived_runtime.engine.record.flight_recorder import MOST_MOVES, RECEIVE, SEND
from collectived_runtime.engine.submit.tracker import Mark
from collectived_runtime.plan.moves import Buffer, FinishMove, FoldMove, RecvMove, SendMove, Span
from collectived_runtime.plan.wide_moves import CollectMove, NativeMove, WidePlan
from collectived_runtime.transport.frame import MAX_PAYLOAD, FrameTemplate
from collectived_runtime.transport.link import Link

Array = NDArray[Any]


class Awaitable(Protocol):
    """Work of another thread or a device, which wakes the group loop when it is `done`."""

    @property
    def done(self) -> bool: ...


# A wait of a generator: links with poll events, work of others with 0; empty: ready to go on.
Wait = Sequence[tuple[Link | Awaitable, int]]
YIELD_NOW: Wait = ()
Headers = list[tuple[bytes, int]]  # of the frames of a move, each with the length of its payload

FOLD_BLOCK_BYTES = 256 << 10  # received between two folds: stays in the cache
MAX_STEP_BYTES = 2 << 20  # received on one link between two looks at the world


# Called with a link, the header expected and the one that came instead: returns True to leave the link parked and wait
# for better news, or raises LinkBroken.
OnUnexpectedFrame = Callable[[Link, bytes, bytes], bool]


@dataclass(frozen=True, slots=True)
class PlanTransport:
    """How the moves of one plan travel.

    Attributes:
        links: by participant, to at least the peers that the plan names; for this plan alone until it ends.
        frames: the common part of the plan's frames.
        marks: receives when each move of a round ended; None: they are not recorded.
    """

    links: Mapping[int, Link]
    frames: FrameTemplate
    on_unexpected_frame: OnUnexpectedFrame
    marks: list[Mark] | None = None


class PlanMemory(Protocol):
    """The three buffers of a plan. Moves over links need memory of the host, which is a `LinkMemory`."""

    def apply_finish(self, source: Buffer, span: Span) -> None:
        """Makes the values of `span` in `source` final, in OUTPUT."""

    def run_native(self, move: NativeMove) -> Iterator[Wait]:
        """Has an engine such as NCCL carry a move out."""
        raise NotImplementedError


class ReceiveTarget(Protocol):
    """Where received bytes go. An `asyncio.BufferedProtocol` has the same two methods."""

    def get_buffer(self, limit: int) -> memoryview:
        """Where the next bytes belong, at most `limit` of them."""
        raise NotImplementedError

    def buffer_updated(self, count: int) -> None:
        """So many have been written there."""


class Collection(Protocol):
    """The contributions to a span, kept apart until all of them are there."""

    @property
    def targets(self) -> Mapping[int, ReceiveTarget]:
        """By participant, where its part goes."""
        raise NotImplementedError

    def fold(self) -> None:
        """Fold all parts, in the order of their move, into SCRATCH, which may be the memory of this worker's part."""


# Bytes to send together, one batch after the other has been taken. The first begins with a header.
Batches = Iterator[list["bytes | memoryview"]]


class LinkMemory(PlanMemory):
    """Memory of the host, whose spans travel over links. Elements are rows of `row_bytes` on the wire."""

    def row_bytes(self, buffer: Buffer) -> int:
        raise NotImplementedError

    def read(self, move: SendMove, headers: Headers) -> Batches:
        """The bytes to send for a move, in one frame per header."""
        raise NotImplementedError

    def open_target(self, move: RecvMove) -> ReceiveTarget:
        raise NotImplementedError

    def open_collection(self, move: CollectMove, peers: Container[int]) -> Collection:
        """For the parts that come from `peers`; any other part is this worker's own."""
        raise NotImplementedError


@dataclass(slots=True)
class Buffers(LinkMemory):
    """The memory of one pack and shard on the host. Elements are rows.

    The three buffers may be the same memory (see plan/moves.py).
    `output` is None where this participant receives nothing. `fold(left, right, out)`, `finish(source, out)` and
    `finish_here(out)`, where the source is the output itself, are arithmetic on such arrays. Where input and output
    hold only a part of what the plan speaks of, `windows` say which. `native` carries out the moves of an engine.
    Bytes received into the output are `reported`, if a rank takes parts of it.
    """

    input: Array
    scratch: Array
    output: Array | None
    fold: Callable[[Array, Array, Array], None]
    finish: Callable[[Array, Array], None]
    finish_here: Callable[[Array], None]
    windows: Mapping[Buffer, Window] | None = None
    native: Callable[[NativeMove], Iterator[Wait]] | None = None
    reported: ReportedOutput | None = None

    def view(self, buffer: Buffer, span: Span) -> Array:
        start = self._find_start(buffer, span)
        return self._select_array(buffer)[start : start + len(span)]

    def _find_start(self, buffer: Buffer, span: Span) -> int:
        """Which element of a buffer is the first of a span."""
        if self.windows is not None and buffer in self.windows:
            return self.windows[buffer].translate(span.start)
        return span.start

    def apply_finish(self, source: Buffer, span: Span) -> None:
        if self._select_array(source) is self.output:
            self.finish_here(self.view(Buffer.OUTPUT, span))
        else:
            self.finish(self.view(source, span), self.view(Buffer.OUTPUT, span))

    def row_bytes(self, buffer: Buffer) -> int:
        return self._select_array(buffer).strides[0]

    def read(self, move: SendMove, headers: Headers) -> Batches:
        data = _as_bytes(self.view(move.source, move.span))
        stops = list(accumulate(length for _, length in headers))
        frames = ((header, data[stop - length : stop]) for (header, length), stop in zip(headers, stops, strict=True))
        yield [part for frame in frames for part in frame if len(part)]

    def open_target(self, move: RecvMove) -> ReceiveTarget:
        if move.fold is not None:
            return FoldTarget(self, move, move.fold)
        part, reported = self.view(move.target, move.span), self.reported
        if reported is None or move.target is not Buffer.OUTPUT or part.nbytes < reported.parts.part_bytes:
            return InPlaceTarget(part)
        return ReportedTarget(part, self._find_start(move.target, move.span) * part.itemsize, reported)

    def open_collection(self, move: CollectMove, peers: Container[int]) -> Collection:
        return _Parts(self, move, peers)

    def run_native(self, move: NativeMove) -> Iterator[Wait]:
        assert self.native is not None, f"{move.kind.value} by an engine, which this task does not have"
        return self.native(move)

    def _select_array(self, buffer: Buffer) -> Array:
        whole = self.input if buffer is Buffer.INPUT else self.scratch if buffer is Buffer.SCRATCH else self.output
        assert whole is not None, "a plan wrote to the output of a participant that receives nothing"
        return whole


def execute(plan: WidePlan, memory: PlanMemory, transport: PlanTransport) -> Iterator[Wait]:
    """Runs `plan` on `memory`.

    Raises:
        LinkBroken: a peer is gone.
    """
    stamp, marks = transport.frames, transport.marks
    for number, moves in enumerate(plan):
        under_way: list[_PendingSend | _PendingReceive] = []
        collections: list[Collection] = []
        for move in moves:
            match move:
                case FinishMove(span, source):
                    memory.apply_finish(source, span)
                case NativeMove():
                    yield from memory.run_native(move)
                case _:
                    assert isinstance(memory, LinkMemory), "values that travel over links lie in memory of the host"
                    under_way += _start_transfers(move, memory, transport, number, collections)
        began = time.monotonic() if marks is not None and under_way else 0.0
        while under_way:
            moved = False
            begun: set[tuple[Link, int]] = set()  # of several transfers on a link, each waits for the one before
            for one in under_way:
                if (way := (one.link, one.poll_events)) not in begun:
                    moved |= one.advance()
                    if not one.done:
                        begun.add(way)
            left = [one for one in under_way if not one.done]
            if marks is not None and len(left) < len(under_way) and len(marks) < MOST_MOVES:
                now = time.monotonic()
                for one in under_way:
                    if one.done and len(marks) < MOST_MOVES:
                        marks.append((one.mark_kind, stamp.pack, stamp.shard, number, one.link.peer, began, now))
            under_way = left
            if under_way:
                yield YIELD_NOW if moved else [(one.link, one.poll_events) for one in under_way]
        for collection in collections:
            collection.fold()


def _start_transfers(
    move: SendMove | RecvMove | CollectMove,
    memory: LinkMemory,
    transport: PlanTransport,
    number: int,
    collections: list[Collection],
) -> Iterator[_PendingSend | _PendingReceive]:
    """The transfers of a move in round `number`. A fold at the end of the round is added to `collections`."""
    links = transport.links
    match move:
        case SendMove(peer, span, source):
            headers = _make_headers(span, memory.row_bytes(source), transport.frames, number)
            yield _PendingSend(links[peer], memory.read(move, headers))
        case RecvMove(peer, span, target):
            headers = _make_headers(span, memory.row_bytes(target), transport.frames, number)
            yield _PendingReceive(transport, links[peer], memory.open_target(move), headers)
        case CollectMove(_, span, mine):
            collection = memory.open_collection(move, links)
            collections.append(collection)
            for peer, place in collection.targets.items():
                headers = _make_headers(span, memory.row_bytes(mine), transport.frames, number)
                yield _PendingReceive(transport, links[peer], place, headers)


class _Parts:
    """A `Collection`, whose parts are partial sums."""

    def __init__(self, buffers: Buffers, move: CollectMove, peers: Container[int]) -> None:
        self._buffers = buffers
        self._span = move.span
        mine = buffers.view(move.mine, move.span)
        self._parts = [allocate_like(mine) if peer in peers else mine for peer in move.order]
        self._mine_is_first = move.order[0] not in peers
        arriving = zip(move.order, self._parts, strict=True)
        self.targets: dict[int, ReceiveTarget] = {peer: InPlaceTarget(part) for peer, part in arriving if peer in peers}

    def fold(self) -> None:
        """Fold in the memory of received parts, which are not read again. The last fold writes the total to its place.

        That may be the memory of my part, which has been folded by then or is an operand of this fold.
        """
        total, *others = self._parts
        out = self._buffers.view(Buffer.SCRATCH, self._span)
        for number, part in enumerate(others, 1):
            target = out if number == len(others) else part if self._mine_is_first and number == 1 else total
            self._buffers.fold(total, part, target)
            total = target
        if not others:
            np.copyto(out, total)


def _as_bytes(part: Array) -> memoryview:
    return part.reshape(-1).view(np.uint8).data


def _make_headers(span: Span, row_bytes: int, stamp: FrameTemplate, number: int) -> Headers:
    """Of the frames of a move: one, or several where it is huge. An empty span is an empty frame."""
    offset, nbytes = span.start * row_bytes, len(span) * row_bytes
    if nbytes <= MAX_PAYLOAD:
        return [(stamp.header(number, offset, nbytes), nbytes)]
    limit = MAX_PAYLOAD // row_bytes * row_bytes
    lengths = [min(limit, nbytes - at) for at in range(0, nbytes, limit)]
    return [(stamp.header(number, offset + at * limit, length), length) for at, length in enumerate(lengths)]


class _PendingSend:
    """A send under way: header and payload leave together."""

    poll_events = select.POLLOUT
    mark_kind = SEND

    def __init__(self, link: Link, batches: Batches) -> None:
        self.link = link
        self.done = False
        self._batches = batches
        self._parts = next(batches)

    def advance(self) -> bool:
        """Sends what fits; whether anything did."""
        taken = self.link.send(self._parts)
        self.link.is_mid_send = True
        left = taken
        while self._parts and left >= len(self._parts[0]):
            left -= len(self._parts.pop(0))
        if self._parts and left:
            self._parts[0] = memoryview(self._parts[0])[left:]
        if not self._parts:
            self._parts = next(self._batches, [])
            self.done = not self._parts
            self.link.is_mid_send = not self.done
        return taken > 0


class _PendingReceive:
    """A receive under way: each header is checked before its payload is read; a fold happens block by block."""

    poll_events = select.POLLIN
    mark_kind = RECEIVE

    def __init__(
        self,
        transport: PlanTransport,
        link: Link,
        target: ReceiveTarget,
        headers: Headers,
    ) -> None:
        self.link = link
        self.done = False
        self._headers = headers
        self._on_unexpected_frame = transport.on_unexpected_frame
        self._bytes_left = -1  # bytes of the current frame still to come; -1: its header has not been accepted
        self._target = target

    def advance(self) -> bool:
        """Receives what is there, up to a stretch; whether anything was."""
        moved = False
        budget = MAX_STEP_BYTES
        while budget > 0 and not self.done:
            if self._bytes_left < 0:
                if not self._accept_header():
                    return moved
            else:
                received = self.link.recv_into(self._target.get_buffer(self._bytes_left))
                if not received:
                    return moved
                self._target.buffer_updated(received)
                self._bytes_left -= received
                budget -= received
            moved = True
            if self._bytes_left == 0:
                self._bytes_left = -1
                self._headers.pop(0)
                self.done = not self._headers
        return moved

    def _accept_header(self) -> bool:
        """Whether the expected header is there; takes it."""
        header = self.link.read_header()
        if header is None:
            return False
        expected, nbytes = self._headers[0]
        if header != expected and self._on_unexpected_frame(self.link, expected, header):
            return False
        self.link.consume_header()
        self._bytes_left = nbytes
        return True


class InPlaceTarget:
    """Received bytes stay where they arrive."""

    def __init__(self, part: Array) -> None:
        self._data = _as_bytes(part)
        self._offset = 0

    def get_buffer(self, limit: int) -> memoryview:
        return self._data[self._offset : self._offset + limit]

    def buffer_updated(self, count: int) -> None:
        self._offset += count


class ReportedOutput(NamedTuple):
    """The receivers of messages about parts of the output, which begins at byte `start` of the result's data."""

    parts: ResultParts
    start: int


class ReportedTarget(InPlaceTarget):
    """The same, with messages to ranks about bytes that have come, but for a rest that is not worth it."""

    def __init__(self, part: Array, start: int, reported: ReportedOutput) -> None:
        super().__init__(part)
        self._parts = reported.parts
        self._start = reported.start + start
        self._told = 0

    def get_buffer(self, limit: int) -> memoryview:
        return super().get_buffer(min(limit, self._parts.part_bytes))  # so that parts come while it does

    def buffer_updated(self, count: int) -> None:
        super().buffer_updated(count)
        if self._offset - self._told >= self._parts.part_bytes:
            self._parts.tell(self._start + self._told, self._start + self._offset)
            self._told = self._offset


class FoldTarget:
    """Received bytes pass through a block that stays in the cache, and are folded into the target from there."""

    def __init__(self, buffers: Buffers, move: RecvMove, fold: FoldMove) -> None:
        self._fold = buffers.fold
        self._received_is_left = fold.received_left
        self._own = buffers.view(fold.mine, move.span)
        self._target = buffers.view(move.target, move.span)
        rows = len(self._target)
        self._row_bytes = self._target[:1].nbytes
        self._block = allocate_like(self._target[: max(1, min(rows, FOLD_BLOCK_BYTES // max(1, self._row_bytes)))])
        self._bytes = _as_bytes(self._block)
        self._filled = 0
        self._rows_done = 0

    def get_buffer(self, limit: int) -> memoryview:
        return self._bytes[self._filled : self._filled + limit]

    def buffer_updated(self, count: int) -> None:
        self._filled += count
        start = self._rows_done
        if self._filled < len(self._bytes) and start * self._row_bytes + self._filled < self._target.nbytes:
            return
        rows = self._filled // self._row_bytes
        here = slice(start, start + rows)
        theirs, mine = self._block[:rows], self._own[here]
        self._fold(*((theirs, mine) if self._received_is_left else (mine, theirs)), self._target[here])
        self._rows_done += rows
        self._filled = 0
