"""Axes: arrays travel with the operation's axis first, and come back as the caller had them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived.values import axes, nest
from collectived.values.leaves import Array
from collectived_proto.types import AllGather, AllToAll, AxisOperation, Gather, ReduceScatter, Scatter


def moved(operation: AxisOperation, value: Any) -> tuple[AxisOperation, list[Array]]:
    spec, leaves = nest.flatten(value)
    operation = axes.resolve_axis(operation, spec, leaves)
    return operation, axes.move_axis_first(operation.axis, leaves)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_rows_come_first_and_go_back(axis: int) -> None:
    array = np.arange(24).reshape(2, 3, 4)
    operation, (rows,) = moved(AllGather(axis), array)
    assert operation.axis == axis % 3
    assert rows.shape[0] == array.shape[axis] and np.shares_memory(rows, array)
    assert np.array_equal(axes.restore_axis(rows, axis), array)
    assert axes.restore_shape(rows.shape, axis) == array.shape


def test_the_first_axis_moves_nothing() -> None:
    array = np.zeros((2, 3))
    assert moved(AllGather(), array)[1][0] is array
    assert moved(AllGather(-2), array)[1][0] is array


def test_a_negative_axis_is_kept_where_arrays_do_not_agree_on_what_it_means() -> None:
    operation, arrays = moved(Gather(1, -1), [np.zeros((2, 3)), np.zeros((4, 5, 6))])
    assert operation == Gather(1, -1)
    assert [array.shape for array in arrays] == [(3, 2), (6, 4, 5)]


def test_a_negative_axis_of_a_scatter_is_kept_for_only_its_root_has_arrays() -> None:
    assert moved(Scatter(0, -1), np.zeros((2, 3)))[0] == Scatter(0, -1)


def test_without_arrays_the_axis_is_as_given() -> None:
    assert moved(AllGather(-5), [None, {}]) == (AllGather(-5), [])


@pytest.mark.parametrize(
    ("operation", "value", "says"),
    [
        (AllToAll(), {"step": np.array(3)}, r"all_to_all\(axis=0\): \['step'\] is 0-d.*numpy.reshape\(value, 1\)"),
        (AllGather(1), [np.zeros((2, 2)), np.zeros(3)], r"\[1\] has the shape \[3\], and no axis 1"),
        (AllGather(-3), np.zeros((2, 2)), r"the value has the shape \[2, 2\], and no axis -3"),
        (
            Scatter(0, 1, (1, 1)),
            np.zeros((2, 3)),
            r"the value has 3 rows along axis 1, but sizes \[1, 1\] add up to 2",
        ),
        (ReduceScatter(cd.ReduceOp.SUM, -1, (3, 1)), [np.zeros((2, 3))], r"\[0\] has 3 rows along axis -1.* 4"),
        (AllToAll(0, (0, 0)), [np.zeros(0), np.zeros(1)], r"\[1\] has 1 rows"),
    ],
    ids=["0-d", "too few axes", "negative", "scatter", "reduce_scatter", "all_to_all"],
)
def test_what_cannot_be_cut_is_refused_with_its_path(operation: AxisOperation, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        moved(operation, value)
    assert type(caught.value) is ValueError, "the others are told nothing"


def test_what_is_0d_and_gathered_stays_as_it_is_for_all_ranks_are_told() -> None:
    operation, arrays = moved(AllGather(1), [np.array(3), np.zeros((2, 5))])
    assert operation == AllGather(1) and [array.shape for array in arrays] == [(), (5, 2)]


def test_sizes_are_rows_by_rank() -> None:
    assert axes.check_sizes(None, 3) == ()
    assert axes.check_sizes(np.array([1, 0, 2]), 3) == (1, 0, 2)


@pytest.mark.parametrize(
    ("sizes", "error", "says"),
    [
        ([1, 2], ValueError, r"sizes must be rows for each of the 3 ranks, .*: got 2, \[1, 2\]"),
        ([1, -2, 3], ValueError, "none of them negative, got -2"),
        ([1, 2.0, 3], TypeError, "got 2.0, a float"),
        (3, TypeError, "or None, got 3"),
        ([], ValueError, "got 0"),
    ],
    ids=["too few", "negative", "no whole number", "one number", "none"],
)
def test_other_sizes_are_refused(sizes: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        axes.check_sizes(sizes, 3)


@pytest.mark.parametrize(("axis", "error"), [(1.0, TypeError), ("0", TypeError), (True, TypeError), (64, ValueError)])
def test_an_axis_is_a_whole_number(axis: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="axis must be an axis of the arrays"):
        axes.check_axis(axis)
