"""Every collective gives what its definition says, bit by bit, whatever the size, the type and the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tests.native.ranks import (
    DIRECT,
    REDUCE_OPS,
    TINY,
    Array,
    Work,
    all_reduce,
    as_bytes,
    as_threads,
    carry_out,
    finish,
    fold,
    make_value,
    result_type,
)

from collectived_native import core
from collectived_native.segment import Geometry
from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import DType, ReduceOp

SEATS = (1, 2, 3, 4, 5)
# Around every threshold of the tiny geometry: nothing, one element, one tick, more than one tick, many steps.
COUNTS = (0, 1, 17, 64, 127, 128, 129, 255, 256, 257, 700, 1025, 4000)
Build = Callable[[int, int, int], tuple[Work, list[Array]]]  # (seats, rank, count): its work, and what must come out


def split(count: int, seats: int) -> list[int]:
    return [count // seats + (rank < count % seats) for rank in range(seats)]


def pieces(value: Array, sizes: Sequence[int]) -> list[Array]:
    return np.split(value, np.cumsum(sizes)[:-1])


def build_all_reduce(seats: int, rank: int, count: int) -> tuple[Work, list[Array]]:
    values = [make_value(DType.FLOAT32, count, r) for r in range(seats)]
    return all_reduce(DType.FLOAT32, values[rank]), [fold(DType.FLOAT32, ReduceOp.SUM, values)]


def build_reduce(seats: int, rank: int, count: int) -> tuple[Work, list[Array]]:
    root = seats - 1
    values = [make_value(DType.BFLOAT16, count, r) for r in range(seats)]
    out = ((count, to_numpy(DType.BFLOAT16)),) if rank == root else ()
    phase = (int(DType.BFLOAT16), (count,), (count,), (count,) if rank == root else ())
    work = Work(core.REDUCE, (phase,), (values[rank],), out, REDUCE_OPS[ReduceOp.MEAN], root)
    return work, [fold(DType.BFLOAT16, ReduceOp.MEAN, values)] if rank == root else []


def build_broadcast(seats: int, rank: int, count: int) -> tuple[Work, list[Array]]:
    root = seats // 2
    value = make_value(DType.INT16, count, root)
    is_root = rank == root
    phase = (int(DType.INT16), (count,), (count,) if is_root else (), () if is_root else (count,))
    out = () if is_root else ((count, value.dtype),)
    return Work(core.BROADCAST, (phase,), (value,) if is_root else (), out, 0, root), [] if is_root else [value]


def build_all_gather(seats: int, rank: int, count: int) -> tuple[Work, list[Array]]:
    counts = tuple(count + 3 * r if r != 1 else 0 for r in range(seats))
    values = [make_value(DType.FLOAT64, counts[r], r) for r in range(seats)]
    phase = (int(DType.FLOAT64), counts, (counts[rank],), (sum(counts),))
    out = ((sum(counts), values[0].dtype),)
    return Work(core.ALL_GATHER, (phase,), (values[rank],), out), [np.concatenate(values)]


def build_gather(seats: int, rank: int, count: int) -> tuple[Work, list[Array]]:
    root = 0
    counts = tuple(count + r for r in range(seats))
    values = [make_value(DType.UINT8, counts[r], r) for r in range(seats)]
    phase = (int(DType.UINT8), counts, (counts[rank],), (sum(counts),) if rank == root else ())
    out = ((sum(counts), values[0].dtype),) if rank == root else ()
    return Work(core.GATHER, (phase,), (values[rank],), out, 0, root), [np.concatenate(values)] if rank == root else []


def build_scatter(seats: int, rank: int, count: int) -> tuple[Work, list[Array]]:
    root = seats - 1
    counts = split(count, seats)
    value = make_value(DType.COMPLEX64, count, root)
    is_root = rank == root
    phase = (int(DType.COMPLEX64), tuple(counts), (count,) if is_root else (), (counts[rank],))
    work = Work(core.SCATTER, (phase,), (value,) if is_root else (), ((counts[rank], value.dtype),), 0, root)
    return work, [pieces(value, counts)[rank]]


def build_reduce_scatter(seats: int, rank: int, count: int) -> tuple[Work, list[Array]]:
    counts = split(count, seats)
    values = [make_value(DType.INT32, count, r) for r in range(seats)]
    whole = fold(DType.INT32, ReduceOp.MEAN, values)
    phase = (int(DType.INT32), tuple(counts), (count,), (counts[rank],))
    work = Work(
        core.REDUCE_SCATTER, (phase,), (values[rank],), ((counts[rank], whole.dtype),), REDUCE_OPS[ReduceOp.MEAN]
    )
    return work, [pieces(whole, counts)[rank]]


def build_all_to_all(seats: int, rank: int, count: int) -> tuple[Work, list[Array]]:
    sizes = [[(count * (1 + s) + d) % (count + 2) for d in range(seats)] for s in range(seats)]
    values = [make_value(DType.UINT16, sum(sizes[s]), s) for s in range(seats)]
    wanted = np.concatenate([pieces(values[s], sizes[s])[rank] for s in range(seats)])
    counts = tuple(size for row in sizes for size in row)
    phase = (int(DType.UINT16), counts, (len(values[rank]),), (len(wanted),))
    return Work(core.ALL_TO_ALL, (phase,), (values[rank],), ((len(wanted), wanted.dtype),)), [wanted]


def build_barrier(seats: int, rank: int, count: int) -> tuple[Work, list[Array]]:
    return Work(core.BARRIER, (), (), ()), []


BUILDERS = {name[6:]: build for name, build in globals().items() if name.startswith("build_")}


@pytest.mark.parametrize("seats", SEATS)
@pytest.mark.parametrize("geometry", [TINY, DIRECT, None], ids=["tiny", "direct", "chosen"])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_collective_gives_what_its_definition_says(name: str, geometry: Geometry | None, seats: int) -> None:
    build: Build = BUILDERS[name]
    counts = (1, 30_000, 400_000) if geometry is None else COUNTS

    def body(engine: core.Engine, rank: int) -> list[int]:
        wrong = []
        for count in counts:
            work, wanted = build(seats, rank, count)
            if as_bytes(carry_out(engine, work)) != as_bytes(wanted):
                wrong.append(count)
        return wrong

    assert as_threads(seats, body, geometry=geometry) == [[]] * seats


@pytest.mark.parametrize("seats", [2, 3])
@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.BOOL], ids=lambda dtype: dtype.label)
def test_every_type_and_operation_folds_to_the_same_bits_by_ticks_as_at_once(dtype: DType, seats: int) -> None:
    operations = [op for op in ReduceOp if core.arithmetic_sizes(dtype, REDUCE_OPS[op])[1]]

    def body(engine: core.Engine, rank: int) -> list[str]:
        wrong = []
        for op in operations:
            for count in (5, 1000):
                values = [make_value(dtype, count, r) for r in range(seats)]
                found = carry_out(engine, all_reduce(dtype, values[rank], op))
                if found[0].tobytes() != fold(dtype, op, values).tobytes():
                    wrong.append(f"{op.value} {count}")
        return wrong

    assert len(operations) >= 3
    assert as_threads(seats, body, geometry=TINY) == [[]] * seats


@pytest.mark.parametrize("leaf_counts", [(0, 3, 0, 500, 1), (40,) * 64, (2000, 1, 3000)])
def test_a_nest_of_several_types_moves_as_one(leaf_counts: tuple[int, ...]) -> None:
    seats, types = 3, (DType.FLOAT32, DType.INT8)

    def body(engine: core.Engine, rank: int) -> bool:
        values = [
            [[make_value(dtype, n, 100 * r + i) for i, n in enumerate(leaf_counts)] for dtype in types]
            for r in range(seats)
        ]
        total = (sum(leaf_counts),)
        work = Work(
            core.ALL_REDUCE,
            tuple((int(dtype), total, leaf_counts, leaf_counts) for dtype in types),
            tuple(leaf for pack in values[rank] for leaf in pack),
            tuple((n, to_numpy(dtype)) for dtype in types for n in leaf_counts),
            REDUCE_OPS[ReduceOp.SUM],
        )
        wanted = [
            fold(dtype, ReduceOp.SUM, [values[r][k][i] for r in range(seats)])
            for k, dtype in enumerate(types)
            for i in range(len(leaf_counts))
        ]
        return as_bytes(carry_out(engine, work)) == as_bytes(wanted)

    assert as_threads(seats, body, geometry=TINY) == [True] * seats


@pytest.mark.parametrize("count", [10, 128, 1000, 5000])
def test_a_result_may_be_written_over_the_input(count: int) -> None:
    seats = 3

    def body(engine: core.Engine, rank: int) -> bool:
        values = [make_value(DType.FLOAT32, count, r) for r in range(seats)]
        own = values[rank].copy()
        work = all_reduce(DType.FLOAT32, own)
        finish(engine, engine.run(work.plan(engine), (own,), (own,), 0, None))
        return bool(own.tobytes() == fold(DType.FLOAT32, ReduceOp.SUM, values).tobytes())

    assert as_threads(seats, body, geometry=TINY) == [True] * seats


def test_leaves_that_do_not_fit_the_counts_are_refused() -> None:
    def body(engine: core.Engine, rank: int) -> None:
        with pytest.raises(ValueError, match="leaves in do not add up"):
            engine.plan(core.ALL_REDUCE, 1, 0, ((DType.FLOAT32, (5,), (4,), (5,)),), b"d" * 16, 0, False, 0, 0)
        with pytest.raises(ValueError, match="no such root"):
            engine.plan(core.BROADCAST, 0, 7, (), b"d" * 16, 0, False, 0, 0)
        with pytest.raises(ValueError, match="not defined on the dtype"):
            engine.plan(core.ALL_REDUCE, 1, 0, ((DType.BOOL, (5,), (5,), (5,)),), b"d" * 16, 0, False, 0, 0)
        plan = all_reduce(DType.FLOAT32, make_value(DType.FLOAT32, 5, 0)).plan(engine)
        with pytest.raises(ValueError, match="input 0 has 16 bytes, expected 20"):
            engine.run(plan, (np.zeros(4, np.float32),), (np.zeros(5, np.float32),), 0, None)
        with pytest.raises(ValueError, match="1 leaves in and 1 out"):
            engine.run(plan, (), (np.zeros(5, np.float32),), 0, None)

    as_threads(1, body)


def test_a_mean_of_integers_has_the_type_of_its_rule() -> None:
    assert result_type(DType.INT8, ReduceOp.MEAN) == np.float32
    assert core.arithmetic_sizes(DType.INT8, REDUCE_OPS[ReduceOp.MEAN])[2] == 4
    assert core.arithmetic_sizes(DType.INT64, REDUCE_OPS[ReduceOp.MEAN])[2] == 8


@pytest.mark.parametrize("seats", [9, 64, 128])
def test_many_ranks_find_the_last_to_come(seats: int) -> None:
    def body(engine: core.Engine, rank: int) -> list[int]:
        wrong = []
        for count in (3, 500, 3, 3):
            values = [make_value(DType.INT32, count, r) for r in range(seats)]
            found = carry_out(engine, all_reduce(DType.INT32, values[rank]))
            if as_bytes(found) != [sum(values[1:], values[0]).tobytes()]:
                wrong.append(count)
        for _ in range(5):
            carry_out(engine, Work(core.BARRIER, (), (), ()))
        return wrong

    assert as_threads(seats, body, geometry=TINY) == [[]] * seats
