"""Collectives through real daemons: right values, the same bits, nobody's memory touched."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import collectived as cd

NUMBERS = [
    *(np.float16, np.float32, np.float64, ml_dtypes.bfloat16),
    *(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
]


STRUCTURES = 50  # that take turns; every step has values of its own


def nest(random: np.random.Generator) -> Any:
    """A random nested structure of float32 arrays; the same one for the same seed, with values of its own after it."""
    shapes = [tuple(random.integers(0, 9, random.integers(0, 4))) for _ in range(4)]
    return {
        "first": [random.standard_normal(shapes[0]).astype(np.float32), None],
        "second": (random.standard_normal(shapes[1]).astype(np.float32), {"deep": float(random.standard_normal())}),
        "third": random.standard_normal(shapes[2]).astype(np.float32),
    }


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [] if value is None else [np.asarray(value)]


@cache
def values_of(rank: int, step: int) -> Any:
    """What a rank contributes in a step: a structure that is the same on all ranks, filled with numbers of its own."""
    structure = nest(np.random.default_rng(step % STRUCTURES))
    random = np.random.default_rng((step, rank))

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(fill(item) for item in value)
        if isinstance(value, float):
            return float(random.standard_normal())
        return None if value is None else random.standard_normal(value.shape).astype(np.float32)

    return fill(structure)


@cache
def expected_of(size: int, step: int) -> list[tuple[Any, Any]]:
    """For each leaf of the step's sum what it is to be, and how far from it it may be."""
    everybody = [leaves(values_of(rank, step)) for rank in range(size)]
    wide = [[np.asarray(leaf, np.float64) for leaf in of_all] for of_all in zip(*everybody, strict=True)]
    return [(np.sum(of_all, axis=0), 1e-6 * np.sum(np.abs(of_all), axis=0)) for of_all in wide]


def nested_sums(group: cd.Group, steps: int) -> list[bytes]:
    seen = []
    for step in range(steps):
        options = cd.CommunicationOptions(bytes_per_pack=64 if step % 2 else 0, timeout_seconds=30)
        result = group.all_reduce("sum", values_of(group.rank, step), options=options)
        if group.rank == 0:  # of the others the bits are compared with its
            for found, (expected, bound) in zip(leaves(result), expected_of(group.size, step), strict=True):
                assert np.all(np.abs(found - expected) <= bound)
        seen.append(b"".join(leaf.tobytes() for leaf in leaves(result)))
    return seen


@pytest.mark.parametrize("shape", ["2 workers x 2 clients", "4 workers x 1 client"])
def test_200_nested_sums_are_right_and_have_the_same_bits_on_all_ranks_and_in_two_runs(
    shape: str, transport: str, request: pytest.FixtureRequest
) -> None:
    cluster = request.getfixturevalue("two_workers" if shape.startswith("2") else "four_workers")
    steps = 200 if transport == "shared memory" else 40  # a call over gRPC takes ten times as long

    def body(group: cd.Group) -> list[bytes]:
        return nested_sums(group, steps)

    first = cluster.run(4, body)
    assert all(seen == first[0] for seen in first)
    assert cluster.run(4, body) == first


@pytest.mark.parametrize("size", [1, 3, 4])
def test_sum_and_mean_of_every_number_type(one_worker: Any, size: int) -> None:
    def body(group: cd.Group) -> Any:
        values = [np.arange(1, 6).astype(dtype) * np.asarray(group.rank + 1, dtype) for dtype in NUMBERS]
        return [(group.all_reduce("sum", value), group.all_reduce(cd.ReduceOp.MEAN, value)) for value in values]

    total = sum(range(1, size + 1))
    for results in one_worker.run(size, body):
        for dtype, (summed, mean) in zip(NUMBERS, results, strict=True):
            assert summed.dtype == dtype and np.array_equal(summed, (np.arange(1, 6) * total).astype(dtype)), dtype
            kinds = (np.true_divide(np.ones(1, dtype), 1).dtype, np.float32, np.float64)
            assert mean.dtype in kinds, (dtype, mean.dtype)
            assert np.allclose(mean.astype(np.float64), np.arange(1, 6) * total / size, rtol=1e-2), dtype


@pytest.mark.parametrize(
    ("op", "expected"),
    [("min", [0, -3]), ("max", [3, 0]), ("product", [0, 0]), ("band", [0, 0]), ("bor", [3, -1]), ("bxor", [0, -4])],
)
def test_the_other_reduce_ops(two_workers: Any, op: str, expected: list[int]) -> None:
    def body(group: cd.Group) -> Any:
        return group.all_reduce(op, np.array([group.rank, -group.rank])), group.reduce(op, group.rank, root=1)

    for rank, (found, reduced) in enumerate(two_workers.run(4, body)):
        assert found.tolist() == expected
        assert reduced == (expected[0] if rank == 1 else None)


@cache
def large(rank: int) -> Any:
    """What a rank contributes, which nobody writes to."""
    found = np.random.default_rng(rank).standard_normal(3_000_017).astype(np.float32)
    found.flags.writeable = False
    return found


@cache
def large_sum() -> tuple[Any, Any]:
    """The sum of four, and how far from it each element may be."""
    everybody = [large(rank) for rank in range(4)]
    return np.sum([one.astype(np.float64) for one in everybody], axis=0), 1e-6 * np.sum(np.abs(everybody), axis=0)


def test_large_random_vectors_have_the_right_sum_and_the_same_bits(any_workers: Any) -> None:
    results = any_workers.run(4, lambda group: group.all_reduce("sum", large(group.rank)))
    exact, bound = large_sum()
    assert np.all(np.abs(results[0] - exact) <= bound)
    assert all(result.tobytes() == results[0].tobytes() for result in results)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.int64])
def test_sum_and_mean_across_workers(four_workers: Any, dtype: Any) -> None:
    def body(group: cd.Group) -> Any:
        value = np.full(20_000, group.rank + 1).astype(dtype)
        return group.all_reduce("sum", value), group.all_reduce("mean", value)

    for summed, mean in four_workers.run(4, body):
        assert np.all(summed == np.asarray(10, dtype)) and np.all(mean == 2.5)


def test_empty_and_0d_arrays_python_numbers_and_none(any_workers: Any) -> None:
    def body(group: cd.Group) -> Any:
        arrays = {"empty": np.empty((0, 3), np.float32), "0d": np.array(1.5)}
        return group.all_reduce("sum", {**arrays, "scalar": np.float32(2), "number": 3, "none": None})

    for found in any_workers.run(4, body):
        assert found["empty"].shape == (0, 3)
        assert found["scalar"] == 8 and found["0d"] == 6.0 and found["none"] is None
        assert type(found["number"]) is int and found["number"] == 12


def test_an_empty_array_alone(any_workers: Any) -> None:
    for found in any_workers.run(4, lambda group: group.all_reduce("mean", np.empty(0, np.float64))):
        assert found.shape == (0,) and found.dtype == np.float64


def test_a_million_and_three_elements_over_three_workers(three_workers: Any) -> None:
    count = 1_000_003

    def body(group: cd.Group) -> Any:
        return group.all_reduce("sum", np.arange(count, dtype=np.float64) * (group.rank + 1))

    for found in three_workers.run(3, body):
        assert np.array_equal(found, np.arange(count, dtype=np.float64) * 6)


def test_reduce_broadcast_and_barrier(any_workers: Any) -> None:
    def body(group: cd.Group) -> Any:
        group.barrier()
        reduced = group.reduce("sum", np.full(5, group.rank, np.int32), root=2)
        sent = group.broadcast({"weights": np.full((2, 3), group.rank, np.float32), "step": group.rank}, root=3)
        group.barrier()
        return reduced, sent

    for rank, (reduced, sent) in enumerate(any_workers.run(4, body)):
        assert (reduced is None) == (rank != 2)
        if reduced is not None:
            assert reduced.tolist() == [6] * 5
        assert np.array_equal(sent["weights"], np.full((2, 3), 3)) and sent["step"] == 3


def test_worker_memory_is_reduced_in_place_and_shared(two_workers: Any) -> None:
    def body(session: cd.Session, group: cd.Group) -> Any:
        array = session.empty((200_000, 10), np.float32)  # what is small goes by the segment of the ranks
        array[:] = group.rank
        result = group.all_reduce("sum", array)
        assert result.flags.writeable == (session.transport == "grpc")  # which shares nothing
        return result.copy()

    for found in two_workers.run_sessions(4, body):
        assert np.all(found == 6)


def test_asynchronous_collectives_complete_in_order(two_workers: Any) -> None:
    def body(group: cd.Group) -> Any:
        works = [group.all_reduce("sum", np.full(10, step, np.float32), async_op=True) for step in range(20)]
        return [work.result()[0] for work in works]

    for found in two_workers.run(4, body):
        assert found == [4 * step for step in range(20)]


@pytest.mark.timeout(150)
@pytest.mark.slow
def test_overwriting_an_input_right_after_completion_changes_nobodys_result(four_workers: Any) -> None:
    count = 4 << 20  # 16 MiB

    def body(session: cd.Session, group: cd.Group) -> int:
        array = session.empty((count,), np.float32)
        wrong = 0
        for step in range(60 if session.transport == "shared memory" else 8):
            array[:] = group.rank + step
            result = group.all_reduce("sum", array)
            array[:] = -1e9
            expected = np.float32(6 + 4 * step)
            wrong += int(result[0] != expected or result[-1] != expected or np.count_nonzero(result != expected))
            del result
        return wrong

    assert four_workers.run_sessions(4, body) == [0, 0, 0, 0]


def test_large_values_that_are_copied_past_the_caches_are_whole(two_workers: Any) -> None:
    """What a rank copies in is there before its worker reads it, and what it copies out before the call returns."""
    count = 3 << 20  # 12 MiB

    def body(group: cd.Group) -> int:
        ramp = np.arange(count, dtype=np.float32) % 1000
        value, out = np.empty_like(ramp), np.empty_like(ramp)
        wrong = 0
        for step in range(6):
            np.add(ramp, group.rank + step, out=value)
            assert group.all_reduce("sum", value, out=out) is out
            wrong += int(np.count_nonzero(out != 4 * (ramp + step) + 6))
        return wrong

    assert two_workers.run(4, body) == [0, 0, 0, 0]
