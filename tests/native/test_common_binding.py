"""Values and results in memory that all ranks map: the same bits, whoever's values lie there."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from tests.native.ranks import (
    REDUCE_OPS,
    TINY,
    Work,
    all_reduce,
    as_bytes,
    as_threads,
    finish,
    fold,
    make_value,
    result_type,
)
from tests.native.test_schedule import BUILDERS, Build

from collectived_native import core
from collectived_native.segment import Geometry
from collectived_proto.types import DType, ReduceOp

BYTES = 64 << 20
PER_RANK = 8 << 20
SLOTS_AT, SLOT_BYTES, SLOTS = 48 << 20, 4 << 20, 3


class Memory:
    """One rank's mappings of the common memory: all of it, the same writable, and its own part."""

    def __init__(self, engine: core.Engine, descriptor: int, rank: int) -> None:
        self.whole = mmap.mmap(descriptor, BYTES, prot=mmap.PROT_READ)
        self.writable = mmap.mmap(descriptor, BYTES)
        self.own = mmap.mmap(descriptor, PER_RANK, offset=rank * PER_RANK)
        engine.use_common(self.whole, self.writable)
        engine.add_own(self.own, rank * PER_RANK)

    def place(self, value: np.ndarray) -> np.ndarray:
        """The same value, in common memory."""
        found = np.frombuffer(self.own, value.dtype, value.size)
        found[:] = value
        return found

    def slot(self, number: int, count: int, dtype: np.dtype) -> np.ndarray:
        return np.frombuffer(self.whole, dtype, count, SLOTS_AT + number * SLOT_BYTES)


@pytest.fixture
def descriptor() -> int:
    made = os.memfd_create("common")
    os.ftruncate(made, BYTES)
    return made


def complete(engine: core.Engine, work: Work, plan: core.Plan, outputs: tuple[np.ndarray, ...]) -> int:
    """Carries out a collective; the slot of its result, or -1."""
    job = engine.submit(plan, work.inputs, outputs, 0, None, False)
    finish(engine, job)
    return job.slot()


@pytest.mark.parametrize("who", [(0, 1, 2), (1,), (0, 2), ()], ids=str)
@pytest.mark.parametrize("geometry", [TINY, None], ids=["tiny", "chosen"])
@pytest.mark.parametrize("count", [10, 5000, 300_001])
@pytest.mark.parametrize("kind", [(DType.FLOAT32, ReduceOp.SUM), (DType.INT8, ReduceOp.MEAN)], ids=str)
def test_sums_go_to_a_slot_where_all_values_lie_in_common_memory(
    kind: tuple[DType, ReduceOp], count: int, geometry: Geometry | None, who: tuple[int, ...], descriptor: int
) -> None:
    dtype, op = kind
    values = [make_value(dtype, count, r) for r in range(3)]
    wanted = fold(dtype, op, values)
    is_large = count * dtype.itemsize > (geometry or Geometry.choose(3, cores=os.cpu_count() or 1)).small

    def body(engine: core.Engine, rank: int) -> list[bool]:
        memory = Memory(engine, descriptor, rank)
        found = []
        for held in (0b000, 0b001 << rank, 0b111):
            own = memory.place(values[rank]) if rank in who else values[rank].copy()
            work = all_reduce(dtype, own, op)
            plan = work.plan(engine)
            plan.use_slots(SLOTS_AT, SLOT_BYTES, SLOTS, held)
            outputs = work.make_outputs()
            slot = complete(engine, work, plan, outputs)
            expected = 0 if len(who) == 3 and is_large and held == 0 else -1
            result = outputs[0] if slot < 0 else memory.slot(slot, count, wanted.dtype)
            found.append(slot == expected and result.tobytes() == wanted.tobytes())
        return found

    assert as_threads(3, body, geometry=geometry) == [[True] * 3] * 3
    os.close(descriptor)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "barrier"])
def test_every_collective_reads_straight_from_common_memory(name: str, share: bool, descriptor: int) -> None:
    """`share`: all values lie there; else those of odd ranks do."""
    build: Build = BUILDERS[name]
    seats = 4

    def body(engine: core.Engine, rank: int) -> list[int]:
        memory = Memory(engine, descriptor, rank)
        wrong = []
        for count in (3, 700, 90_000):
            work, wanted = build(seats, rank, count)
            if share or rank % 2:
                work = Work(
                    work.operation,
                    work.phases,
                    tuple(map(memory.place, work.inputs)),
                    work.outputs,
                    work.reduce_op,
                    work.root,
                )
            for _ in range(2):
                outputs = work.make_outputs()
                complete(engine, work, work.plan(engine), outputs)
                if as_bytes(outputs) != as_bytes(wanted):
                    wrong.append(count)
        return wrong

    assert as_threads(seats, body, geometry=TINY) == [[]] * seats
    os.close(descriptor)


def test_memory_and_slots_that_do_not_fit_are_refused(descriptor: int) -> None:
    def body(engine: core.Engine, rank: int) -> None:
        value = np.zeros(100, np.float32)
        plan = all_reduce(DType.FLOAT32, value).plan(engine)
        with pytest.raises(RuntimeError, match="no common memory yet"):
            engine.add_own(bytearray(10), 0)
        plan.use_slots(0, 400, 64, 0)
        with pytest.raises(ValueError, match="do not lie in common memory"):
            engine.run(plan, (value,), (value.copy(),), 0, None)
        memory = Memory(engine, descriptor, rank)
        with pytest.raises(ValueError, match="does not lie within"):
            engine.add_own(memory.own, BYTES - 1)
        with pytest.raises(ValueError, match="at most 64 slots"):
            plan.use_slots(0, 399, 1, 0)
        with pytest.raises(ValueError, match="at most 64 slots"):
            plan.use_slots(0, 400, 65, 0)
        assert result_type(DType.FLOAT32, ReduceOp.SUM) == value.dtype and REDUCE_OPS[ReduceOp.SUM] == 1

    as_threads(1, body)
    os.close(descriptor)
