"""What goes by the segment in groups of several workers, as client and worker must both say it."""

from __future__ import annotations

import pytest

from collectived_proto.across import LocalSeats, Share, list_counts, make_shares, meets_in_segment
from collectived_proto.types import (
    AllGather,
    AllReduce,
    Barrier,
    Broadcast,
    Collective,
    DType,
    Layout,
    Operation,
    Pack,
    Reduce,
    ReduceOp,
)

LOCAL = LocalSeats((1, 2), 5)
SUM, MEAN = AllReduce(ReduceOp.SUM), AllReduce(ReduceOp.MEAN)


def meets(operation: Operation, *packs: Pack) -> bool:
    return meets_in_segment(Collective(operation, "", ()), Layout(packs, (), 0, 0), 1024, LOCAL)


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


def test_some_operations_do() -> None:
    assert meets(Barrier()) and meets(Reduce(ReduceOp.SUM, 0)) and meets(Broadcast(0))
    assert not meets(AllGather())


@pytest.mark.parametrize(("count", "does"), [(0, True), (1024, True), (1025, False)])
def test_a_broadcast_does_whose_value_fits_whoever_has_it(count: int, does: bool) -> None:
    for root in range(5):
        assert meets(Broadcast(root), Pack(DType.UINT8, DType.UINT8, count, 0, 0)) is does


def test_who_takes_what_comes_is_told_there() -> None:
    assert meets_in_segment(Collective(Broadcast(0), "", (), open=True), Layout((), (), 0, 0), 1024, LOCAL)


@pytest.mark.parametrize(("root", "given"), [(0, (0, 0)), (1, (7, 0)), (2, (0, 7))])
def test_of_a_broadcast_its_root_gives_and_all_get(root: int, given: tuple[int, ...]) -> None:
    layout = Layout((Pack(DType.UINT8, DType.UINT8, 7, 0, 0),), (), 0, 0)
    [share] = make_shares(Collective(Broadcast(root), "", ()), layout, LOCAL)
    assert share == Share(given, 7, (0, 0))
    assert list_counts(share, 2, LOCAL) == list_counts(share, -1, LOCAL) == (*given, 7, 0)
