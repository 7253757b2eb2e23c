"""Where results of rows lie on a GPU."""

from __future__ import annotations

import pytest

from collectived_proto.device_results import DeviceRows, is_carried_on_gpus, lay_out_device_rows
from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    DType,
    Gather,
    Leaf,
    Operation,
    ReduceOp,
    ReduceScatter,
    Send,
)
from collectived_runtime.plan.packing import layout

LEAVES = (Leaf("['a']", DType.FLOAT32, (5, 3)), Leaf("['b']", DType.INT32, (4,)))


def laid_out(
    operation: Operation, rank: int = 0, size: int = 2, leaves: tuple[Leaf, ...] = LEAVES
) -> DeviceRows | None:
    collective = Collective(operation, "{*, *}", leaves)
    return lay_out_device_rows(collective, layout(collective, rank), rank, size)


@pytest.mark.parametrize(
    ("operation", "rank", "expected"),
    [
        (AllGather(), 0, DeviceRows(offsets=(128, 0), ends=(160, 120), rows=(8, 10), nbytes=192)),
        (ReduceScatter(ReduceOp.SUM), 0, DeviceRows((64, 0), (72, 36), (2, 3), 128)),
        (ReduceScatter(ReduceOp.SUM), 1, DeviceRows((64, 0), (72, 24), (2, 2), 128)),
        (ReduceScatter(ReduceOp.MEAN), 1, DeviceRows((64, 0), (80, 24), (2, 2), 128)),
        (AllToAll(), 1, DeviceRows((64, 0), (80, 48), (4, 4), 128)),
    ],
    ids=str,
)
def test_leaves_stand_one_behind_the_other_and_are_found_by_pack(
    operation: Operation, rank: int, expected: DeviceRows
) -> None:
    assert laid_out(operation, rank) == expected


def test_sizes_of_a_reduce_scatter_are_rows_by_rank() -> None:
    (leaf,) = LEAVES[:1]
    assert laid_out(ReduceScatter(ReduceOp.SUM, 0, (5, 0)), 1, leaves=(leaf,)) == DeviceRows((0,), (0,), (0,), 0)


def test_who_deals_out_rows_by_sizes_reckons_with_as_many_as_it_gives() -> None:
    (leaf,) = LEAVES[:1]
    assert laid_out(AllToAll(0, (4, 1)), leaves=(leaf,)) == DeviceRows((0,), (60,), (5,), 64)


@pytest.mark.parametrize("operation", [AllReduce(ReduceOp.SUM), Broadcast(0)], ids=str)
def test_what_the_layout_says_already_is_not_said_again(operation: Operation) -> None:
    assert is_carried_on_gpus(Collective(operation, "*", LEAVES)) and laid_out(operation) is None


@pytest.mark.parametrize(
    ("operation", "leaves", "is_open"),
    [
        (Gather(), LEAVES, False),
        (Send(1), LEAVES, False),
        (AllGather(), (Leaf("", DType.FLOAT32, ()),), False),
        (Barrier(), (), False),
        (AllReduce(ReduceOp.SUM), (), False),
        (Broadcast(1), (), True),
    ],
    ids=["gather", "send", "0-d", "barrier", "no leaves", "what comes"],
)
def test_all_else_passes_by_the_host(operation: Operation, leaves: tuple[Leaf, ...], is_open: bool) -> None:
    collective = Collective(operation, "*", leaves, open=is_open)
    assert not is_carried_on_gpus(collective)
    assert lay_out_device_rows(collective, layout(collective, 0), 0, 2) is None
