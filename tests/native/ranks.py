"""Ranks of one segment, as threads of this process or as processes of their own, and what each of them is to do."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from collectived_native import core, segment
from collectived_native.segment import Geometry, Waiting
from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import DType, ReduceOp

Array = np.ndarray[Any, np.dtype[Any]]
Found = TypeVar("Found")
REDUCE_OPS = {op: number for number, op in enumerate(ReduceOp, 1)}
DIGEST = b"the same for all"
TINY = Geometry(core.SCHEDULE_VERSION, 0, 0, 0, 1024, 512, 1 << 40, 1 << 20, 1 << 40)  # many ticks with few bytes
DIRECT = replace(TINY, direct=600)  # nearly all that may be read where it lies is
PAGE = mmap.PAGESIZE
SLOW_BEHIND = 16  # bytes: so far behind the source within a page some processors copy slowly
LIMIT_SECONDS = 50.0


def make_geometry(seats: int, like: Geometry | None = None) -> Geometry:
    return Geometry.choose(seats, cores=os.cpu_count() or 1) if like is None else replace(like, seats=seats)


class Failed(Exception):
    """A collective that did not complete: its reason, and the verdict."""

    def __init__(self, reason: int, verdict: tuple[int, int, int, tuple[int, ...]]) -> None:
        super().__init__(reason, verdict)
        self.reason, self.verdict = reason, verdict


@dataclass(frozen=True)
class Work:
    """What one rank puts into a collective: the plan's terms, the arrays in, and shapes and types of those out."""

    operation: int
    phases: tuple[core.Phase, ...]
    inputs: tuple[Array, ...]
    outputs: tuple[tuple[int, np.dtype[Any]], ...]
    reduce_op: int = 0
    root: int = 0

    def plan(self, engine: core.Engine, **terms: Any) -> core.Plan:
        return make_plan(engine, self.operation, self.phases, reduce_op=self.reduce_op, root=self.root, **terms)

    def make_outputs(self) -> tuple[Array, ...]:
        return tuple(np.full(count, 77).astype(dtype) for count, dtype in self.outputs)


def make_plan(
    engine: core.Engine,
    operation: int,
    phases: tuple[core.Phase, ...] = (),
    *,
    reduce_op: int = 0,
    root: int = 0,
    digest: bytes = DIGEST,
    terms: int = 0,
    is_open: bool = False,
    meets: int = core.MEETS_NOT,
    description: int = 0,
) -> core.Plan:
    return engine.plan(operation, reduce_op, root, phases, digest, terms, is_open, meets, description)


def make_room(nbytes: int, at: int) -> tuple[Array, Array]:
    """Memory of sevens, and so many bytes of it that begin there within a page."""
    memory = np.full(nbytes + 4 * PAGE, 7, np.uint8)
    begin = -memory.ctypes.data % PAGE + PAGE + at
    room = memory[begin : begin + nbytes]
    assert len(room) == nbytes
    return memory, room


def finish(engine: core.Engine, job: core.Job | None) -> None:
    """Waits for a collective.

    Raises:
        Failed: it did not complete.
    """
    while job is not None:
        state = job.wait(-1)
        if state == core.COMPLETE:
            return
        if state != core.KNOCK:
            raise Failed(state, engine.verdict())


def carry_out(engine: core.Engine, work: Work, timeout: float = 0.0) -> tuple[Array, ...]:
    """Carries out a collective, blocking; the results."""
    outputs = work.make_outputs()
    finish(engine, engine.run(work.plan(engine), work.inputs, outputs, int(timeout * 1e9), None))
    return outputs


def as_threads(
    seats: int,
    body: Callable[[core.Engine, int], Found],
    *,
    geometry: Geometry | None = None,
    waiting: Sequence[Waiting] | Waiting | None = None,
) -> list[Found]:
    """Runs `body(engine, rank)` on a thread per rank; what each returned. Its first error is raised."""
    geometry = make_geometry(seats, geometry)
    descriptor = segment.create(geometry)
    found: list[Any] = [None] * seats
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        own = waiting[rank] if isinstance(waiting, Sequence) else waiting
        engine = segment.attach(descriptor, geometry, rank, waiting=own)
        try:
            found[rank] = body(engine, rank)
        except BaseException as error:
            errors.append(error)
            engine.abort(core.ABORTED, rank)
        finally:
            together.wait(LIMIT_SECONDS)
            engine.detach()

    together = threading.Barrier(seats)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(seats)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    os.close(descriptor)
    if errors:
        raise errors[0]
    return found


def make_value(dtype: DType, count: int, rank: int) -> Array:
    """A value whose folds depend on the order of ranks, where the type allows that."""
    chance = np.random.default_rng(1000 * rank + count)
    kind = to_numpy(dtype)
    if dtype is DType.BOOL:
        return chance.integers(0, 2, count).astype(np.bool_)
    if dtype.is_integer:
        return np.frombuffer(chance.bytes(count * dtype.itemsize), kind).copy()
    value = chance.standard_normal(count) * 3
    if dtype.is_complex:
        return (value + 1j * chance.standard_normal(count)).astype(kind)
    return value.astype(kind)


def result_type(dtype: DType, reduce_op: ReduceOp) -> np.dtype[Any]:
    """The type of a fold's result."""
    if reduce_op is ReduceOp.MEAN and dtype.is_integer:
        return np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)
    return to_numpy(dtype)


def fold(dtype: DType, reduce_op: ReduceOp, values: Sequence[Array]) -> Array:
    """All values folded in rank order, as `tests/native/test_arithmetic.py` has compared with NumPy."""
    out = np.zeros(len(values[0]), result_type(dtype, reduce_op))
    core.fold_inputs(
        dtype, REDUCE_OPS[reduce_op], out.view(np.uint8), [v.view(np.uint8) for v in values], True, len(values), False
    )
    return out


def all_reduce(dtype: DType, value: Array, reduce_op: ReduceOp = ReduceOp.SUM) -> Work:
    count = len(value)
    phase = (int(dtype), (count,), (count,), (count,))
    return Work(core.ALL_REDUCE, (phase,), (value,), ((count, result_type(dtype, reduce_op)),), REDUCE_OPS[reduce_op])


def as_bytes(arrays: Sequence[Array]) -> list[bytes]:
    return [array.tobytes() for array in arrays]
