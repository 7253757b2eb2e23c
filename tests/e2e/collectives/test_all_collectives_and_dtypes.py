"""Every collective on every element type, over one to four ranks on one to four workers, against NumPy in float64.

A value holds one array per element type, so that one call covers them all. Elements are small multiples of a quarter,
which every floating type holds exactly, and so do all types the sums and products of four of them: results are compared
for equality, but for means.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.e2e.conftest import TRANSPORTS

import collectived as cd

Array = np.ndarray[Any, np.dtype[Any]]
Value = dict[str, Array]

Types = list[np.dtype[Any]]

INTEGERS: Types = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS: Types = [np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
COMPLEX: Types = [np.dtype(np.complex64), np.dtype(np.complex128)]
ALL: Types = [np.dtype(bool), *INTEGERS, *FLOATS, *COMPLEX]
WITH_OP: dict[str, Types] = {
    "sum": [*INTEGERS, *FLOATS, *COMPLEX],
    "mean": [*INTEGERS, *FLOATS, *COMPLEX],
    "product": [*INTEGERS, *FLOATS, *COMPLEX],
    "min": [*INTEGERS, *FLOATS],
    "max": [*INTEGERS, *FLOATS],
    "band": INTEGERS,
    "bor": INTEGERS,
    "bxor": INTEGERS,
}
UFUNCS: dict[str, Any] = {
    "sum": np.add,
    "mean": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
EPSILON |= {"complex64": EPSILON["float32"], "complex128": 2 * EPSILON["float64"]}
NUMBER = {1: "one_worker", 2: "two_workers", 3: "three_workers", 4: "four_workers"}
SPREADS = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3), (4, 4)]

OVER_GRPC = [(1, 1), (2, 2), (3, 2), (4, 1), (4, 4)]  # a rank alone, all on one worker, one on each, and uneven shares
CELLS = [(way, *spread) for way, spreads in zip(TRANSPORTS, (SPREADS, OVER_GRPC), strict=True) for spread in spreads]

on_every_spread = pytest.mark.parametrize(
    ("transport", "size", "workers"),
    CELLS,
    ids=[f"{way}, {size} ranks on {workers}" for way, size, workers in CELLS],
    indirect=["transport"],
)
over_both = pytest.mark.parametrize("transport", TRANSPORTS, indirect=True)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, workers: int) -> Any:
    return request.getfixturevalue(NUMBER[workers])


def elements(rank: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    return _elements(rank, dtype, shape).copy()


@cache
def _elements(rank: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    random = np.random.default_rng((rank, ALL.index(dtype), *shape))
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        return random.integers(1 if dtype.kind == "u" else -3, 4, shape).astype(dtype)
    found = random.integers(-6, 7, shape) / 4
    return (found + 0.5j * random.integers(-2, 3, shape) if dtype in COMPLEX else found).astype(dtype)


def value(rank: int, shape: tuple[int, ...], dtypes: Types = ALL) -> Value:
    return {dtype.name: elements(rank, dtype, shape) for dtype in dtypes}


def wide(array: Array) -> Array:
    """In the widest type of its kind."""
    if array.dtype in INTEGERS:
        return array.astype(np.int64)
    return array.astype(np.complex128 if array.dtype in COMPLEX else np.float64)


@cache
def reduced(op: str, size: int, shape: tuple[int, ...]) -> Value:
    """What a reduction is to give, in the widest type of its kind."""
    found = {}
    for dtype in WITH_OP[op]:
        parts = [wide(elements(rank, dtype, shape)) for rank in range(size)]
        total = parts[0]
        for part in parts[1:]:
            total = UFUNCS[op](total, part)
        found[dtype.name] = total / size if op == "mean" else total
    return found


def type_of_result(op: str, name: str) -> np.dtype[Any]:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if op == "mean" and dtype in INTEGERS:
        return np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)
    return dtype


def same(found: Any, expected: Value) -> None:
    """The same elements, of the same types, in an array of its own."""
    assert list(found) == list(expected)
    for name, array in expected.items():
        got = found[name]
        assert got.dtype == array.dtype and got.shape == array.shape, name
        assert np.array_equal(got, array), name
        assert got.flags.writeable and got.flags.c_contiguous


def equal(op: str, found: Any, expected: Value) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        got, dtype = found[name], type_of_result(op, name)
        assert got.dtype == dtype and got.shape == array.shape, name
        if op == "mean":
            near = EPSILON[dtype.name] * np.abs(array)
            assert np.all(np.abs(wide(got) - array) <= near), name
        else:
            assert np.array_equal(wide(got), array), name


def joined(parts: list[Value], axis: int = 0) -> Value:
    return {name: np.concatenate([part[name] for part in parts], axis) for name in parts[0]}


def piece(whole: Value, sizes: list[int], rank: int, axis: int = 0) -> Value:
    start = sum(sizes[:rank])
    rows = [slice(None)] * (axis % next(iter(whole.values())).ndim) + [slice(start, start + sizes[rank])]
    return {name: array[tuple(rows)] for name, array in whole.items()}


def even(rows: int, size: int) -> list[int]:
    return [rows // size + (rank < rows % size) for rank in range(size)]


def uneven(size: int) -> list[int]:
    return [3, 0, 1, 5][:size]


@on_every_spread
def test_reductions(cluster: Any, size: int, workers: int) -> None:
    shape, root, sizes = (9, 2), size - 1, uneven(size)
    rows = (2, sum(sizes))

    def by(group: cd.Group, op: str) -> Any:
        mine = value(group.rank, shape, WITH_OP[op])
        return (
            group.all_reduce(op, mine),
            group.reduce(op, mine, root=root),
            group.reduce_scatter(op, mine),
            group.reduce_scatter(op, value(group.rank, rows, WITH_OP[op]), axis=-1, sizes=sizes),
        )

    for rank, results in enumerate(cluster.run(size, lambda group: [by(group, op) for op in WITH_OP])):
        for op, (everywhere, on_root, scattered, cut) in zip(WITH_OP, results, strict=True):
            whole, other = reduced(op, size, shape), reduced(op, size, rows)
            equal(op, everywhere, whole)
            equal(op, {} if on_root is None else on_root, whole if rank == root else {})
            equal(op, scattered, piece(whole, even(9, size), rank))
            equal(op, cut, piece(other, sizes, rank, axis=1))


@on_every_spread
def test_broadcast_and_gathers(cluster: Any, size: int, workers: int) -> None:
    root, rows = size // 2, [2, 0, 3, 1]

    def body(group: cd.Group) -> Any:
        mine = value(group.rank, (rows[group.rank], 3))
        other = value(group.rank, (2, rows[group.rank], 2))
        return (
            group.broadcast(value(group.rank, (4, 2)), root=root),
            group.broadcast(value(group.rank, (4, 2)) if group.rank == root else None, root=root),
            group.all_gather(mine),
            group.all_gather(other, axis=1),
            group.gather(mine, root=root),
            group.gather(other, root=root, axis=-2),
        )

    everything = joined([value(rank, (rows[rank], 3)) for rank in range(size)])
    others = joined([value(rank, (2, rows[rank], 2)) for rank in range(size)], axis=1)
    for rank, (closed, opened, gathered, along, on_root, on_root_along) in enumerate(cluster.run(size, body)):
        same(closed, value(root, (4, 2)))
        same({dtype.name: opened[dtype.name] for dtype in ALL}, value(root, (4, 2)))
        same(gathered, everything)
        same(along, others)
        if rank == root:
            same(on_root, everything)
            same(on_root_along, others)
        else:
            assert on_root is None and on_root_along is None


@on_every_spread
def test_scatter_and_all_to_all(cluster: Any, size: int, workers: int) -> None:
    root, sizes = size - 1, uneven(size)
    rows = sum(sizes)

    def sent(rank: int) -> list[int]:
        return [(rank + to) % 3 for to in range(size)]

    def body(group: cd.Group) -> Any:
        def on_root(shape: tuple[int, ...]) -> Any:
            return value(group.rank, shape) if group.rank == root else None

        return (
            group.scatter(on_root((7, 2)), root=root),
            group.scatter(on_root((2, rows)), root=root, axis=1, sizes=sizes),
            group.all_to_all(value(group.rank, (5, 2))),
            group.all_to_all(value(group.rank, (2, sum(sent(group.rank)))), axis=1, sizes=sent(group.rank)),
        )

    for rank, (scattered, cut, exchanged, uneven_exchanged) in enumerate(cluster.run(size, body)):
        in_order = [{dtype.name: result[dtype.name] for dtype in ALL} for result in (scattered, cut)]
        same(in_order[0], piece(value(root, (7, 2)), even(7, size), rank))
        same(in_order[1], piece(value(root, (2, rows)), sizes, rank, axis=1))
        same(exchanged, joined([piece(value(other, (5, 2)), even(5, size), rank) for other in range(size)]))
        pieces = [piece(value(other, (2, sum(sent(other)))), sent(other), rank, axis=1) for other in range(size)]
        same(uneven_exchanged, joined(pieces, axis=1))


@on_every_spread
def test_send_and_recv_round_the_ring(cluster: Any, size: int, workers: int) -> None:
    def body(group: cd.Group) -> Any:
        to, source = (group.rank + 1) % size, (group.rank - 1) % size
        mine = value(group.rank, (3, 2))
        out = value(source, (3, 2))
        for array in out.values():
            array[...] = 0
        works = [group.send(mine, to, tag, async_op=True) for tag in (1, 0)]
        received = group.recv(source), group.recv(source, 1, out=out)
        assert [work.result() for work in works] == [None, None]
        assert all(received[1][name] is array for name, array in out.items())
        group.barrier()
        return received

    for rank, (plain, into) in enumerate(cluster.run(size, body)):
        same({dtype.name: plain[dtype.name] for dtype in ALL}, value((rank - 1) % size, (3, 2)))
        same(into, value((rank - 1) % size, (3, 2)))


@over_both
@pytest.mark.parametrize("workers", [1, 2])
def test_every_collective_writes_into_out(cluster: Any, workers: int) -> None:
    def body(group: cd.Group) -> None:
        mine = np.arange(8, dtype=np.float32).reshape(4, 2) + group.rank
        calls: list[Callable[..., Any]] = [
            lambda **terms: group.all_reduce("sum", mine, **terms),
            lambda **terms: group.reduce("max", mine, 1, **terms),
            lambda **terms: group.broadcast(mine, 1, **terms),
            lambda **terms: group.broadcast(mine if group.rank else None, 1, **terms),
            lambda **terms: group.all_gather(mine, 1, **terms),
            lambda **terms: group.gather(mine[group.rank :], 1, **terms),
            lambda **terms: group.scatter(mine, 1, 1, **terms),
            lambda **terms: group.reduce_scatter("sum", mine, sizes=[1, 3], **terms),
            lambda **terms: group.all_to_all(mine, -1, **terms),
        ]
        for number, call in enumerate(calls):
            plain = call()
            for async_op in (False, True):
                out = None if plain is None else np.zeros_like(plain, order="F")
                result = call(out=out, async_op=async_op)
                assert (result.result() if async_op else result) is out, number
                assert out is None or np.array_equal(out, plain), number

    cluster.run(2, body)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("transport", "own"),
    [(TRANSPORTS[0], False), (TRANSPORTS[0], True), (TRANSPORTS[1], False)],  # over gRPC nobody has a worker's memory
    ids=["ordinary arrays", "worker memory", "grpc"],
    indirect=["transport"],
)
def test_two_ranks_that_both_send_64_mib_first_and_then_receive_complete(cluster: Any, workers: int, own: bool) -> None:
    count = 16 << 20
    numbers = np.resize(np.arange(1000, dtype=np.float32), count)

    def body(session: cd.Session, group: cd.Group) -> bool:
        mine = session.empty(count, np.float32) if own else np.empty(count, np.float32)
        np.add(numbers, group.rank, out=mine)
        group.send(mine, 1 - group.rank)
        received = group.recv(1 - group.rank)
        return bool(np.array_equal(received, numbers + np.float32(1 - group.rank)))

    assert cluster.run_sessions(2, body) == [True, True]


@on_every_spread
def test_sparse_values(cluster: Any, size: int, workers: int) -> None:
    def slices(rank: int, dtype: Any = np.float32) -> cd.IndexedSlices:
        rows = [2, 0, 3, 1][rank]
        return cd.IndexedSlices(elements(rank, np.dtype(dtype), (rows, 2)), np.arange(rows) * 10 + rank, (100, 2))

    def body(group: cd.Group) -> Any:
        mine = {"dense": np.ones(3), "sparse": slices(group.rank), "more": [slices(group.rank, np.int32), None]}
        return (
            group.all_reduce("sum", mine),
            group.all_reduce("mean", mine),
            group.reduce("sum", mine, root=size - 1),
            group.broadcast(mine["sparse"] if group.rank == 0 else None),
            group.broadcast(slices(0)),
        )

    def joined_values(dtype: Any = np.float32) -> Array:
        return np.concatenate([slices(rank, dtype).values for rank in range(size)])

    indices = np.concatenate([slices(rank).indices for rank in range(size)])
    for rank, (total, mean, on_root, opened, closed) in enumerate(cluster.run(size, body)):
        for found in (total, on_root) if rank == size - 1 else (total,):
            assert found["dense"].tolist() == [size] * 3 and found["more"][1] is None
            assert found["sparse"].dense_shape == (100, 2)
            assert np.array_equal(found["sparse"].values, joined_values())
            assert np.array_equal(found["sparse"].indices, indices)
        assert rank == size - 1 or on_root is None
        assert mean["dense"].tolist() == [1] * 3 and mean["more"][0].values.dtype == np.float64
        assert np.allclose(mean["more"][0].values, joined_values(np.int32) / size, rtol=1e-15)
        for found in (opened, closed):
            assert np.array_equal(found.values, slices(0).values) and found.dense_shape == (100, 2)


@over_both
@pytest.mark.parametrize("workers", [1, 2])
def test_started_together_they_all_end(cluster: Any, workers: int) -> None:
    def body(group: cd.Group) -> Any:
        rank = np.full((4, 2), group.rank)
        works = []
        for step in range(5):
            works += [
                group.all_gather(rank + step, async_op=True),
                group.gather(rank, root=step % 4, axis=1, async_op=True),
                group.scatter(rank if group.rank == step % 4 else None, root=step % 4, async_op=True),
                group.reduce_scatter("sum", rank, async_op=True),
                group.all_to_all(rank, async_op=True),
                group.broadcast(rank if group.rank == 1 else None, root=1, async_op=True),
                group.send(rank + step, (group.rank + 1) % 4, async_op=True),
                group.recv((group.rank + 3) % 4, async_op=True),
                group.all_reduce("sum", rank, async_op=True),
            ]
        results = cd.wait(works)
        group.barrier()
        return results

    for rank, results in enumerate(cluster.run(4, body)):
        for step in range(5):
            gathered, on_root, scattered, reduced, exchanged, opened, sent, received, total = results[9 * step :][:9]
            assert gathered[:, 0].tolist() == [step + n // 4 for n in range(16)]
            assert (on_root is None) == (rank != step % 4) and (on_root is None or on_root.shape == (4, 8))
            assert scattered.tolist() == [[step % 4] * 2] and reduced.tolist() == [[6, 6]]
            assert exchanged[:, 0].tolist() == [0, 1, 2, 3] and opened.tolist() == [[1, 1]] * 4
            assert sent is None and received[0, 0] == (rank + 3) % 4 + step and total[0, 0] == 6


@over_both
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_inputs_may_be_overwritten_at_once_and_results_alias_nothing(cluster: Any, workers: int) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        for make in (np.empty, session.empty):
            mine = make((8, 3), np.float32)
            calls: dict[str, Callable[[Array], Any]] = {
                "all_gather": group.all_gather,
                "along": partial(group.all_gather, axis=1),
                "gather": partial(group.gather, root=1),
                "scatter": group.scatter,
                "reduce_scatter": partial(group.reduce_scatter, "max"),
                "all_to_all": group.all_to_all,
                "broadcast": group.broadcast,
                "opened": lambda array: group.broadcast(array if group.rank == 0 else None),
                "reduce": partial(group.reduce, "max"),
            }
            results = {}
            for name, call in calls.items():
                mine[:] = 5
                results[name] = call(mine)
                mine[:] = -1e9  # a rank that is early must not spoil what another one receives
            group.barrier()
            got = {name: result for name, result in results.items() if result is not None}
            assert all(np.all(result == 5) for result in got.values()), "as they were"
            for name, result in got.items():
                assert not np.shares_memory(result, mine)
                for other, another in got.items():
                    assert other == name or not np.shares_memory(result, another)
                if result.flags.writeable:
                    result[:] = 0
            assert all(np.all(result == (0 if result.flags.writeable else 5)) for result in got.values())

    cluster.run_sessions(4, body)


@over_both
@pytest.mark.parametrize("workers", [1, 2])
def test_values_of_any_structure_come_to_who_has_none(cluster: Any, workers: int) -> None:
    point = collections.namedtuple("point", "x y")
    values: list[Any] = [
        *(None, 3, 2.5, True, 1j, [], {}, (), [None, ()], np.array(7), np.zeros((0, 4), np.int8)),
        {"b": point([np.arange(3)], None), "a": ({1: np.ones((2, 2), bool)}, 4)},
    ]

    def body(group: cd.Group) -> Any:
        mine = values if group.rank == 1 else [None] * len(values)
        opened = [group.broadcast(value, root=1) for value in mine]
        works = [group.send(value, to, async_op=True) for value in values for to in (0, 2) if group.rank == 1]
        received = values if group.rank == 1 else [group.recv(1) for _ in values]
        cd.wait(works)
        group.barrier()
        return opened, received

    for opened, received in cluster.run(3, body):
        for found in (opened, received):
            np.testing.assert_equal(found, values)
            assert type(found[-1]["b"]).__name__ == "point"


@over_both
@pytest.mark.parametrize("workers", [1, 2])
def test_ranks_that_differ_are_told_and_the_group_goes_on(cluster: Any, workers: int) -> None:
    def body(group: cd.Group) -> int:
        odd = group.rank == 2
        ones: list[int] = [1, 1, 1]
        calls: list[tuple[Callable[[], Any], str]] = [
            (lambda: group.all_gather(np.ones((2, 3 + odd))), r"float64\[\?, 4\]"),
            (lambda: group.all_gather(np.ones((2, 2)), axis=int(odd)), r"axis=1"),
            (lambda: group.all_gather(np.ones(2, np.float32 if odd else np.float64)), "float32"),
            (lambda: group.reduce_scatter("sum", np.ones(2 + odd)), r"float64\[3\]"),
            (lambda: group.reduce_scatter("sum", np.ones(3), sizes=ones if odd else [1, 0, 2]), r"sizes=\[1, 1, 1\]"),
            (lambda: group.all_to_all(np.ones(3 + odd)), r"float64\[4\]"),
            (lambda: group.all_to_all(np.ones(3), sizes=ones if odd else None), "sizes"),
            (lambda: group.gather(np.ones(2), root=int(odd)), "root=1"),
            (lambda: group.broadcast(np.ones(2 + odd)), r"float64\[3\]"),
            (lambda: group.all_reduce("sum", 1) if odd else group.all_gather(np.ones(1)), r"all_reduce\(sum\)"),
        ]
        for call, says in calls:
            with pytest.raises(cd.errors.InvalidArgumentError) as caught:
                call()
                group.barrier()  # a rank that had what it needed hears of it here
            if caught.value.rejoin:  # this machine is so busy that the workers decided without the coordinator
                assert caught.value.decided_by != "coordinator"
                break
            assert re.search(f"rank 2 differs: .*{says}", str(caught.value))
            assert group.all_reduce("sum", 1) == 3
        return group.generation

    assert len(set(cluster.run(3, body))) == 1
