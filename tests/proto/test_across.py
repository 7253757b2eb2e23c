"""What goes by the segment in groups of several workers, as client and worker must both say it."""

from __future__ import annotations

import pytest

from collectived_proto.across import LocalSeats, Share, list_counts, make_shares, meets_in_segment
from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    DType,
    Gather,
    Layout,
    Leaf,
    LeafPlacement,
    Operation,
    Pack,
    Reduce,
    ReduceOp,
    ReduceScatter,
    Scatter,
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
    assert meets(Barrier()) and meets(Reduce(ReduceOp.SUM, 0)) and meets(Broadcast(0)) and meets(AllGather())
    assert meets(ReduceScatter(ReduceOp.SUM)) and not meets(AllToAll(sizes=(1,) * 5))


@pytest.mark.parametrize(
    ("operation", "length", "wanted"),
    [
        (AllGather(), 3, Share((6, 6), 30, (0, 0), (1,))),
        (Gather(2), 3, Share((6, 6), 30, (0, 0), (2,))),
        (Gather(0), 3, Share((6, 6), 0, (0, 0), ())),
        (Scatter(2), 7, Share((0, 14), 6, (0, 4), (1, 2))),
        (Scatter(0, sizes=(1, 2, 3, 0, 1)), 7, Share((0, 0), 10, (0, 4), (1, 2))),
        (AllToAll(), 7, Share((14, 14), 30, (0, 20), (1, 2))),
        (ReduceScatter(ReduceOp.SUM), 7, Share((14, 14), 6, (0, 4), (1, 2))),
        (ReduceScatter(ReduceOp.SUM, sizes=(1, 2, 3, 0, 1)), 7, Share((14, 14), 10, (0, 4), (1, 2))),
    ],
    ids=str,
)
def test_what_is_cut_or_joined_goes_by_rows(operation: Operation, length: int, wanted: Share) -> None:
    """Of five ranks, of which the ranks 1 and 2 are here; rows of two elements."""
    leaf, pack = Leaf("", DType.UINT8, (length, 2)), Pack(DType.UINT8, DType.UINT8, 2 * length, 0, 0)
    layout = Layout((pack,), (LeafPlacement(0, 0),), 0, 0)
    collective = Collective(operation, "*", (leaf,))
    assert make_shares(collective, layout, LOCAL) == [wanted]
    most = max(*wanted.given, wanted.brought)
    rounded = -(-most // 64) * 64
    assert meets_in_segment(collective, layout, rounded, LOCAL)
    assert not meets_in_segment(collective, layout, rounded - 1, LOCAL)


def test_what_has_no_axis_does_not() -> None:
    layout = Layout((Pack(DType.UINT8, DType.UINT8, 1, 0, 0),), (LeafPlacement(0, 0),), 0, 0)
    assert not meets_in_segment(Collective(AllGather(), "*", (Leaf("", DType.UINT8, ()),)), layout, 1024, LOCAL)


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
    assert share == Share(given, 7, (0, 0), (1,))
    assert list_counts(share, 2, LOCAL, False) == list_counts(share, -1, LOCAL, False) == (*given, 7, 0)


def test_what_is_folded_all_give_and_get_where_theirs_begins() -> None:
    layout = Layout((Pack(DType.UINT8, DType.UINT8, 7, 0, 0),), (LeafPlacement(0, 0),), 0, 0)
    leaves = (Leaf("", DType.UINT8, (7,)),)
    [whole] = make_shares(Collective(SUM, "*", leaves), layout, LOCAL)
    assert [list_counts(whole, rank, LOCAL, True) for rank in (1, 2, -1)] == [(7, 7, 0)] * 3
    [cut] = make_shares(Collective(ReduceScatter(ReduceOp.SUM), "*", leaves), layout, LOCAL)
    assert [list_counts(cut, rank, LOCAL, True) for rank in (1, 2, -1)] == [(7, 3, 0), (7, 3, 2), (7, 3, 0)]
