"""What goes by the segment in groups of several workers, as client and worker must both say it."""

from __future__ import annotations

import pytest

from collectived_proto.across import meets_in_segment
from collectived_proto.types import (
    AllGather,
    AllReduce,
    Barrier,
    Collective,
    DType,
    Layout,
    Operation,
    Pack,
    Reduce,
    ReduceOp,
)

SUM, MEAN = AllReduce(ReduceOp.SUM), AllReduce(ReduceOp.MEAN)


def meets(operation: Operation, *packs: Pack) -> bool:
    return meets_in_segment(Collective(operation, "", ()), Layout(packs, (), 0, 0), 1024)


@pytest.mark.parametrize(
    ("count", "does"),
    [(0, True), (1, True), (256, True), (257, False)],
)
def test_a_value_that_fits_into_one_tick_does(count: int, does: bool) -> None:
    assert meets(SUM, Pack(DType.FLOAT32, DType.FLOAT32, count, 0, 0)) is does


def test_every_pack_takes_whole_lines() -> None:
    packs = [Pack(DType.UINT8, DType.UINT8, 1, 0, 0)] * 17
    assert meets(SUM, *packs[:16]) and not meets(SUM, *packs)


def test_a_result_may_be_wider_than_the_value() -> None:
    assert meets(MEAN, Pack(DType.INT32, DType.FLOAT64, 128, 0, 0))
    assert not meets(MEAN, Pack(DType.INT32, DType.FLOAT64, 129, 0, 0))


def test_what_is_not_folded_does_not() -> None:
    assert meets(Barrier()) and meets(Reduce(ReduceOp.SUM, 0))
    assert not meets(AllGather())
