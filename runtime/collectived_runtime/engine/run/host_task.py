"""A task on memory of the host: fold the local ranks, carry the plan across workers, deliver."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived_runtime.device.arithmetic import YIELD_INTERVAL_BYTES, Arithmetic
from collectived_runtime.engine.base.aligned import allocate_like
from collectived_runtime.engine.clients.local_rank import InputBuffers
from collectived_runtime.engine.compile.partition import Partition, Window, find_single_run
from collectived_runtime.engine.compile.program import CompiledCollective, PackTask
from collectived_runtime.engine.record.counters import Counters
from collectived_runtime.engine.run.compressed import carry_compressed
from collectived_runtime.engine.run.fold_pool import MIN_PARALLEL_BYTES, PIECE_BYTES
from collectived_runtime.engine.run.schedule import YIELD_NOW, Buffers, ReportedOutput, Wait, execute
from collectived_runtime.engine.run.task import TaskContext, TaskTools
from collectived_runtime.plan.moves import Buffer

Array = NDArray[Any]


def run(context: TaskContext) -> Iterator[Wait]:
    """Carries out a task whose values lie in memory of the host."""
    program, task, sources, tools = context.program, context.task, context.sources, context.tools
    arithmetic = context.arithmetic
    output = None if context.result is None else _result_view(task, context.result)
    if arithmetic is not None and program.is_single_worker and task.partition is None:
        if output is not None and sources:
            yield from _combine(task, arithmetic, sources, output, tools)
        return
    began = time.monotonic()
    tools.workspace.acquire(task.pack_number)
    try:
        buffers = yield from _prepare_buffers(context, output)
        context.mark_fold(began)
        if context.parts is not None and output is not None:
            buffers.reported = ReportedOutput(context.parts, task.result_slice.start)
        if task.blocks is None:
            yield from execute(task.plan, buffers, context.transport)
        else:
            yield from carry_compressed(context, buffers)
    finally:
        tools.workspace.release(task.pack_number)


def _prepare_buffers(context: TaskContext, output: Array | None) -> Generator[Wait, None, Buffers]:
    """Prepare the buffers of the plan: the values of the local ranks, folded or put side by side."""
    task, sources, tools = context.task, context.sources, context.tools
    arithmetic, cut = context.arithmetic, task.partition
    if arithmetic is not None:
        return (yield from _prepare_folded(task, arithmetic, sources, output, tools, context.partials))
    if cut is None:
        return (yield from _prepare_moved(task, sources, output, tools))
    leaves = {
        rank: _require_contiguous(source, task).view(task.dtype)
        for rank, source in zip(context.program.contributors, sources, strict=True)
    }
    return (yield from _prepare_partitioned(task, cut, leaves, output, tools))


def run_inline(
    program: CompiledCollective, sources: Sequence[InputBuffers], result: NDArray[np.uint8], counters: Counters
) -> None:
    """Carries out a program that `is_inline` at once, without a task.

    Args:
        sources: what the contributing local ranks submitted, in rank order.
        result: the instance's result slot.
    """
    task, arithmetic = program.tasks[0], program.arithmetic[0]
    for arrays, out in _split_stretches(task, sources, _result_view(task, result)):
        if arithmetic is None:
            np.copyto(out, arrays[0])
            counters.copied_bytes += out.nbytes
        else:
            arithmetic.combine(arrays, out)
            counters.folded_bytes += len(arrays) * arrays[0].nbytes


def _combine(
    task: PackTask, arithmetic: Arithmetic, sources: Sequence[InputBuffers], output: Array, tools: TaskTools
) -> Iterator[Wait]:
    """The result, where all that contribute are here."""
    for arrays, out in _split_stretches(task, sources, output):
        yield from fold_in_stretches(arithmetic.combine, arithmetic.partial_bytes, arrays, out, tools)


def _result_view(task: PackTask, result: NDArray[np.uint8]) -> Array:
    """Where the result of a pack lies."""
    return result[task.result_slice].view(task.result_dtype)


def _split_stretches(
    task: PackTask, sources: Sequence[InputBuffers], out: Array
) -> Iterable[tuple[list[Array], Array]]:
    """Yield the arrays of all sources for one stretch of the task, and that stretch of `out`: all of it, or by leaf."""
    start, stop, number = task.span.start, task.span.stop, task.pack_number
    arrays = []
    for source in sources:
        whole = source.contiguous_pack(number) if task.is_in_order else None
        if whole is None:
            return _split_by_leaf(task, sources, out)
        arrays.append(whole.view(task.dtype)[start:stop])
    return [(arrays, out[start:stop])]


def _split_by_leaf(task: PackTask, sources: Sequence[InputBuffers], out: Array) -> Iterator[tuple[list[Array], Array]]:
    dtype, start, stop = task.dtype, task.span.start, task.span.stop
    by_leaf = [_source_pieces(source, task, index) for index, source in enumerate(sources)]
    for pieces in zip(*by_leaf, strict=True):
        arrays = [memory.view(dtype) for _, memory in pieces]
        offset = pieces[0][0]
        first, last = max(offset, start), min(offset + len(arrays[0]), stop)
        if first < last:
            yield [array[first - offset : last - offset] for array in arrays], out[first:last]


def _prepare_moved(
    task: PackTask, sources: Sequence[InputBuffers], output: Array | None, tools: TaskTools
) -> Generator[Wait, None, Buffers]:
    """Buffers for elements that travel as they are; at most one local rank contributes."""
    dtype = task.dtype
    mine = output
    if sources:
        whole = sources[0].contiguous_pack(task.pack_number)
        if whole is not None:
            mine = whole.view(dtype)
        else:
            mine = tools.workspace.get_buffer(task.pack_number, task.pack.count * dtype.itemsize).view(dtype)
            for offset, leaf in sources[0].leaves(task.pack_number):
                part = leaf.view(dtype)
                np.copyto(mine[offset : offset + len(part)], part)
                tools.counters.copied_bytes += part.nbytes
                yield YIELD_NOW
    assert mine is not None
    if output is None and sources:  # only the owners of the value read it here
        output = mine
    return Buffers(mine, mine, output, refuse_fold, copy_over, keep_in_place)


def _prepare_partitioned(
    task: PackTask, cut: Partition, leaves: Mapping[int, Array], output: Array | None, tools: TaskTools
) -> Generator[Wait, None, Buffers]:
    """Buffers for rows that go their ways: what stays on this worker is put in its place at once."""
    dtype = task.dtype
    if output is None:
        output = np.empty(0, dtype)
    tools.counters.copied_bytes += sum(part.stop - part.start for part in cut.local_copies) * dtype.itemsize
    for part in cut.local_copies:
        yield from copy_in_stretches(leaves[part.rank][part.start : part.stop], output[part.target :])
    windows = {Buffer.OUTPUT: cut.receive_window}
    sending = output
    if cut.outgoing and (run := find_single_run(cut.outgoing)) is not None:
        rank, ahead = run
        sending = leaves[rank]
        windows[Buffer.INPUT] = Window((ahead,))
    elif cut.outgoing:
        end = max(cut.send_window.translate(part.target) + part.stop - part.start for part in cut.outgoing)
        sending = tools.workspace.get_buffer(task.pack_number, end * dtype.itemsize).view(dtype)
        windows[Buffer.INPUT] = cut.send_window
        tools.counters.copied_bytes += sum(part.stop - part.start for part in cut.outgoing) * dtype.itemsize
        for part in cut.outgoing:
            yield from copy_in_stretches(
                leaves[part.rank][part.start : part.stop], sending[cut.send_window.translate(part.target) :]
            )
    return Buffers(sending, sending, output, refuse_fold, _skip_finish, keep_in_place, windows)


def copy_in_stretches(source: Array, target: Array) -> Iterator[Wait]:
    """Copies to the start of `target`, with looks at the world in between."""
    stretch = YIELD_INTERVAL_BYTES // source.itemsize
    for start in range(0, len(source), stretch):
        piece = source[start : start + stretch]
        np.copyto(target[start : start + len(piece)], piece)
        if start + stretch < len(source):
            yield YIELD_NOW


def _prepare_folded(
    task: PackTask,
    arithmetic: Arithmetic,
    sources: Sequence[InputBuffers],
    output: Array | None,
    tools: TaskTools,
    given: Sequence[NDArray[np.uint8]],
) -> Generator[Wait, None, Buffers]:
    """Buffers for elements that are folded: first the local ranks, in rank order, into partial sums.

    Where they have done that themselves, `given` are the partial sums of each pack.
    A single rank's memory is read where it lies when it needs no widening, and partial sums are kept where the result
    will be when the types allow it: nothing is copied that need not be.
    """
    count = task.pack.count
    cut = task.partition
    windows = None if cut is None else {Buffer.OUTPUT: cut.receive_window}
    ways = arithmetic.fold, arithmetic.finish, arithmetic.finish_in_place
    if given:
        partials = arithmetic.view_partials(given[task.pack_number], count)
        if cut is not None and not cut.is_in_order:
            partials = _put_in_order(cut, partials)
        return Buffers(partials, partials, output, *ways, windows)
    if output is not None and arithmetic.can_finish_in_place and len(output) == count:
        partials = output
    else:  # shared by the shards of a pack, each of which keeps to its span
        nbytes = count * arithmetic.partial_bytes
        partials = arithmetic.view_partials(tools.workspace.get_buffer(task.pack_number, nbytes), count)
    if not sources:  # a signal: no rank reads its value
        return Buffers(partials, partials, partials, arithmetic.fold, copy_over, keep_in_place)
    whole = sources[0].contiguous_pack(task.pack_number) if len(sources) == 1 and task.is_in_order else None
    if whole is not None and arithmetic.can_finish_in_place:
        mine = whole.view(task.dtype)
        return Buffers(mine, partials, output, *ways, windows)
    for arrays, out in _split_stretches(task, sources, partials):
        yield from fold_in_stretches(arithmetic.fold_all, arithmetic.partial_bytes, arrays, out, tools)
    return Buffers(partials, partials, output, *ways, windows)


def _put_in_order(cut: Partition, partials: Array) -> Array:
    """Partial sums that stand as in the leaves of ranks, in wide order."""
    ordered = allocate_like(partials)
    for part in cut.outgoing:
        if part.rank == cut.outgoing[0].rank:
            ordered[part.target : part.target + part.stop - part.start] = partials[part.start : part.stop]
    return ordered


def _source_pieces(source: InputBuffers, task: PackTask, index: int) -> list[tuple[int, NDArray[np.uint8]]]:
    """(position in the pack, bytes) of what source number `index` contributes."""
    if task.partition is None:
        return source.leaves(task.pack_number)
    whole, itemsize = _require_contiguous(source, task), task.pack.dtype.itemsize
    ranks = list(dict.fromkeys(part.rank for part in task.partition.outgoing))
    parts = [part for part in task.partition.outgoing if part.rank == ranks[index]]
    return [(part.target, whole[part.start * itemsize : part.stop * itemsize]) for part in parts]


def _require_contiguous(source: InputBuffers, task: PackTask) -> NDArray[np.uint8]:
    whole = source.contiguous_pack(task.pack_number)
    assert whole is not None, "a leaf that is cut travels by itself"
    return whole


def fold_in_stretches(
    fold: Callable[[list[Array], Array], None], row_bytes: int, arrays: list[Array], out: Array, tools: TaskTools
) -> Iterator[Wait]:
    """fold(arrays, out), stretch by stretch, yielding in between. Helpers fold parts of large arrays.

    Args:
        row_bytes: that one row of `out` takes while it is folded.
    """

    tools.counters.folded_bytes += len(arrays) * arrays[0].nbytes

    def part(start: int, stop: int) -> None:
        fold([array[start:stop] for array in arrays], out[start:stop])

    length = len(out)
    if not tools.pool_client.has_helpers or length * row_bytes < MIN_PARALLEL_BYTES:
        stretch = max(1, YIELD_INTERVAL_BYTES // row_bytes)
        for start in range(0, length, stretch):
            if start:
                yield YIELD_NOW
            part(start, min(start + stretch, length))
        return
    job = tools.pool_client.submit(length, max(1, PIECE_BYTES // row_bytes), part)
    try:
        while job.step():
            yield YIELD_NOW
        while not job.done:
            yield [(job, 0)]
    finally:
        job.stop()  # when this returns no thread reads or writes any of it
    if job.error is not None:
        raise job.error


def refuse_fold(left: Array, right: Array, out: Array) -> None:
    raise AssertionError("a plan folded elements that are only moved")


def copy_over(source: Array, out: Array) -> None:
    np.copyto(out, source)


def _skip_finish(source: Array, out: Array) -> None:
    """A worker's own rows are put in their place before the plan runs, or are left to its rank."""


def keep_in_place(out: Array) -> None:
    """Nothing to do: moved elements are final where they are."""
