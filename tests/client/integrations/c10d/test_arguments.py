"""The forms in which c10d's methods take their arguments, and what is refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

from torch._C import _distributed_c10d as c10d  # noqa: E402  # where it is there

from collectived.integrations.c10d.arguments import (  # noqa: E402  # imports torch
    check_lengths,
    check_own_part,
    check_split,
    count_elements,
    is_even,
    listed,
    nested,
    read_options,
)

MINUTE = timedelta(minutes=1)


def test_options_are_taken_or_made_of_what_is_given() -> None:
    given = c10d.ReduceOptions()
    assert read_options(c10d.ReduceOptions, given, rootRank=None) is given
    assert (
        read_options(c10d.BroadcastOptions, 2).rootRank == read_options(c10d.BroadcastOptions, rootRank=2).rootRank == 2
    )
    assert read_options(c10d.BarrierOptions, MINUTE).timeout == read_options(c10d.BarrierOptions, None, MINUTE).timeout
    assert read_options(c10d.BarrierOptions, MINUTE).timeout == MINUTE
    for op in (torch.distributed.ReduceOp.MAX, torch.distributed.ReduceOp(torch.distributed.ReduceOp.MAX)):
        assert read_options(c10d.AllreduceOptions, op).reduceOp == torch.distributed.ReduceOp.MAX
        assert read_options(c10d.AllreduceOptions, reduceOp=op).reduceOp == torch.distributed.ReduceOp.MAX


def test_one_tensor_is_taken_for_a_list_of_it() -> None:
    one, two = torch.ones(1), [torch.ones(1), torch.ones(2)]
    assert listed(one) == [one] and listed(two) is two
    assert nested(two, one) == ([two], [one]) and nested([two], [one]) == ([two], [one])


def test_rows_are_dealt_as_sizes_say_or_evenly() -> None:
    check_split([1, 3], 4, 2)
    check_split([], 4, 2)
    assert count_elements([1, 3], 8, 4, 2) == [2, 6] and count_elements([], 8, 4, 2) == [4, 4]
    assert count_elements([], 0, 0, 2) == [0, 0]
    with pytest.raises(ValueError, match="Split sizes doesn't match total dim 0 size: .1, 2. of 4 rows"):
        check_split([1, 2], 4, 2)
    with pytest.raises(ValueError, match="does not divide equally across group size: 3 rows, 2 ranks"):
        check_split([], 3, 2)


def test_a_rank_needs_room_for_what_it_sends_to_itself() -> None:
    check_own_part(1, [1, 3], [5, 3])
    for rooms in ([3, 5], [3]):
        with pytest.raises(ValueError, match="rank 1 sends .1, 3. elements to the ranks, and has room for .3"):
            check_own_part(1, [1, 3], rooms)


def test_every_output_is_to_fit_what_its_rank_gave() -> None:
    outputs = [torch.empty(2), torch.empty(4)]
    assert is_even([torch.empty(2)] * 2, 2, 2) and is_even([torch.empty(4)], 2, 2)
    assert (
        not is_even(outputs, 2, 2) and not is_even([torch.empty(2)], 2, 2) and not is_even([torch.empty(2)] * 3, 2, 2)
    )
    check_lengths(outputs, [2, 4])
    check_lengths([torch.empty(6)], [2, 4])  # all in one, as they come
    with pytest.raises(ValueError, match="rank 0 gave 3 elements, but its output takes 2"):
        check_lengths(outputs, [3, 3])
    with pytest.raises(ValueError, match="3 ranks gave tensors, but there are 2 outputs"):
        check_lengths(outputs, [2, 4, 0])
