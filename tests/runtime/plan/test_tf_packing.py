"""num_packs and agg_small_grads: which tensors travel together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectived_proto.types import DType, Leaf
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.tf_packing import batches, count_pack_tasks, split_elements


def leaf(count: int, dtype: DType = DType.FLOAT32) -> Leaf:
    return Leaf("x", dtype, (count,))


def runs(*counts: int, max_bytes: int = 40, max_group: int = 10) -> list[tuple[int, ...]]:
    return [batch.leaves for batch in batches([leaf(c) for c in counts], 0, max_bytes, max_group)]


@pytest.mark.parametrize(
    ("count", "parts", "lengths"),
    ((7, 3, [2, 2, 3]), (2, 4, [2]), (6, 1, [6]), (0, 2, [0]), (9, 3, [3, 3, 3]), (13, 1 << 40, [13])),
)
def test_the_last_cut_has_the_remainder(count: int, parts: int, lengths: list[int]) -> None:
    assert [len(span) for span in split_elements(count, parts)] == lengths


@given(st.integers(0, 100), st.integers(1, 30), st.integers(1, 20))
def test_no_task_is_empty_and_their_number_is_known_before(count: int, parts: int, shards: int) -> None:
    spans = [span for part in split_elements(count, parts) for span in part.split(min(shards, max(1, len(part))))]
    assert len(spans) == count_pack_tasks(count, parts, shards) and (not count or all(len(span) for span in spans))
    assert (spans[0].start, spans[-1].stop) == (0, count)


def test_num_packs_cuts_through_leaves_type_by_type() -> None:
    first, second = batches([leaf(3), leaf(5, DType.INT64), leaf(4)], num_packs=2)
    assert (first.dtype, first.leaves, first.offsets, first.spans) == (
        DType.FLOAT32,
        (0, 2),
        (0, 3),
        (Span(0, 3), Span(3, 7)),
    )
    assert (second.leaves, second.spans) == ((1,), (Span(0, 2), Span(2, 5)))


def test_num_packs_comes_before_small_runs() -> None:
    assert [batch.leaves for batch in batches([leaf(1), leaf(1)], 1, 40, 10)] == [(0, 1)]


def test_without_limits_everything_travels_alone() -> None:
    assert [batch.leaves for batch in batches([leaf(1), leaf(1)])] == [(0,), (1,)]
    assert runs(1, 1, max_bytes=0) == [(0,), (1,)]
    assert runs(1, 1, max_group=0) == [(0,), (1,)]
    assert runs(1, 1, max_group=1) == [(0,), (1,)]


def test_small_neighbours_form_runs_of_at_most_max_group() -> None:
    assert runs(*[1] * 10, max_group=4) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]


def test_runs_come_first_and_singles_in_order_of_input() -> None:
    assert runs(100, 1, 100, 1, 1) == [(3, 4), (0,), (1,), (2,)]


def test_a_leaf_of_exactly_the_limit_is_small() -> None:
    assert runs(10, 10) == [(0, 1)]
    assert runs(11, 11) == [(0,), (1,)]


def test_a_run_has_one_type() -> None:
    mixed = [leaf(1), leaf(1), leaf(1, DType.FLOAT16), leaf(1, DType.FLOAT16)]
    assert [(batch.dtype, batch.leaves) for batch in batches(mixed, 0, 40, 10)] == [
        (DType.FLOAT32, (0, 1)),
        (DType.FLOAT16, (2, 3)),
    ]


@pytest.mark.parametrize("name", ("num_packs", "max_bytes", "max_group"))
def test_a_negative_argument_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must not be negative, got -1"):
        batches([leaf(1)], **{name: -1})


@given(
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from((DType.FLOAT32, DType.INT8))), max_size=20),
    st.integers(0, 4),
    st.integers(0, 60),
    st.integers(0, 5),
)
def test_every_leaf_is_in_one_batch_and_every_element_in_one_cut(
    sizes: list[tuple[int, DType]], num_packs: int, max_bytes: int, max_group: int
) -> None:
    leaves = [leaf(count, dtype) for count, dtype in sizes]
    made = batches(leaves, num_packs, max_bytes, max_group)
    assert sorted(index for batch in made for index in batch.leaves) == list(range(len(leaves)))
    for batch in made:
        assert {leaves[index].dtype for index in batch.leaves} == {batch.dtype}
        stop = 0
        for index, offset in zip(batch.leaves, batch.offsets, strict=True):
            assert offset == stop
            stop += leaves[index].count
        assert [span.start for span in batch.spans] + [stop] == [0] + [span.stop for span in batch.spans]
        assert num_packs or len(batch.leaves) <= max(max_group, 1)
