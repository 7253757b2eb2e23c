"""A plan whose values travel compressed: the same executor, on memory whose rows are blocks of 128 values.

INPUT and SCRATCH are float32; values sent from them are compressed on the way, values received are expanded on the way,
and all folds are of float32. OUTPUT is kept as it travels: the maker of a final value compresses it once, and all
workers, itself included, have the expansion of that. So all have the same bits, however often it is passed on. Where no
worker passes OUTPUT on (a reduce, a reduce_scatter, one shot), final values are not compressed again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_native import core
from collectived_proto.types import DType, ReduceOp
from collectived_runtime.device.arithmetic import YIELD_INTERVAL_BYTES, Arithmetic
from collectived_runtime.engine.base.aligned import allocate
from collectived_runtime.engine.base.arenas import Workspace
from collectived_runtime.engine.compile.blocks import BLOCK_VALUES, BlockLayout, ValueRun
from collectived_runtime.engine.compile.program import PackTask
from collectived_runtime.engine.run.schedule import (
    YIELD_NOW,
    Batches,
    Buffers,
    Collection,
    Headers,
    LinkMemory,
    ReceiveTarget,
    Wait,
    execute,
)
from collectived_runtime.engine.run.task import TaskContext
from collectived_runtime.plan.moves import Buffer, RecvMove, SendMove, Span
from collectived_runtime.plan.wide_moves import CollectMove, NativeMove, WidePlan

Array = NDArray[Any]
Expand = Callable[[int, Array], None]  # takes compressed blocks that come at that place of a span

STRETCH_BLOCKS = 512  # compressed or expanded at a time: 256 KiB of values stay in the cache


def carry_compressed(context: TaskContext, buffers: Buffers) -> Iterator[Wait]:
    """Runs the plan of a task that travels compressed.

    Args:
        buffers: of its vector: partial sums in float32, and where the result goes.
    """
    task, workspace, how = context.task, context.tools.workspace, context.arithmetic
    blocks = task.blocks
    assert blocks is not None and how is not None
    arithmetic = Arithmetic(how.operation, DType.FLOAT32, DType.FLOAT32, how.contributions)
    names = (task.pack_number, "blocks"), (task.pack_number, "compressed")
    for name in names:
        workspace.acquire(name)
    try:
        memory = _make_memory(task, blocks, buffers, arithmetic, workspace)
        if not blocks.is_plain:
            yield from _copy_in(blocks, buffers.input, memory.input)
        yield from execute(task.plan, memory, context.transport)
        if buffers.output is not None and not (blocks.is_plain and buffers.output is buffers.scratch):
            yield from _copy_out(blocks, memory.scratch, buffers, task)
    finally:
        for name in names:
            workspace.release(name)


def _make_memory(
    task: PackTask, blocks: BlockLayout, buffers: Buffers, arithmetic: Arithmetic, workspace: Workspace
) -> CompressedBuffers:
    """Blocks where the vector lies, if they follow each other there; else beside it. Shared by the shards of a pack."""
    if blocks.is_plain:
        first, scratch = (_as_blocks(one) for one in (buffers.input, buffers.scratch))
    else:
        nbytes = task.block_count * BLOCK_VALUES * np.dtype(np.float32).itemsize
        memory = workspace.get_buffer((task.pack_number, "blocks"), nbytes)
        first = scratch = _as_blocks(memory.view(np.float32))
    output = None
    if _passes_output_on(task.plan):
        nbytes = task.block_count * blocks.block_bytes
        output = workspace.get_buffer((task.pack_number, "compressed"), nbytes).reshape(-1, blocks.block_bytes)
    return CompressedBuffers(blocks.format, first, scratch, output, arithmetic)


def _as_blocks(vector: Array) -> Array:
    return vector[: len(vector) // BLOCK_VALUES * BLOCK_VALUES].reshape(-1, BLOCK_VALUES)


def _passes_output_on(plan: WidePlan) -> bool:
    """Whether final values go from one worker to another."""
    return any(
        (isinstance(move, SendMove) and move.source is Buffer.OUTPUT)
        or (isinstance(move, RecvMove) and move.target is Buffer.OUTPUT)
        for moves in plan
        for move in moves
    )


def _copy_in(blocks: BlockLayout, vector: Array, into: Array) -> Iterator[Wait]:
    """Brings values into their blocks, and zeros behind the last of an array."""
    flat = into.reshape(-1)
    for run, start, stop in _stretches(blocks.runs):
        if start:
            yield YIELD_NOW
        np.copyto(flat[run.target + start : run.target + stop], vector[run.start + start : run.start + stop])
        flat[run.target + run.stop - run.start : run.end] = 0


def _copy_out(blocks: BlockLayout, values: Array, buffers: Buffers, task: PackTask) -> Iterator[Wait]:
    """Brings final values out of their blocks to where the result lies, which may be a part of the vector."""
    flat, output = values.reshape(-1), buffers.output
    assert output is not None
    ahead = 0 if buffers.windows is None else buffers.windows[Buffer.OUTPUT].starts[0]
    wanted = Span(ahead, ahead + len(output))
    narrow = Arithmetic(ReduceOp.SUM, task.pack.result_dtype, task.pack.result_dtype, 1)
    for run, start, stop in _stretches(blocks.runs):
        first, last = max(run.start + start, wanted.start), min(run.start + stop, wanted.stop)
        if first >= last:
            continue
        source = flat[run.target + first - run.start : run.target + last - run.start]
        narrow.finish(source, output[first - ahead : last - ahead])
        if start:
            yield YIELD_NOW


def _stretches(runs: tuple[ValueRun, ...]) -> Iterator[tuple[ValueRun, int, int]]:
    """Each run with the part of it that is copied between two looks at the world."""
    stretch = YIELD_INTERVAL_BYTES // np.dtype(np.float32).itemsize
    for run in runs:
        length = run.stop - run.start
        for start in range(0, length, stretch):
            yield run, start, min(start + stretch, length)


class CompressedBuffers(LinkMemory):
    """The memory of one pack and shard, in blocks.

    Attributes:
        input, scratch: rows of 128 float32; SCRATCH has the expanded result at the end.
        output: compressed rows of the result; None: no worker passes it on.
    """

    def __init__(self, format: int, input: Array, scratch: Array, output: Array | None, arithmetic: Arithmetic) -> None:
        self.input = input
        self.scratch = scratch
        self.output = output
        self._format = format
        self._block_bytes = core.block_bytes(format)
        self._arithmetic = arithmetic
        self._sent: dict[Span, _CompressedInput] = {}  # the contribution of this participant, as it is sent

    def _values(self, buffer: Buffer) -> Array:
        assert buffer is not Buffer.OUTPUT
        return self.input if buffer is Buffer.INPUT else self.scratch

    def _compress_input(self, span: Span) -> _CompressedInput:
        found = self._sent.get(span)
        if found is None:
            found = self._sent[span] = _CompressedInput(self._format, self.input[span.start : span.stop])
        return found

    def apply_finish(self, source: Buffer, span: Span) -> None:
        values = self._values(source)
        is_mean = self._arithmetic.operation is ReduceOp.MEAN
        for start in range(span.start, span.stop, STRETCH_BLOCKS):
            rows = slice(start, min(start + STRETCH_BLOCKS, span.stop))
            result = self.scratch[rows]
            if is_mean:
                self._arithmetic.finish(values[rows].reshape(-1), result.reshape(-1))
            elif values is not self.scratch:
                np.copyto(result, values[rows])
            if self.output is not None:
                core.compress(self._format, self.output[rows], result)
                core.expand(self._format, result, self.output[rows])

    def run_native(self, move: NativeMove) -> Iterator[Wait]:
        raise AssertionError("an engine does not fold blocks")

    def row_bytes(self, buffer: Buffer) -> int:
        return self._block_bytes

    def read(self, move: SendMove, headers: Headers) -> Batches:
        span = move.span
        if move.source is Buffer.INPUT:
            get_rows = self._compress_input(span).get
        elif move.source is Buffer.OUTPUT:
            assert self.output is not None
            kept = self.output[span.start : span.stop]

            def get_rows(start: int, stop: int) -> Array:
                return kept[start:stop]

        else:
            get_rows = _Compressor(self._format, self.scratch[span.start : span.stop]).get
        at = 0
        for header, nbytes in headers:
            parts: list[bytes | memoryview] = [header]
            for start in range(at, at + nbytes // self._block_bytes, STRETCH_BLOCKS):
                stop = min(start + STRETCH_BLOCKS, at + nbytes // self._block_bytes)
                parts.append(get_rows(start, stop).reshape(-1).data)
                yield parts
                parts = []
            if parts:
                yield parts
            at += nbytes // self._block_bytes

    def open_target(self, move: RecvMove) -> ReceiveTarget:
        span, fold = move.span, move.fold
        result = self.scratch[span.start : span.stop]
        if fold is not None:
            mine = self._values(fold.mine)[span.start : span.stop]

            def take(start: int, rows: Array) -> None:  # a sum is the same bits whatever stands left
                place = slice(start, start + len(rows))
                core.add_expanded(self._format, result[place], mine[place], rows)

        else:

            def take(start: int, rows: Array) -> None:
                core.expand(self._format, result[start : start + len(rows)], rows)

        if move.target is Buffer.OUTPUT:
            assert self.output is not None
            return _BlockTarget(self.output[span.start : span.stop], len(span), take)
        rows = min(len(span), STRETCH_BLOCKS)
        room = allocate(rows * self._block_bytes).reshape(rows, self._block_bytes)
        return _BlockTarget(room, len(span), take)

    def open_collection(self, move: CollectMove, peers: Container[int]) -> Collection:
        assert move.mine is Buffer.INPUT, "only contributions are folded in order"
        span = move.span
        mine = self._compress_input(span)
        return _CompressedParts(self._format, move.order, peers, mine, self.scratch[span.start : span.stop])


class _Compressor:
    """Compresses rows when they are asked for, into memory that the next ones overwrite."""

    def __init__(self, format: int, values: Array) -> None:
        self._format = format
        self._values = values
        self._room = np.empty((min(len(values), STRETCH_BLOCKS), core.block_bytes(format)), np.uint8)

    def get(self, start: int, stop: int) -> Array:
        rows = self._room[: stop - start]
        core.compress(self._format, rows, self._values[start:stop])
        return rows


class _CompressedInput:
    """Rows of INPUT, compressed when they are first asked for, and kept: all get the same."""

    def __init__(self, format: int, values: Array) -> None:
        self._format = format
        self._values = values
        self._rows = np.empty((len(values), core.block_bytes(format)), np.uint8)
        self._done = 0

    def get(self, start: int, stop: int) -> Array:
        while self._done < stop:
            rows = slice(self._done, min(self._done + STRETCH_BLOCKS, len(self._rows)))
            core.compress(self._format, self._rows[rows], self._values[rows])
            self._done = rows.stop
        return self._rows[start:stop]


class _BlockTarget:
    """Received rows are taken stretch by stretch. `room` is for all of them, or for a stretch, which is used again."""

    def __init__(self, room: Array, rows: int, take: Expand) -> None:
        self._room = room
        self._rows = rows
        self._take = take
        self._done = 0
        self._filled = 0  # bytes of the current stretch
        self._begin_stretch()

    def _begin_stretch(self) -> None:
        length = min(STRETCH_BLOCKS, self._rows - self._done)
        first = self._done if len(self._room) == self._rows else 0
        self._stretch = self._room[first : first + length]
        self._bytes = self._stretch.reshape(-1).data

    def get_buffer(self, limit: int) -> memoryview:
        return self._bytes[self._filled : self._filled + limit]

    def buffer_updated(self, count: int) -> None:
        self._filled += count
        if self._filled == len(self._bytes):
            self._take(self._done, self._stretch)
            self._done += len(self._stretch)
            self._filled = 0
            self._begin_stretch()


class _CompressedParts:
    """A `Collection` of compressed parts, this worker's own among them: all workers fold the same.

    Rows that have come from all are folded at once, in the order of the move.
    """

    def __init__(
        self, format: int, order: tuple[int, ...], peers: Container[int], mine: _CompressedInput, total: Array
    ) -> None:
        self._format = format
        self._mine = mine
        self._total = total
        self._folded = 0
        rows, row_bytes = len(total), core.block_bytes(format)
        self._parts = [allocate(rows * row_bytes).reshape(rows, row_bytes) if peer in peers else None for peer in order]
        self._arrived = {peer: 0 for peer in order if peer in peers}
        self.targets: dict[int, ReceiveTarget] = {
            peer: self._make_target(peer, part)
            for peer, part in zip(order, self._parts, strict=True)
            if part is not None
        }

    def _make_target(self, peer: int, part: Array) -> _BlockTarget:
        def take(start: int, rows: Array) -> None:
            self._arrived[peer] = start + len(rows)
            self._fold_until(min(self._arrived.values()))

        return _BlockTarget(part, len(part), take)

    def fold(self) -> None:
        self._fold_until(len(self._total))

    def _fold_until(self, stop: int) -> None:
        while self._folded < stop:
            rows = slice(self._folded, min(self._folded + STRETCH_BLOCKS, stop))
            total = self._total[rows]
            first, *others = (
                self._mine.get(rows.start, rows.stop) if part is None else part[rows] for part in self._parts
            )
            core.expand(self._format, total, first)
            for part in others:
                core.add_expanded(self._format, total, total, part)
            self._folded = rows.stop
