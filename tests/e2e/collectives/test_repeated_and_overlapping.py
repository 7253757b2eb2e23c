"""Lines of a program that run again, and results that are written over inputs: the same values as the first time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectived as cd

LARGE = 300_000  # elements: more than one tick of a segment


@pytest.fixture(params=["one_worker", "two_workers"])
def cluster(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_values_of_foreign_byte_order_are_reduced_by_value_each_time(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        value = np.arange(4, dtype=">f4")
        return [group.all_reduce("sum", value).tolist() for _ in range(3)]

    assert cluster.run(2, body) == [[[0.0, 2.0, 4.0, 6.0]] * 3] * 2


def test_a_gather_along_another_axis_is_the_same_each_time(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        value = np.array([[1, 2], [3, 4]]) + 10 * group.rank
        return [group.all_gather(value, axis=1).tolist() for _ in range(3)]

    assert cluster.run(2, body) == [[[[1, 2, 11, 12], [3, 4, 13, 14]]] * 3] * 2


def test_arrays_that_are_not_contiguous_are_the_same_each_time(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        value = np.arange(6.0).reshape(2, 3).T
        return [group.all_reduce("sum", value).tolist() for _ in range(3)]

    assert cluster.run(2, body) == [[[[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]] * 3] * 2


@pytest.mark.parametrize("count", [4, LARGE])
def test_results_may_change_places_with_inputs(cluster: Any, count: int) -> None:
    def body(group: cd.Group) -> Any:
        one, two = np.full(count, 1.0), np.full(count, 5.0)
        group.all_reduce("sum", [one, two], out=[two, one])
        return bool((two == 2.0).all() and (one == 10.0).all())

    assert cluster.run(2, body) == [True] * 2


@pytest.mark.parametrize("count", [2, LARGE])
def test_an_uneven_all_to_all_may_be_written_over_its_value(cluster: Any, count: int) -> None:
    sizes = [[1, 2, 3], [3, 1, 2], [2, 3, 1]]  # rows of the senders; columns add up to the same

    def body(group: cd.Group) -> Any:
        mine = [rows * count for rows in sizes[group.rank]]
        value = np.concatenate([np.full(rows, 10 * group.rank + to) for to, rows in enumerate(mine)])
        wanted = np.concatenate(
            [np.full(sizes[sender][group.rank] * count, 10 * sender + group.rank) for sender in range(3)]
        )
        found = []
        for _ in range(2):
            buffer = value.copy()
            group.all_to_all(buffer, sizes=mine, out=buffer)
            found.append(bool(np.array_equal(buffer, wanted)))
        return found

    assert cluster.run(3, body) == [[True, True]] * 3


def test_a_broadcast_of_thousands_of_arrays_reaches_those_that_have_a_template(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        value = {f"layer{number}.weight": np.full(1 + number % 7, float(group.rank)) for number in range(3000)}
        return all((array == 0.0).all() for array in group.broadcast(value).values())

    assert cluster.run(2, body) == [True] * 2


def test_a_scatter_and_an_open_broadcast_of_thousands_of_arrays_arrive(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        value = {f"layer{number}.weight": np.arange(2.0 + number % 7) for number in range(3000)}
        pieces = group.scatter(value if group.rank == 0 else None)
        taken = group.broadcast(value if group.rank == 0 else None)
        return len(pieces), len(taken), taken["layer5.weight"].tolist() == list(range(7))

    assert cluster.run(2, body) == [(3000, 3000, True)] * 2


def test_a_rank_that_takes_what_comes_gets_another_value_each_time(cluster: Any) -> None:
    values: list[Any] = [
        *(np.full(6, float(number)) for number in range(3)),  # alike
        *(np.arange(2 * number, dtype=np.int32) for number in (1, 2, 3)),  # of other lengths
        *({"a": np.ones(2), "b": None}, np.arange(4.0).reshape(4, 1), LARGE * [1.0], np.arange(LARGE)),
    ]

    def body(group: cd.Group) -> Any:
        found = []
        for value in (*values, *values):
            if isinstance(value, np.ndarray):
                found.append(group.scatter(value if group.rank == 0 else None))
            found.append(group.broadcast(value if group.rank == 0 else None))
        return found

    values[-2] = np.array(values[-2])
    first, second = cluster.run(2, body)
    wanted_first, wanted_second = [], []
    for value in (*values, *values):
        if isinstance(value, np.ndarray):
            half = len(value) // 2
            wanted_first.append(value[:half])
            wanted_second.append(value[half:])
        wanted_first.append(value)
        wanted_second.append(value)
    for found, wanted in ((first, wanted_first), (second, wanted_second)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            if isinstance(other, dict):
                assert list(one) == list(other) and np.array_equal(one["a"], other["a"]) and one["b"] is None
            else:
                assert one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other)


def test_out_takes_what_comes_from_the_same_line_each_time_if_it_fits(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        is_root, found = group.rank == 0, []
        for number in range(6):
            out: Any = np.zeros(2)
            if number == 4:
                out = np.zeros((2, 2))[:, 0]  # not contiguous
            if number == 5 and not is_root:
                out.flags.writeable = False
            value = np.arange(4.0) + number if is_root else None
            try:
                result = group.scatter(value, out=out)
                assert result is out
                found.append(out.tolist())
            except ValueError as error:
                found.append(str(error))
                group.scatter(value)  # which the root waits for
        return found

    first, second = cluster.run(2, body)
    assert first == [[number, number + 1.0] for number in range(6)]
    assert second[:5] == [[number + 2.0, number + 3.0] for number in range(5)]
    assert "read-only" in second[5]


def test_where_no_result_comes_out_is_left_alone_each_time(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        out = np.zeros(2)
        found = [group.gather(np.ones(1) + group.rank, out=out) is out for _ in range(3)]
        assert [group.barrier() for _ in range(3)] == [None] * 3
        return found, out.tolist()

    assert cluster.run(2, body) == [([True] * 3, [1.0, 2.0]), ([False] * 3, [0.0, 0.0])]


def test_a_result_that_lies_across_its_input_is_right_each_time(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        base, found = np.empty(6), []
        for shift in (2, 0, 2, 1, 0):
            value, out = base[:4], base[shift : shift + 4]
            value[:] = np.arange(4.0)
            found.append(group.all_reduce("sum", value, out=out).tolist())
        return found

    assert cluster.run(2, body) == [[[0.0, 2.0, 4.0, 6.0]] * 5] * 2
