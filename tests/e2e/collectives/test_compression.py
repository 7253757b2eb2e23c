"""Sums and means that travel compressed between workers: the same bits on all ranks, within the promised bound."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import collectived as cd

Array = NDArray[Any]

NAMES = ("bfloat16", "float8", "int8")
BLOCK = 128
SIZES = [5, 1023, 1024, 40_000, 300_001]
TRAINED: dict[str, list[tuple[int, ...]]] = {"layer": [(37, 129), (129,)], "bias": [()], "head": [(1000, 3)]}


def bound(name: str, inputs: list[Array], roundings: int) -> Array:
    """Of each element of the sum, by blocks of one array."""
    magnitude = np.sum([np.abs(one.astype(np.float64)) for one in inputs], axis=0).ravel()
    padded = np.zeros(-(-len(magnitude) // BLOCK) * BLOCK)
    padded[: len(magnitude)] = magnitude
    largest = np.repeat(padded.reshape(-1, BLOCK).max(axis=1), BLOCK)[: len(magnitude)]
    each: Array = {
        "bfloat16": magnitude / 256,
        "float8": np.maximum(magnitude / 16, largest / 448 / 1024),
        "int8": largest / 254,
    }[name]
    limit: Array = each * roundings * (1 + roundings / 16) + 1e-6 * magnitude
    return limit.reshape(inputs[0].shape)


def draw(rank: int, count: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng([rank, count]).standard_normal(count).astype(np.float32).astype(dtype)


@pytest.mark.parametrize(("workers", "size"), [(2, 2), (2, 5), (3, 3), (3, 6)])
@pytest.mark.parametrize("name", NAMES)
def test_all_reduce(request: pytest.FixtureRequest, name: str, workers: int, size: int) -> None:
    cluster = request.getfixturevalue({2: "two_workers", 3: "three_workers"}[workers])
    options = cd.CommunicationOptions(compression=name)

    def body(group: cd.Group) -> list[Array]:
        works = [
            group.all_reduce(op, draw(group.rank, n), options, async_op=True) for op in ("sum", "mean") for n in SIZES
        ]
        return [work.result() for work in works]

    results = cluster.run(size, body)
    for number, count in enumerate(2 * SIZES):
        found = [one[number] for one in results]
        assert len({one.tobytes() for one in found}) == 1
        inputs = [draw(rank, count) for rank in range(size)]
        divisor = 1 if number < len(SIZES) else size
        exact = np.sum([one.astype(np.float64) for one in inputs], axis=0)
        limit = (
            bound(name, inputs, workers) if count >= 1024 else 1e-6 * np.sum(np.abs(inputs), axis=0)
        )  # not compressed
        assert np.all(np.abs(found[0] * float(divisor) - exact) <= limit)


@pytest.mark.parametrize("name", NAMES)
def test_reduce_and_reduce_scatter(three_workers: Any, name: str) -> None:
    options, size, count = cd.CommunicationOptions(compression=name), 4, 30_011

    def body(group: cd.Group) -> tuple[Array | None, Array, Array]:
        value = draw(group.rank, 3 * count).reshape(count, 3)
        sizes = [0, count - 20_000, 0, 20_000]
        return (
            group.reduce("sum", value, root=2, options=options),
            group.reduce_scatter("sum", value, options=options),
            group.reduce_scatter("mean", value, sizes=sizes, options=options),
        )

    inputs = [draw(rank, 3 * count).reshape(count, 3) for rank in range(size)]
    exact = np.sum([one.astype(np.float64) for one in inputs], axis=0)
    # Blocks of a reduce_scatter begin where the rows of a worker do: all that can be in one is in three of these.
    limit = 3 * bound(name, inputs, 3).max()
    results = three_workers.run(size, body)
    assert [one[0] is None for one in results] == [True, True, False, True]
    assert np.all(np.abs(results[2][0] - exact) <= bound(name, inputs, 3))
    assert np.all(np.abs(np.concatenate([one[1] for one in results]) - exact) <= limit)
    assert np.all(np.abs(size * np.concatenate([one[2] for one in results]) - exact) <= limit)


@pytest.mark.parametrize("name", NAMES)
def test_a_nest_with_bfloat16_and_every_shape(two_workers: Any, name: str) -> None:
    """Blocks do not cross arrays: a small one beside a large one keeps its precision."""
    scales = {"layer": 1.0, "bias": 1e-6, "head": 1e6}

    def make(rank: int) -> dict[str, list[Array]]:
        chance = np.random.default_rng(rank)
        return {
            key: [
                np.asarray(chance.standard_normal(shape) * scales[key]).astype(
                    ml_dtypes.bfloat16 if key == "head" else np.float32
                )
                for shape in shapes
            ]
            for key, shapes in TRAINED.items()
        }

    def body(group: cd.Group) -> dict[str, list[Array]]:
        out = make(group.rank)
        group.all_reduce("sum", out, cd.CommunicationOptions(compression=name), out=out)
        return out

    first, *others = two_workers.run(3, body)
    for key, arrays in first.items():
        for number, found in enumerate(arrays):
            assert all(one[key][number].tobytes() == found.tobytes() for one in others)
            inputs = [np.atleast_1d(make(rank)[key][number]) for rank in range(3)]
            exact = np.sum([one.astype(np.float64) for one in inputs], axis=0)
            own = np.abs(exact) / 256 if key == "head" else 0  # the result is of that type
            assert np.all(np.abs(found.astype(np.float64) - exact) <= bound(name, inputs, 2) + own)


def test_values_that_are_not_finite_come_through(two_workers: Any) -> None:
    def body(group: cd.Group) -> Array:
        value = draw(group.rank, 5000)
        value[100 + group.rank] = np.inf if group.rank else np.nan
        return group.all_reduce("sum", value, cd.CommunicationOptions(compression="int8"))

    for found in two_workers.run(2, body):
        assert np.isnan(found[100]) and found[101] == np.inf
        assert np.isfinite(found).sum() == 4998


def test_inside_one_worker_nothing_is_rounded(two_workers: Any) -> None:
    def body(group: cd.Group) -> tuple[Array, Array]:
        value = draw(group.rank, 50_000)
        return group.all_reduce("sum", value), group.all_reduce(
            "sum", value, cd.CommunicationOptions(compression="int8")
        )

    for plain, asked in two_workers.first(1).run(3, body):
        assert plain.tobytes() == asked.tobytes()


def test_a_rank_that_compresses_otherwise_is_named(two_workers: Any) -> None:
    def body(group: cd.Group) -> str:
        options = cd.CommunicationOptions(compression="int8" if group.rank == 1 else None)
        if group.rank == 1:
            two_workers.await_arrivals(group, 2)
        with pytest.raises(cd.errors.InvalidArgumentError) as caught:
            group.all_reduce("sum", draw(group.rank, 5000), options, timeout=20)
        assert [member.rank for member in caught.value.differing] == [1]
        assert group.all_reduce("sum", 1, timeout=20) == 3  # the group goes on
        return str(caught.value)

    for told in two_workers.run(3, body):
        assert "compression is int8 there, none on ranks 0, 2" in told


def test_a_groups_default_can_be_taken_back(two_workers: Any) -> None:
    def body(group: cd.Group) -> None:
        plain = cd.CommunicationOptions(compression="none")
        with pytest.raises(ValueError, match=r'the value is int64\[\], and compression="int8" is for float32'):
            group.all_reduce("sum", 1)
        assert group.all_reduce("sum", 1, plain) == 2
        with pytest.raises(ValueError, match="sums and means"):
            group.all_reduce("max", np.ones(3, np.float32))
        group.broadcast(np.arange(3))  # moves values as they are
        group.barrier()
        exact = group.all_reduce("sum", draw(group.rank, 5000), plain)
        rounded = group.all_reduce("sum", draw(group.rank, 5000))
        assert not np.array_equal(exact, rounded)

    two_workers.run(2, body, options=cd.CommunicationOptions(compression="int8"))


def test_two_groups_of_one_session_compress_side_by_side(two_workers: Any) -> None:
    options = cd.CommunicationOptions(compression="float8")
    results: dict[int, list[Array]] = {}

    def train(number: int) -> None:
        results[number] = two_workers.run(2, lambda group: group.all_reduce("mean", draw(group.rank, 200_000), options))

    threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert len({array.tobytes() for arrays in results.values() for array in arrays}) == 1
    assert len(results) == 3
