"""Operations that cut values or join them, and those that take what comes: over group loops, for any spread of
ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectived_proto.codec import collective_from_proto
from collectived_proto.errors import Code, InvalidArgumentError
from collectived_proto.ipc.messages import Completion
from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Gather,
    ReduceOp,
    ReduceScatter,
    ReportKind,
    Scatter,
)
from collectived_proto.v1 import common_pb2

SPREADS = [(1,), (3,), (1, 1), (2, 2), (3, 1), (1, 1, 1, 1), ((0, 2), (1, 3)), ((1, 3), (0,), (2, 4))]
spread = pytest.mark.parametrize("hosts", SPREADS, ids=str)


def rows(rank: int, count: int, width: int = 2) -> Any:
    """`count` rows that tell whose they are."""
    return (100 * rank + np.arange(count * width, dtype=np.float32)).reshape(count, width)


@spread
@pytest.mark.parametrize("lengths", [lambda r: 3, lambda r: r, lambda r: 0, lambda r: 5 if r == 1 else 0])
def test_an_all_gather_joins_rows_in_rank_order_whatever_their_lengths(world: Any, hosts: Any, lengths: Any) -> None:
    here = world(*hosts)
    values = [rows(rank.rank, lengths(rank.rank)) for rank in here.ranks]
    for rank, value in zip(here.ranks, values, strict=True):
        rank.submit(value, operation=AllGather())
    for rank in here.ranks:
        (leaf,) = rank.outlined(rank.done(), width=2)
        assert np.array_equal(leaf, np.concatenate(values))


@spread
def test_a_gather_reaches_its_root_alone(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    root = len(here.ranks) - 1
    values = [rows(rank.rank, rank.rank + 1) for rank in here.ranks]
    for rank, value in zip(here.ranks, values, strict=True):
        rank.submit(value, operation=Gather(root))
    dones = [rank.done() for rank in here.ranks]
    assert [done.has_result for done in dones] == [rank.rank == root for rank in here.ranks]
    (leaf,) = here.ranks[root].outlined(dones[root], width=2)
    assert np.array_equal(leaf, np.concatenate(values))


@spread
@pytest.mark.parametrize("uneven", [False, True])
def test_a_scatter_tells_those_off_root_what_comes_and_gives_each_its_rows(
    world: Any, hosts: Any, uneven: bool
) -> None:
    here = world(*hosts)
    size = len(here.ranks)
    value = rows(0, 2 * size + 1)
    sizes = tuple(range(size)) if uneven else ()
    if uneven:
        value = rows(0, sum(sizes))
    for rank in here.ranks:
        if rank.rank == 0:
            rank.submit(value, operation=Scatter(0, 0, sizes))
        else:
            rank.submit(operation=Scatter(0, 0), open=True)
    pieces = np.split(value, np.cumsum(sizes)[:-1]) if uneven else np.array_split(value, size)
    for rank in here.ranks:
        done = rank.done()
        (leaf,) = rank.outlined(done, width=2)
        assert np.array_equal(leaf, pieces[rank.rank])
        memory, outline = rank.outline(done)
        assert len(memory) >= outline.extent
        if rank.rank:
            told = collective_from_proto(common_pb2.Collective.FromString(outline.description))
            assert told.structure == "*" and told.leaves[0].shape == value.shape


@spread
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("reduce_op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_a_reduce_scatter_folds_all_and_gives_each_its_rows(
    world: Any, hosts: Any, uneven: bool, reduce_op: ReduceOp
) -> None:
    here = world(*hosts)
    size = len(here.ranks)
    sizes = tuple(range(size)) if uneven else ()
    count = sum(sizes) if uneven else 2 * size + 1
    values = [rows(rank.rank, count) for rank in here.ranks]
    for rank, value in zip(here.ranks, values, strict=True):
        rank.submit(value, operation=ReduceScatter(reduce_op, 0, sizes))
    whole = np.sum(values, axis=0) / (size if reduce_op is ReduceOp.MEAN else 1)
    pieces = np.split(whole, np.cumsum(sizes)[:-1]) if uneven else np.array_split(whole, size)
    for rank in here.ranks:
        (leaf,) = rank.outlined(rank.done(), width=2)
        assert np.allclose(leaf, pieces[rank.rank])


def test_a_mean_of_integers_is_floating_when_it_is_scattered_too(world: Any) -> None:
    here = world(1, 2)
    for rank in here.ranks:
        rank.submit(np.arange(3, dtype=np.int16) + rank.rank, operation=ReduceScatter(ReduceOp.MEAN))
    for rank in here.ranks:
        (leaf,) = rank.outlined(rank.done(), np.float32)
        assert leaf.tolist() == [[rank.rank + 1.0]]


@spread
@pytest.mark.parametrize("uneven", [False, True])
def test_an_all_to_all_joins_by_sender_what_was_meant_for_each(world: Any, hosts: Any, uneven: bool) -> None:
    here = world(*hosts)
    size = len(here.ranks)

    def cut(rank: int) -> list[int]:
        if uneven:
            return [(rank + to) % 3 for to in range(size)]
        return [len(piece) for piece in np.array_split(np.arange(size + 1), size)]

    values = [rows(rank.rank, sum(cut(rank.rank))) for rank in here.ranks]
    for rank, value in zip(here.ranks, values, strict=True):
        rank.submit(value, operation=AllToAll(0, tuple(cut(rank.rank)) if uneven else ()))
    pieces = [np.split(value, np.cumsum(cut(rank))[:-1]) for rank, value in enumerate(values)]
    for rank in here.ranks:
        (leaf,) = rank.outlined(rank.done(), width=2)
        assert np.array_equal(leaf, np.concatenate([pieces[sender][rank.rank] for sender in range(size)]))


@spread
def test_a_broadcast_reaches_those_who_take_what_comes_and_those_who_know(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    root = len(here.ranks) - 1
    value = rows(root, 3)
    for rank in here.ranks:
        if rank.rank == root or rank.rank % 2:
            rank.submit(value, operation=Broadcast(root))
        else:
            rank.submit(operation=Broadcast(root), open=True)
    for rank in here.ranks:
        done = rank.done()
        if rank.rank == root or rank.rank % 2:
            memory, _ = here.group_loop_of(rank.rank)._results._slots[done.slot].memory, None
            start = done.offset - here.group_loop_of(rank.rank)._results._slots[done.slot].offset
            assert np.array_equal(memory[start : start + value.nbytes].view(np.float32).reshape(value.shape), value)
        else:
            (leaf,) = rank.outlined(done, width=2)
            assert np.array_equal(leaf, value)


@pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)
def test_what_comes_may_change_from_call_to_call(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    for count in (1, 5, 1, 0, 3):
        here.ranks[0].submit(rows(0, count), operation=Broadcast(0))
        here.ranks[1].submit(operation=Broadcast(0), open=True)
        here.ranks[0].done()
        (leaf,) = here.ranks[1].outlined(here.ranks[1].done(), width=2)
        assert np.array_equal(leaf, rows(0, count))


@pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)
def test_operations_of_all_kinds_follow_each_other(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    for rank in here.ranks:
        rank.submit(rows(rank.rank, rank.rank + 1), operation=AllGather())
    for rank in here.ranks:
        rank.done()
    for rank in here.ranks:
        rank.submit(np.full(4, 1, np.float32), operation=AllReduce(ReduceOp.SUM))
    for rank in here.ranks:
        assert rank.result(rank.done()).tolist() == [2] * 4


@pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)
def test_a_template_that_differs_from_what_comes_is_a_mismatch(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    here.ranks[0].submit(rows(0, 3), operation=Broadcast(0))
    here.ranks[1].submit(rows(0, 4), operation=Broadcast(0))
    assert here.report(ReportKind.MISMATCH).instance == 0
    here.rule(here.verdict(Code.INVALID_ARGUMENT))
    assert here.ranks[1].failed()[1].code == Code.INVALID_ARGUMENT
    heard = here.ranks[0].hear()
    if isinstance(heard, Completion):  # the root had sent all before it could know
        heard = here.ranks[0].hear()
    assert not isinstance(heard, Completion) and heard[1].code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)
def test_rows_of_another_width_are_a_mismatch(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    here.ranks[0].submit(rows(0, 3), operation=AllGather())
    here.ranks[1].submit(rows(0, 3, width=3), operation=AllGather())
    assert here.report(ReportKind.MISMATCH).instance == 0


@pytest.mark.parametrize(
    ("operation", "shape"),
    [
        (ReduceScatter(ReduceOp.SUM), ()),
        (ReduceScatter(ReduceOp.SUM, 0, (1, 1)), (3,)),
        (ReduceScatter(ReduceOp.SUM, 0, (1, 1, 1)), (3,)),
        (Gather(2), (3,)),
        (Scatter(2), (3,)),
    ],
    ids=str,
)
def test_what_no_rank_can_mean_is_refused_before_anything_is_kept(world: Any, operation: Any, shape: Any) -> None:
    here = world(2)
    with pytest.raises(InvalidArgumentError):
        here.ranks[0].submit(np.zeros(shape, np.float32), operation=operation)


@pytest.mark.parametrize("operation", [AllGather(), Gather(1)], ids=str)
def test_a_gather_of_what_is_0d_is_a_mismatch_before_others_come(world: Any, operation: Any) -> None:
    here = world(2)
    here.ranks[0].submit(np.zeros((), np.float32), operation=operation)
    report = here.report(ReportKind.MISMATCH)
    assert report.instance == 0 and "the value is 0-d" in report.text


@pytest.mark.parametrize("operation", [Broadcast(0), AllReduce(ReduceOp.SUM), AllGather()], ids=str)
def test_only_those_off_root_may_take_what_comes(world: Any, operation: Any) -> None:
    here = world(2)
    with pytest.raises(InvalidArgumentError, match="needs a value"):
        here.ranks[0].submit(operation=operation, open=True)


def test_terms_of_those_who_take_what_comes_are_compared_between_workers(world: Any) -> None:
    here = world(1, 1)
    here.ranks[0].submit(np.zeros((2, 2), np.float32), operation=Scatter(0, 0))
    here.ranks[1].submit(operation=Scatter(0, 1), open=True)
    assert here.report(ReportKind.MISMATCH).instance == 0
