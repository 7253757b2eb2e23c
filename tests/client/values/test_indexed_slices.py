"""Sparse values: what they check, what they are when dense, and how they are added up in one process."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import collectived as cd
from collectived.values.arithmetic import mean_dtype
from collectived.values.indexed_slices import aggregate, divide


def test_rows_of_equal_index_add_up_in_the_dense_array() -> None:
    slices = cd.IndexedSlices([[1.0, 2], [3, 4], [5, 6]], [2, 0, 2], (4, 2))
    assert slices.to_dense().tolist() == [[3, 4], [0, 0], [6, 8], [0, 0]]


def test_coalescing_sorts_and_adds_and_keeps_the_rest() -> None:
    given = cd.IndexedSlices(np.array([[1.0], [3], [5]]), np.array([7, 2, 7], np.int32), (9, 1))
    found = given.coalesced()
    assert found.indices.tolist() == [2, 7] and found.indices.dtype == np.int32
    assert found.values.tolist() == [[3], [6]] and found.dense_shape == (9, 1)
    assert given.indices.tolist() == [7, 2, 7]


def test_arrays_are_kept_and_lists_become_arrays() -> None:
    values, indices = np.ones((2, 3), np.float32), np.array([1, 0])
    slices = cd.IndexedSlices(values, indices, np.array([5, 3]))  # type: ignore[arg-type]
    assert slices.values is values and slices.indices is indices and slices.dense_shape == (5, 3)
    assert slices.dtype == np.float32
    listed = cd.IndexedSlices([], [])
    assert isinstance(listed.values, np.ndarray) and listed.indices.dtype == np.int64 and listed.dense_shape is None


def test_slices_of_slices_are_flattened() -> None:
    inner = cd.IndexedSlices([[1.0], [2.0]], [1, 1], (2, 1))
    outer = cd.IndexedSlices(inner, [7, 9], (10, 1))
    assert outer.indices.tolist() == [9, 9] and outer.to_dense()[9].tolist() == [3]


def test_they_are_frozen_and_show_what_they_are() -> None:
    slices = cd.IndexedSlices(np.ones((2, 3), np.float32), [1, 0], (5, 3))
    with pytest.raises(AttributeError):
        slices.values = 1  # type: ignore[misc]
    assert repr(slices) == "IndexedSlices(float32[2, 3] at [2] indices, of [5, 3])"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1.0], [0.5]), TypeError, "indices must be integers, they are float64"),
        (([1.0], [True]), TypeError, "indices must be integers, they are bool"),
        (([1.0], [0, 1]), ValueError, "as many as rows of values: 2 for 1 rows"),
        ((1.0, [0]), ValueError, "at least one axis"),
        (([1.0], [[0]]), ValueError, "1-dimensional"),
        (([[1.0]], [0], (3, 2)), ValueError, r"dense_shape \[3, 2\] does not fit values of \[1, 1\]"),
        (([[1.0]], [0], (3,)), ValueError, "does not fit"),
        (([1.0], [0], (-1,)), ValueError, "does not fit"),
        (([1.0], [0], 3), TypeError, "dense_shape must be whole lengths"),
        (([1.0], [0], (1.5,)), TypeError, "dense_shape must be whole lengths"),
    ],
)
def test_wrong_arguments_are_told(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cd.IndexedSlices(*arguments)


def test_densifying_needs_a_shape_with_room_for_every_index() -> None:
    with pytest.raises(ValueError, match="dense_shape is not known"):
        cd.IndexedSlices([1.0], [0]).to_dense()
    for index in (3, -1):
        with pytest.raises(ValueError, match=f"index {index} lies outside dense_shape"):
            cd.IndexedSlices([1.0], [index], (3,)).to_dense()


def test_sparse_values_are_joined_in_order_without_deduplication() -> None:
    first = cd.IndexedSlices([[1.0], [2]], np.array([3, 1], np.int32), (5, 1))
    second = cd.IndexedSlices([[3.0]], np.array([3], np.int64), (6, 1))
    found = aggregate([first, None, second])
    assert found.values.ravel().tolist() == [1, 2, 3] and found.indices.tolist() == [3, 1, 3]
    assert found.indices.dtype == np.int64  # int32 and int64 are widened
    assert found.dense_shape == (5, 1)  # that of the first


def test_one_alone_is_itself() -> None:
    slices, array = cd.IndexedSlices([1.0], [0]), np.ones(3)
    assert aggregate([None, slices]) is slices and aggregate([array]) is array


def test_a_dense_one_among_them_makes_the_sum_dense() -> None:
    slices = cd.IndexedSlices([[1.0], [2]], [2, 2], (3, 1))
    found = aggregate([slices, np.ones((3, 1)), slices])
    assert found.ravel().tolist() == [1, 1, 7]


@pytest.mark.parametrize(
    ("components", "text"),
    [
        ([], "nothing to add up"),
        ([None], "nothing to add up"),
        ([np.ones(2), np.ones(3)], r"component 1 has shape \[3\], component 0 has \[2\]"),
        ([np.ones(2), np.ones(2, np.float32)], "component 1 has dtype float32, component 0 has float64"),
        ([cd.IndexedSlices([1.0], [0]), cd.IndexedSlices([[1.0]], [0])], "component 1 has shape"),
        ([cd.IndexedSlices([1.0], [0]), np.ones(3)], "dense_shape is not known"),
    ],
)
def test_what_cannot_be_added_up_is_told(components: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        aggregate(components)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_add_up_in_float32(dtype: Any) -> None:
    ones = [np.ones(1, dtype)] * 3000
    assert aggregate(ones).dtype == dtype and float(aggregate(ones)[0]) == float(np.asarray(3000).astype(dtype))
    slices = cd.IndexedSlices(np.ones((3000, 1), dtype), np.zeros(3000, np.int64), (1, 1))
    assert float(slices.to_dense()[0, 0]) == float(np.asarray(3000).astype(dtype))


def test_sums_are_arrays_of_their_own() -> None:
    array = np.ones(3)
    assert not np.shares_memory(aggregate([array, array]), array)


MEANS = {
    **{np.dtype(name): np.float32 for name in ("int8", "uint8", "int16", "uint16")},
    **{np.dtype(name): np.float64 for name in ("int32", "int64", "uint32", "uint64")},
    **{np.dtype(name): name for name in ("float16", "float32", "float64", "complex64", "complex128")},
    np.dtype(ml_dtypes.bfloat16): ml_dtypes.bfloat16,
}


@pytest.mark.parametrize(("dtype", "expected"), MEANS.items(), ids=str)
def test_the_type_of_a_mean(dtype: Any, expected: Any) -> None:
    assert mean_dtype(dtype) == expected
    found = divide(np.full(2, 6).astype(dtype), 4)
    assert found.dtype == expected and np.all(found == 1.5)


def test_the_mean_of_a_sparse_value_divides_its_values_alone() -> None:
    slices = cd.IndexedSlices(np.array([3, 4], np.int32), np.array([1, 0]), (5,))
    found = divide(slices, 2)
    assert found.values.tolist() == [1.5, 2] and found.values.dtype == np.float64
    assert found.indices.tolist() == [1, 0] and found.dense_shape == (5,)


def test_bools_have_no_mean() -> None:
    with pytest.raises(TypeError, match="bool has no mean"):
        divide(np.ones(2, bool), 2)


EXTREMES = [np.int8(127), np.int16(-(2**15)), np.uint32(2**32 - 1), np.int64(-(2**63)), np.uint64(2**64 - 2**11)]


@pytest.mark.parametrize("large", [*EXTREMES, np.float16(65504)], ids=lambda large: large.dtype.name)
def test_a_mean_of_sparse_and_dense_values_is_rounded_once(large: Any) -> None:
    dense = np.full((2, 1), large)
    slices = cd.IndexedSlices(np.full((2, 1), large), [0, 1], (2, 1))
    found = aggregate([slices, dense, slices], mean=True)
    assert found.dtype == mean_dtype(dense.dtype) and found.tolist() == [[float(large)]] * 2
    twice = cd.IndexedSlices(np.full((2, 1), large), [1, 1], (2, 1))
    zeros = cd.IndexedSlices(np.zeros((0, 1), large.dtype), [], (2, 1))
    empty = np.zeros((2, 1), large.dtype)
    assert aggregate([twice, zeros, empty, empty], mean=True).tolist() == [[0], [float(large) / 2]]


def test_a_mean_of_sparse_values_alone_divides_and_keeps_every_row() -> None:
    slices = cd.IndexedSlices(np.array([[3], [5]], np.int8), [4, 4], (6, 1))
    found = aggregate([slices, slices], mean=True)
    assert found.values.ravel().tolist() == [1.5, 2.5, 1.5, 2.5] and found.indices.tolist() == [4] * 4
    assert aggregate([slices], mean=True).values.tolist() == [[3], [5]] and slices.values.dtype == np.int8


def test_sums_of_integers_wrap_as_in_numpy() -> None:
    slices = cd.IndexedSlices(np.full((2, 1), 100, np.int8), [0, 0], (1, 1))
    assert slices.to_dense().tolist() == [[-56]] and slices.coalesced().values.tolist() == [[-56]]
    assert aggregate([np.full(1, 100, np.int8)] * 2).tolist() == [-56]


@pytest.mark.parametrize("order", ["<", ">"])
def test_any_byte_order_is_taken_and_results_are_native(order: str) -> None:
    array, native = np.full((2, 1), 3, f"{order}f4"), np.full((2, 1), 3, np.float32)
    slices = cd.IndexedSlices(array, np.array([1, 0], f"{order}i8"), (2, 1))
    other = cd.IndexedSlices(native, [0, 1], (2, 1))
    halves = divide(np.ones(2, f"{order}f2"), 2)
    found = [slices.to_dense(), slices.coalesced().values, aggregate([array, native]), divide(array, 1), halves]
    found += [aggregate([slices, native]), aggregate([slices, other]).values, aggregate([slices, array], mean=True)]
    assert [one.ravel()[0] for one in found] == [3, 3, 6, 3, 0.5, 6, 3, 3]
    assert all(one.dtype.isnative for one in found) and mean_dtype(array.dtype).isnative
    assert cd.IndexedSlices(slices, [7, 9], (10, 1)).indices.tolist() == [9, 7]


def test_what_cannot_be_read_on_the_host_is_told() -> None:
    class Elsewhere:
        shape, dtype = (1,), np.dtype(np.float32)

    with pytest.raises(TypeError, match="values cannot be read here: a .*Elsewhere"):
        cd.IndexedSlices(Elsewhere(), [0], (2,)).to_dense()


def test_tensors_are_densified_without_their_gradient_and_stay_tensors_when_coalesced() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    indices = torch.tensor([1, 1])
    for dtype, expected in ((torch.bfloat16, ml_dtypes.bfloat16), (torch.float32, np.float32)):
        slices = cd.IndexedSlices(torch.ones(2, 1, dtype=dtype, requires_grad=True), indices, (2, 1))
        dense = slices.to_dense()
        assert isinstance(dense, np.ndarray) and dense.dtype == expected and dense.tolist() == [[0], [2]]
        found = slices.coalesced()
        assert isinstance(found.values, torch.Tensor) and found.values.dtype is dtype
        assert found.values.tolist() == [[2]] and isinstance(found.indices, torch.Tensor)
        assert aggregate([slices, slices], mean=True).values.dtype == expected
        assert cd.IndexedSlices(slices, [3, 4], (5, 1)).indices.tolist() == [4, 4]
