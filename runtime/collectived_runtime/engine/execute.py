"""Carries out one participant's plan over links: the one place where moves become bytes.

A running plan is a generator. It yields what it waits for: pairs of a link and poll events, or nothing at all ("step me
again; somebody else may want the thread first"). It never blocks and starts no thread, so that any number of them run
side by side in one lane. Closing the generator stops the plan where it stands.

Invariant: after the last round every receive has been folded and every send accepted by the system below.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_runtime.engine.cutting import Window
from collectived_runtime.engine.ledger import Mark
from collectived_runtime.engine.recorder import MOST_MOVES, RECEIVE, SEND
from collectived_runtime.plan.collect import Collect, Native, WidePlan
from collectived_runtime.plan.moves import Buffer, Finish, Fold, Recv, Send, Span
from collectived_runtime.transport.frame import MAX_PAYLOAD, Stamp
from collectived_runtime.transport.link import Link

Array = NDArray[Any]
Wait = Sequence[tuple[Link, int]]  # what a generator waits for; empty: ready to go on
AGAIN: Wait = ()

FOLD_BYTES = 256 << 10  # received between two folds: stays in the cache
STEP_BYTES = 2 << 20  # received on one link between two looks at the world


Judge = Callable[[Link, bytes, bytes], bool]


@dataclass(slots=True)
class Buffers:
    """The memory of one pack and shard. Elements are rows; the three may be the same memory (see plan/moves.py).

    `output` is None where this participant receives nothing. `fold(left, right, out)`, `finish(source, out)` and
    `finish_here(out)`, where the source is the output itself, are arithmetic on such arrays. Where input and output
    hold only a part of what the plan speaks of, `windows` say which.
    """

    input: Array
    scratch: Array
    output: Array | None
    fold: Callable[[Array, Array, Array], None]
    finish: Callable[[Array, Array], None]
    finish_here: Callable[[Array], None]
    windows: Mapping[Buffer, Window] | None = None

    def part(self, buffer: Buffer, span: Span) -> Array:
        whole = self._whole(buffer)
        if self.windows is not None and buffer in self.windows:
            start = self.windows[buffer].at(span.start)
            return whole[start : start + len(span)]
        return whole[span.start : span.stop]

    def complete(self, source: Buffer, span: Span) -> None:
        """A Finish."""
        if self._whole(source) is self.output:
            self.finish_here(self.part(Buffer.OUTPUT, span))
        else:
            self.finish(self.part(source, span), self.part(Buffer.OUTPUT, span))

    def _whole(self, buffer: Buffer) -> Array:
        whole = self.input if buffer is Buffer.INPUT else self.scratch if buffer is Buffer.SCRATCH else self.output
        assert whole is not None, "a plan wrote to the output of a participant that receives nothing"
        return whole


def execute(
    plan: WidePlan,
    buffers: Buffers,
    links: Mapping[int, Link],
    stamp: Stamp,
    judge: Judge,
    marks: list[Mark] | None = None,
) -> Iterator[Wait]:
    """Runs `plan`.

    Args:
        links: the link to each peer that the plan names, for this plan alone until it ends.
        judge: called with a link, the header expected and the one that came instead; returns True to leave the link
            parked and wait for better news, or raises.
        marks: are told when each move of a round had ended.

    Raises:
        LinkBroken: a peer is gone.
    """
    for number, moves in enumerate(plan):
        under_way: list[_Sending | _Receiving] = []
        collects: list[tuple[Span, list[Array]]] = []
        for move in moves:
            match move:
                case Finish(span, source):
                    buffers.complete(source, span)
                case Send(peer, span, source):
                    part = buffers.part(source, span)
                    under_way.append(_Sending(links[peer], _frames(part, span, stamp, number)))
                case Recv(peer, span, target, fold):
                    part = buffers.part(target, span)
                    place = _Place(part) if fold is None else _FoldPlace(buffers, move, fold)
                    under_way.append(_Receiving(links[peer], place, _frames(part, span, stamp, number), judge))
                case Collect(order, span, mine):
                    parts = _kept_apart(buffers, order, span, mine, links)
                    collects.append((span, parts))
                    for peer, part in zip(order, parts, strict=True):
                        if peer in links:
                            frames = _frames(part, span, stamp, number)
                            under_way.append(_Receiving(links[peer], _Place(part), frames, judge))
                case Native():
                    raise AssertionError(f"{move.kind.value} by an engine on host memory")
        began = time.monotonic() if marks is not None and under_way else 0.0
        while under_way:
            moved = False
            for one in under_way:
                moved |= one.advance()
            left = [one for one in under_way if not one.done]
            if marks is not None and len(left) < len(under_way) and len(marks) < MOST_MOVES:
                now = time.monotonic()
                for one in under_way:
                    if one.done and len(marks) < MOST_MOVES:
                        marks.append((one.kind, stamp.pack, stamp.shard, number, one.link.peer, began, now))
            under_way = left
            if under_way:
                yield AGAIN if moved else [(one.link, one.events) for one in under_way]
        for span, parts in collects:
            _fold_in_order(buffers, span, parts)


def _kept_apart(
    buffers: Buffers, order: Sequence[int], span: Span, mine: Buffer, links: Mapping[int, Link]
) -> list[Array]:
    """Memory for what each of `order` contributes; mine is there already."""
    part = buffers.part(mine, span)
    return [np.empty_like(part) if peer in links else part for peer in order]


def _fold_in_order(buffers: Buffers, span: Span, parts: Sequence[Array]) -> None:
    total = parts[0].copy()  # SCRATCH may be the memory of a part that has not been folded yet
    for part in parts[1:]:
        buffers.fold(total, part, total)
    np.copyto(buffers.part(Buffer.SCRATCH, span), total)


def _bytes(part: Array) -> memoryview:
    return part.reshape(-1).view(np.uint8).data


def _frames(part: Array, span: Span, stamp: Stamp, number: int) -> list[tuple[bytes, memoryview]]:
    """Header and payload of each frame of a move: one, or several where it is huge. An empty span is an empty frame."""
    data = _bytes(part)
    row = len(data) // len(part) if len(part) else 0
    if len(data) <= MAX_PAYLOAD:
        return [(stamp.header(number, span.start * row, len(data)), data)]
    limit = MAX_PAYLOAD // row * row
    return [
        (stamp.header(number, span.start * row + at, min(limit, len(data) - at)), data[at : at + limit])
        for at in range(0, len(data), limit)
    ]


class _Sending:
    """A send under way: header and payload leave together."""

    events = select.POLLOUT
    kind = SEND

    def __init__(self, link: Link, frames: list[tuple[bytes, memoryview]]) -> None:
        self.link = link
        self.done = False
        self._parts: list[bytes | memoryview] = [part for frame in frames for part in frame if len(part)]

    def advance(self) -> bool:
        """Sends what fits; whether anything did."""
        taken = self.link.send(self._parts)
        self.link.midway_out = True
        left = taken
        while self._parts and left >= len(self._parts[0]):
            left -= len(self._parts.pop(0))
        if self._parts and left:
            self._parts[0] = memoryview(self._parts[0])[left:]
        if not self._parts:
            self.done = True
            self.link.midway_out = False
        return taken > 0


class _Receiving:
    """A receive under way: each header is checked before its payload is read; a fold happens block by block."""

    events = select.POLLIN
    kind = RECEIVE

    def __init__(
        self, link: Link, target: _Place | _FoldPlace, frames: list[tuple[bytes, memoryview]], judge: Judge
    ) -> None:
        self.link = link
        self.done = False
        self._frames = frames
        self._judge = judge
        self._left = -1  # bytes of the current frame still to come; -1: its header has not been accepted
        self._target = target

    def advance(self) -> bool:
        """Receives what is there, up to a stretch; whether anything was."""
        moved = False
        budget = STEP_BYTES
        while budget > 0 and not self.done:
            if self._left < 0:
                if not self._begin():
                    return moved
            else:
                received = self.link.recv_into(self._target.room(self._left))
                if not received:
                    return moved
                self._target.received(received)
                self._left -= received
                budget -= received
            moved = True
            if self._left == 0:
                self._left = -1
                self._frames.pop(0)
                self.done = not self._frames
        return moved

    def _begin(self) -> bool:
        """Whether the expected header is there; takes it."""
        header = self.link.header()
        if header is None:
            return False
        expected, payload = self._frames[0]
        if header != expected and self._judge(self.link, expected, header):
            return False
        self.link.take_header()
        self._left = len(payload)
        return True


class _Place:
    """Received bytes stay where they arrive."""

    def __init__(self, part: Array) -> None:
        self._data = _bytes(part)
        self._at = 0

    def room(self, limit: int) -> memoryview:
        return self._data[self._at : self._at + limit]

    def received(self, count: int) -> None:
        self._at += count


class _FoldPlace:
    """Received bytes pass through a block that stays in the cache, and are folded into the target from there."""

    def __init__(self, buffers: Buffers, move: Recv, fold: Fold) -> None:
        self._fold = buffers.fold
        self._left = fold.received_left
        self._mine = buffers.part(fold.mine, move.span)
        self._target = buffers.part(move.target, move.span)
        rows = len(self._target)
        self._row = self._target[:1].nbytes
        self._block = np.empty_like(self._target[: max(1, min(rows, FOLD_BYTES // max(1, self._row)))])
        self._bytes = _bytes(self._block)
        self._fill = 0
        self._done = 0

    def room(self, limit: int) -> memoryview:
        return self._bytes[self._fill : self._fill + limit]

    def received(self, count: int) -> None:
        self._fill += count
        start = self._done
        if self._fill < len(self._bytes) and start * self._row + self._fill < self._target.nbytes:
            return
        rows = self._fill // self._row
        here = slice(start, start + rows)
        theirs, mine = self._block[:rows], self._mine[here]
        self._fold(*((theirs, mine) if self._left else (mine, theirs)), self._target[here])
        self._done += rows
        self._fill = 0
