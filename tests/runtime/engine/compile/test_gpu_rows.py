"""What each GPU calls of NCCL for the rows of a leaf."""

from __future__ import annotations

import pytest

from collectived_proto.types import (
    AllGather,
    AllToAll,
    AxisOperation,
    GroupInfo,
    Member,
    Peer,
    ReduceOp,
    ReduceScatter,
    Tier,
)
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.compile import gpu_rows
from collectived_runtime.engine.compile.gpu_rows import LeafRows, RowsCall, RowsCallKind, plan_gpu_rows
from collectived_runtime.plan.moves import Span

SUM = ReduceScatter(ReduceOp.SUM)


def topology_of(homes: list[tuple[int, int]], me: int = 0) -> GroupTopology:
    """By rank, its worker and GPU."""
    members = tuple(
        Member(rank, f"/job:worker/replica:0/task:{task}/device:GPU:{gpu}", task, "h", 1)
        for rank, (task, gpu) in enumerate(homes)
    )
    tasks = sorted({task for task, _ in homes})
    peers = tuple(
        Peer(task, "i", "h", "a:1", tuple(rank for rank, (home, _) in enumerate(homes) if home == task))
        for task in tasks
    )
    return GroupTopology.from_peers(GroupInfo("g", 1, 1, members), peers, me, (Tier("ring"),))


def calls_of(
    operation: AxisOperation, homes: list[tuple[int, int]], length: int, units: int = 1
) -> list[list[RowsCall]]:
    """The calls of all GPUs of the first worker, for rows of two elements."""
    leaf = LeafRows(0, length, 2, [(length,)] * len(homes), units)
    return [list(one.calls) for one in plan_gpu_rows(operation, topology_of(homes), leaf)]


def test_ranks_are_found_by_gpu() -> None:
    topology = topology_of([(0, 1), (1, 0), (0, 0), (0, 1)])
    assert topology.gpus == ((0, 0), (0, 1), (1, 0)) and topology.ranks_by_gpu == ((2,), (0, 3), (1,))
    rows = plan_gpu_rows(AllGather(), topology, LeafRows(0, 1, 1, [(1,)] * 4, 4))
    assert [one.ranks for one in rows] == [(2,), (0, 3)], "those of this worker alone"


@pytest.mark.parametrize(
    ("operation", "kind", "span"),
    [(AllGather(), RowsCallKind.ALL_GATHER, Span(8, 16)), (SUM, RowsCallKind.REDUCE_SCATTER, Span(4, 8))],
    ids=str,
)
def test_shares_of_one_length_take_one_call(operation: AxisOperation, kind: RowsCallKind, span: Span) -> None:
    assert calls_of(operation, [(0, 0), (0, 1)], 4)[1] == [RowsCall(kind, span)]


def test_other_shares_take_one_call_for_each_gpu() -> None:
    homes = [(0, 0), (0, 0), (0, 1)]
    gathered = [RowsCall(RowsCallKind.BROADCAST, Span(0, 8), 0), RowsCall(RowsCallKind.BROADCAST, Span(8, 12), 1)]
    assert calls_of(AllGather(), homes, 2) == [gathered, gathered]
    reduced = [RowsCall(RowsCallKind.REDUCE, Span(0, 6), 0), RowsCall(RowsCallKind.REDUCE, Span(6, 8), 1)]
    assert calls_of(SUM, homes, 4) == [reduced, reduced]
    assert calls_of(SUM, homes, 2)[0] == [RowsCall(RowsCallKind.REDUCE, Span(0, 4), 0)], "but those that get nothing"


def test_what_one_call_of_some_binding_could_not_take_is_not_gathered_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rows, "MOST_ELEMENTS", 31)
    homes = [(0, 0), (0, 1)]
    assert len(calls_of(AllGather(), homes, 4, units=4)[0]) == 2
    assert len(calls_of(AllGather(), homes, 3, units=4)[0]) == 1


def test_rows_are_exchanged_with_those_who_get_or_give_some() -> None:
    homes = [(0, 0), (0, 1), (0, 2)]
    first, _, last = calls_of(AllToAll(), homes, 2)  # the third rank gets nothing
    kinds = [(call.kind, call.peer, len(call.span)) for call in first]
    assert kinds == [(RowsCallKind.SEND, 1, 2), (RowsCallKind.RECV, 2, 2), (RowsCallKind.RECV, 1, 2)]
    assert {call.kind for call in last} == {RowsCallKind.SEND}


@pytest.mark.parametrize("operation", [AllGather(), SUM, AllToAll()], ids=str)
def test_no_rows_take_no_call(operation: AxisOperation) -> None:
    assert calls_of(operation, [(0, 0), (0, 1)], 0) == [[], []]
