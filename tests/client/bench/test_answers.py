"""The known answers, beside those that NumPy computes from the whole inputs; and what counts as wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectived.bench.answers import PERIOD, Segment, answer, block, count_wrong, fill, reduced_block
from collectived.bench.config import BenchConfig
from collectived.bench.operation_kinds import KINDS, compute_extent
from collectived_proto.types import DType, ReduceOp

Array = NDArray[Any]
RANKS = 3


def inputs(order: BenchConfig, length: int) -> list[Array]:
    made = []
    for rank in range(RANKS):
        array = np.empty(length, order.numpy_dtype)
        fill(array, block(order, rank))
        made.append(array)
    return made


def whole(segments: list[Segment]) -> Array:
    parts = [np.resize(np.roll(part.block, -(part.start % PERIOD)), part.length) for part in segments]
    return np.asarray(np.concatenate(parts))


def computed(operation: str, values: list[Array], rank: int, root: int) -> Array | None:
    """What the operation means, in NumPy."""
    pieces = [np.split(array, RANKS) if len(array) % RANKS == 0 else [] for array in values]
    total = np.asarray(np.add.reduce(values))
    match operation:
        case "all_reduce":
            return total
        case "reduce":
            return total if rank == root else None
        case "broadcast":
            return values[root]
        case "all_gather":
            return np.concatenate(values)
        case "gather":
            return np.concatenate(values) if rank == root else None
        case "scatter":
            return pieces[root][rank]
        case "reduce_scatter":
            return np.split(total, RANKS)[rank]
        case "all_to_all":
            return np.concatenate([pieces[sender][rank] for sender in range(RANKS)])
        case "send_recv":
            return values[(rank - 1) % RANKS]
    return None


@pytest.mark.parametrize("operation", KINDS)
@pytest.mark.parametrize("nbytes", [4, 4000, 1 << 20])
def test_the_known_answer_is_what_the_operation_means(operation: str, nbytes: int) -> None:
    order = BenchConfig(operation, root=1)
    measured = compute_extent(order.kind, nbytes, 4, RANKS)
    values = inputs(order, measured.input_count)
    for rank in range(RANKS):
        expected = answer(order, measured, rank, RANKS)
        found = computed(operation, values, rank, order.root)
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            assert np.array_equal(whole(expected), found) and len(found) == measured.output_count
            assert count_wrong(found, expected) == 0


@pytest.mark.parametrize("kind", DType, ids=lambda kind: str(kind.label))
def test_every_type_can_be_moved_and_checked(kind: DType) -> None:
    order = BenchConfig("all_gather", dtype=kind.label)
    measured = compute_extent(order.kind, 1 << 12, kind.itemsize, RANKS)
    expected = answer(order, measured, 0, RANKS)
    assert expected is not None and expected[0].block.dtype == order.numpy_dtype
    found = np.concatenate(inputs(order, measured.input_count))
    assert count_wrong(found, expected) == 0
    found[0] = not found[0]
    assert count_wrong(found, expected) == 1


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("dtype", ["int8", "uint64", "int32", "float16", "bfloat16", "float32", "complex64"])
def test_reductions_are_those_of_all_ranks_in_a_wide_type(op: ReduceOp, dtype: str) -> None:
    order = BenchConfig("all_reduce", dtype=dtype, reduce_op=op.value)
    if op.value.startswith("b") and np.dtype(order.numpy_dtype).kind not in "iu":
        return
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype == "complex64":
        return
    found = reduced_block(order, RANKS)
    exact = [block(order, rank).astype(complex if dtype == "complex64" else float) for rank in range(RANKS)]
    if op is ReduceOp.MEAN:
        assert np.allclose(found.astype(complex), sum(exact) / RANKS, rtol=2**-8)
        assert found.dtype == ("float32" if dtype == "int8" else found.dtype)
        return
    assert found.dtype == order.numpy_dtype
    function = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}.get(op.value)
    if function is not None and dtype != "int8":
        assert np.array_equal(found.astype(complex), function.reduce(exact).astype(complex))


def test_neighbours_blocks_differ_everywhere() -> None:
    for op in ("sum", "product"):
        order = BenchConfig("all_reduce", reduce_op=op)
        assert np.all(block(order, 0) != block(order, 1))


def test_each_wrong_element_counts() -> None:
    order = BenchConfig("all_gather")
    measured = compute_extent(order.kind, 6000, 4, RANKS)
    expected = answer(order, measured, 0, RANKS)
    found = np.concatenate(inputs(order, measured.input_count))
    found[[0, 700, -1]] += 1
    found[4] = np.nan
    assert count_wrong(found, expected) == 4
    swapped = np.concatenate(inputs(order, measured.input_count)[::-1])
    assert count_wrong(swapped, expected) == 1000  # the middle one is in its place


def test_a_result_of_another_shape_or_type_is_wrong_as_a_whole() -> None:
    expected = answer(BenchConfig("all_reduce"), compute_extent(KINDS["all_reduce"], 40, 4, 2), 0, 2)
    for result in (None, 3.0, np.zeros(9, np.float32), np.zeros((2, 5), np.float32), np.zeros(10)):
        assert count_wrong(result, expected) == 10


def test_where_there_must_be_no_result_any_is_wrong() -> None:
    assert (count_wrong(None, None), count_wrong(np.zeros(3), None)) == (0, 1)


def test_means_may_differ_in_the_last_bit_and_in_no_other() -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        order = BenchConfig("all_reduce", dtype=dtype, reduce_op="mean")
        expected = answer(order, compute_extent(order.kind, 4096, 8, RANKS), 0, RANKS)
        assert expected is not None
        found = whole(expected)
        eps = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}[dtype]
        next_one = np.where(found == 0, found, np.nextafter(found, np.array(np.inf, found.dtype)))
        assert count_wrong(next_one, expected, tolerant=True) == 0
        further = (found.astype(float) * (1 + 4 * eps)).astype(found.dtype)
        assert count_wrong(further, expected, tolerant=True) == np.count_nonzero(found) > 0
