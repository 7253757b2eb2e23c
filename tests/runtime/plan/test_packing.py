"""Which leaves travel together, and where they lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectived_proto.types import (
    AllReduce,
    Barrier,
    Broadcast,
    Collective,
    DType,
    Leaf,
    LeafPlacement,
    Operation,
    Reduce,
    ReduceOp,
)
from collectived_runtime.plan.packing import ALIGNMENT, group_leaves, layout, result_dtype

SUM = AllReduce(ReduceOp.SUM)


def leaf(nbytes: int, dtype: DType = DType.FLOAT32) -> Leaf:
    return Leaf("x", dtype, (nbytes // dtype.itemsize,))


def collective(*leaves: Leaf, operation: Operation = SUM, bytes_per_pack: int = 0) -> Collective:
    return Collective(operation, "", leaves, bytes_per_pack)


def indices(bytes_per_pack: int, *leaves: Leaf) -> list[list[int]]:
    return [each.leaves for each in group_leaves(leaves, bytes_per_pack)]


def test_last_leaves_come_first_and_a_pack_closes_once_it_exceeds_the_limit() -> None:
    assert indices(200, leaf(128), leaf(32), leaf(800), leaf(4)) == [[3, 2], [1, 0]]


def test_a_pack_that_just_reaches_the_limit_stays_open() -> None:
    assert indices(8, leaf(4), leaf(4), leaf(4), leaf(4)) == [[3, 2, 1], [0]]


def test_a_large_leaf_is_never_split() -> None:
    assert indices(1, leaf(4000)) == [[0]]


def test_zero_is_one_pack_per_type() -> None:
    assert indices(0, leaf(4), leaf(8, DType.INT64), leaf(4)) == [[2, 0], [1]]


def test_types_have_packs_of_their_own_that_stay_open_beside_each_other() -> None:
    leaves = (leaf(8), leaf(8, DType.INT64), leaf(4), leaf(16, DType.INT64), leaf(4))
    assert indices(8, *leaves) == [[4, 2, 0], [3], [1]]


def test_a_barrier_has_no_packs() -> None:
    empty = layout(collective(operation=Barrier()), 0)
    assert (empty.packs, empty.places, empty.staging_bytes, empty.result_bytes) == ((), (), 0, 0)


def test_a_scalar_counts_one_element_and_an_empty_leaf_none() -> None:
    leaves = (Leaf("a", DType.INT8, ()), Leaf("b", DType.INT8, (0, 3)), Leaf("c", DType.INT8, (5,)))
    laid = layout(collective(*leaves), 0)
    assert laid.places == (LeafPlacement(0, 5), LeafPlacement(0, 5), LeafPlacement(0, 0))
    assert laid.packs[0].count == 6


def test_a_mean_of_integers_has_room_for_its_floating_result() -> None:
    laid = layout(collective(leaf(64, DType.INT8), leaf(64), operation=AllReduce(ReduceOp.MEAN)), 0)
    assert [(pack.dtype, pack.result_dtype) for pack in laid.packs] == [
        (DType.FLOAT32, DType.FLOAT32),
        (DType.INT8, DType.FLOAT32),
    ]
    assert (laid.staging_bytes, laid.result_bytes) == (128, 64 + 256)


@pytest.mark.parametrize("dtype", DType)
def test_only_a_mean_of_integers_changes_the_type(dtype: DType) -> None:
    assert all(result_dtype(dtype, op) is dtype for op in (None, *ReduceOp) if op is not ReduceOp.MEAN)
    mean = result_dtype(dtype, ReduceOp.MEAN)
    if dtype.is_integer:
        assert mean is (DType.FLOAT32 if dtype.itemsize <= 2 else DType.FLOAT64)
    else:
        assert mean is dtype


def test_only_the_root_of_a_reduce_has_room_for_a_result() -> None:
    reduce = collective(leaf(64), operation=Reduce(ReduceOp.SUM, root=2))
    assert [layout(reduce, rank).result_bytes for rank in range(4)] == [0, 0, 64, 0]
    assert layout(reduce, 0).packs == layout(reduce, 2).packs


def test_every_rank_of_a_broadcast_has_room_for_a_result() -> None:
    assert layout(collective(leaf(64), operation=Broadcast(1)), 0).result_bytes == 64


def test_the_automatic_size_counts_only_where_none_was_asked_for() -> None:
    leaves = (leaf(64), leaf(64), leaf(64))
    assert len(layout(collective(*leaves), 0, automatic=1).packs) == 3
    assert len(layout(collective(*leaves, bytes_per_pack=1 << 20), 0, automatic=1).packs) == 1


LEAVES = st.builds(Leaf, st.just("x"), st.sampled_from(DType), st.lists(st.integers(0, 9), max_size=3).map(tuple))


@given(st.lists(LEAVES, max_size=12), st.integers(0, 400))
def test_every_leaf_has_a_place_of_its_own_inside_an_aligned_pack(leaves: list[Leaf], limit: int) -> None:
    laid = layout(collective(*leaves, bytes_per_pack=limit), 0)
    taken: dict[int, int] = dict.fromkeys(range(len(laid.packs)), 0)
    for each, place in reversed(list(zip(leaves, laid.places, strict=True))):
        assert laid.packs[place.pack].dtype is each.dtype
        assert place.offset == taken[place.pack]
        taken[place.pack] += each.count
    assert [pack.count for pack in laid.packs] == list(taken.values())
    staging = result = 0
    for pack in laid.packs:
        assert pack.staging_offset >= staging and pack.staging_offset % ALIGNMENT == 0
        assert pack.result_offset >= result and pack.result_offset % ALIGNMENT == 0
        staging = pack.staging_offset + pack.count * pack.dtype.itemsize
        result = pack.result_offset + pack.count * pack.result_dtype.itemsize
    assert laid.staging_bytes >= staging and laid.result_bytes >= result
