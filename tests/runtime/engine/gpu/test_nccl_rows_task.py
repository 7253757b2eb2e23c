"""What NCCL gathers, scatters and exchanges, through real group loops on fake GPUs and a NCCL of our own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.runtime.engine.conftest import wait_for
from tests.runtime.engine.gpu.test_gpu_task import OUTPUT
from tests.runtime.engine.gpu.test_nccl_task import (
    LAYOUTS,
    NCCL,
    Group,
    Make,
    averaged,
    cluster,
    hold,
    made,
)

from collectived_proto.errors import Code
from collectived_proto.types import AllGather, AllToAll, Operation, ReduceOp, ReduceScatter, ReportKind

__all__ = ["cluster", "hold", "made"]  # fixtures

SUM = ReduceScatter(ReduceOp.SUM)
INTERLEAVED = {
    "ranks of two GPUs in turns": ((4,), (0, 1, 0, 1)),
    "ranks of two workers in turns": (((0, 2), (1, 3)), (0, 0, 0, 0)),
    "GPUs and workers in turns": (((0, 3, 4), (1, 2)), (1, 0, 1, 0, 0)),
}
ALL_LAYOUTS = LAYOUTS | INTERLEAVED


def run(group: Group, operation: Operation, values: list[NDArray[Any]], dtype: Any = None) -> list[NDArray[Any]]:
    """What every rank has received."""
    for rank, value in enumerate(values):
        group.submit(rank, [value], operation, **NCCL)
    dones = [group.world.ranks[rank].done() for rank in range(len(values))]
    return [group.rows(rank, dtype or values[0].dtype, done) for rank, done in enumerate(dones)]


def values_of(size: int, length: int, dtype: Any = np.float32) -> list[NDArray[Any]]:
    return [((np.arange(length) + 10 * rank) % 40).astype(dtype) for rank in range(size)]


def kinds(calls: list[tuple[str, int]]) -> Counter[str]:
    return Counter(kind for kind, _ in calls)


@pytest.mark.parametrize(("hosts", "places"), ALL_LAYOUTS.values(), ids=ALL_LAYOUTS)
@pytest.mark.parametrize("length", [60, 61, 2], ids=["even", "with a remainder", "fewer than ranks"])
def test_every_rank_has_its_rows(cluster: Make, hosts: tuple[Any, ...], places: tuple[int, ...], length: int) -> None:
    there, size = cluster(len(hosts)), len(places)
    group, values = there.group(hosts, places), values_of(size, length)
    for got in run(group, AllGather(), values):
        assert (got == np.concatenate(values)).all()
    for rank, got in enumerate(run(group, AllToAll(), values)):
        assert (got == np.concatenate([np.array_split(value, size)[rank] for value in values])).all()
    for rank, got in enumerate(run(group, SUM, values)):
        assert (got == np.array_split(np.sum(values, axis=0), size)[rank]).all()
    found = kinds(there.calls)
    assert found["all_gath"] + found["broadcas"] and found["send"] == found["recv"]
    assert found["reduce_s"] + found["reduce"]
    assert not there.lost and there.died.empty()


@pytest.mark.parametrize(("hosts", "places"), ALL_LAYOUTS.values(), ids=ALL_LAYOUTS)
@pytest.mark.parametrize("dtype", [np.int32, ml_dtypes.bfloat16, np.float16, np.float64, np.int64, np.complex64])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN], ids=lambda op: op.value)
def test_pieces_are_rounded_once_and_means_divided_once(
    cluster: Make, hosts: tuple[Any, ...], places: tuple[int, ...], dtype: Any, op: ReduceOp
) -> None:
    there, size = cluster(len(hosts)), len(places)
    values = values_of(size, 6 * size, dtype)
    kind = averaged(np.dtype(dtype)) if op is ReduceOp.MEAN else np.dtype(dtype)
    wide = np.stack(values).astype(np.complex128)
    exact = (wide.sum(0) if op is ReduceOp.SUM else wide.mean(0)).astype(np.complex128)
    expected = (exact if kind.kind == "c" else exact.real).astype(kind)
    for rank, got in enumerate(run(there.group(hosts, places), ReduceScatter(op), values, kind)):
        assert (got == np.array_split(expected, size)[rank]).all()
    assert there.calls


@pytest.mark.parametrize("operation", [AllGather(), SUM, AllToAll()], ids=str)
def test_where_each_gpu_has_one_rank_nothing_is_copied_beside_nccl(cluster: Make, operation: Operation) -> None:
    there = cluster(2)
    run(there.group((1, 1), (0, 0)), operation, values_of(2, 100))
    own = 200 if isinstance(operation, AllToAll) else 0  # bytes of rows that a rank sends to itself
    assert [cuda.copied_bytes for cuda in there.cudas] == [own, own]
    assert not any(gpu.scratch._free or gpu.pinned._free for gpus in there.gpus for gpu in gpus if operation != SUM)


def test_shares_of_one_length_are_gathered_and_scattered_by_one_call(cluster: Make) -> None:
    there = cluster(2)
    group = there.group((2, 2), (0, 0, 0, 0))
    run(group, AllGather(), values_of(4, 10))
    run(group, SUM, values_of(4, 12))
    assert there.nccls[0].calls == there.nccls[1].calls == [("all_gath", 80), ("reduce_s", 6)]
    there = cluster(2)
    group = there.group((2, 1), (0, 0, 0))
    run(group, AllGather(), values_of(3, 10))
    run(group, SUM, values_of(3, 12))
    assert there.nccls[0].calls == [("broadcas", 80), ("broadcas", 40), ("reduce", 8), ("reduce", 4)]


def test_what_one_call_does_not_take_is_called_for_in_parts(cluster: Make) -> None:
    there = cluster(2, most=100)
    group, values = there.group((2, 1), (0, 0, 0)), values_of(3, 300)
    for got in run(group, AllGather(), values):
        assert (got == np.concatenate(values)).all()
    for rank, got in enumerate(run(group, SUM, values)):
        assert (got == np.array_split(np.sum(values, axis=0), 3)[rank]).all()
    for rank, got in enumerate(run(group, AllToAll(), values)):
        assert (got == np.concatenate([np.array_split(value, 3)[rank] for value in values])).all()
    assert max(count for _, count in there.calls) == 100


@pytest.mark.parametrize("operation", [AllGather(), SUM, AllToAll()], ids=str)
def test_no_rows_need_no_call(cluster: Make, operation: Operation) -> None:
    there = cluster(2)
    for got in run(there.group((1, 1), (0, 0)), operation, values_of(2, 0)):
        assert got.size == 0
    assert not there.calls


@pytest.mark.parametrize(("hosts", "places"), ALL_LAYOUTS.values(), ids=ALL_LAYOUTS)
def test_lengths_that_differ_go_by_nccl_and_come_by_the_host(
    cluster: Make, hosts: tuple[Any, ...], places: tuple[int, ...]
) -> None:
    there, size = cluster(len(hosts)), len(places)
    values = [np.full(5 * rank * rank + 1, rank, np.float32) for rank in range(size)]
    for got in run(there.group(hosts, places), AllGather(), values):
        assert (got == np.concatenate(values)).all()
    assert there.calls and not there.lost


@pytest.mark.parametrize(("hosts", "places"), ALL_LAYOUTS.values(), ids=ALL_LAYOUTS)
@pytest.mark.parametrize("is_even", [True, False])
def test_rows_are_dealt_out_by_sizes(
    cluster: Make, hosts: tuple[Any, ...], places: tuple[int, ...], is_even: bool
) -> None:
    there, size = cluster(len(hosts)), len(places)
    group = there.group(hosts, places)
    sizes = [[3 if is_even else 1 + rank + 2 * to for to in range(size)] for rank in range(size)]
    values = [np.arange(sum(one), dtype=np.int16) + 100 * rank for rank, one in enumerate(sizes)]
    for rank, value in enumerate(values):
        group.submit(rank, [value], AllToAll(0, tuple(sizes[rank])), **NCCL)
    for rank in range(size):
        done = group.world.ranks[rank].done()
        parts = [np.split(value, np.cumsum(cut)[:-1])[rank] for value, cut in zip(values, sizes, strict=True)]
        assert (group.rows(rank, np.int16, done) == np.concatenate(parts)).all()
        assert not is_even or places[rank] < 0 or not done.has_result
    assert there.calls and not there.lost


def test_what_nccl_does_not_take_goes_without_it_and_status_says_why(cluster: Make) -> None:
    there = cluster(2)
    group, values = there.group((1, 1), (0, 0)), values_of(2, 10, np.int16)
    for rank, got in enumerate(run(group, SUM, values)):
        assert (got == np.split(values[0] + values[1], 2)[rank]).all()
    assert not there.calls
    (program,) = group.world.group_loops[0]._programs._programs.values()
    why = "it carries every reduce_scatter; the hint NCCL cannot be followed here: NCCL has no sum of int16"
    assert program.reasons == {"ring": why}


def test_ranks_that_differ_are_found_out_before_nccl_is_called(cluster: Make) -> None:
    there = cluster(2)
    group = there.group((1, 1), (0, 0))
    group.submit(0, [np.ones(10, np.float32)], SUM, **NCCL)
    group.submit(1, [np.ones(11, np.float32)], SUM, **NCCL)
    group.world.report(ReportKind.MISMATCH)
    assert there.calls == []


@pytest.mark.parametrize("operation", [AllGather(), SUM, AllToAll()], ids=str)
def test_a_verdict_amid_a_kernel_aborts_it_and_the_gpu_is_usable_afterwards(
    cluster: Make, operation: Operation
) -> None:
    there = cluster(2)
    group, values = there.group((1, 1), (0, 0)), values_of(2, 10)
    run(group, operation, values)
    before = len(there.nccls[0].calls)
    for nccl in there.nccls:
        nccl.stuck = True
    for rank in (0, 1):
        group.submit(rank, [values[rank]], operation, **NCCL)
    wait_for(lambda: all(len(nccl.calls) > before for nccl in there.nccls))
    group.world.rule(group.world.verdict(Code.UNAVAILABLE))
    for rank in (0, 1):
        assert group.world.ranks[rank].failed()[1].code == Code.UNAVAILABLE
    wait_for(lambda: [nccl.freed for nccl in there.nccls] == [[("abort", 0)], [("abort", 1)]])
    for nccl in there.nccls:
        nccl.stuck = False
    other = there.group((1, 1), (0, 0), key=8)
    assert (run(other, AllGather(), values)[0] == np.concatenate(values)).all()
    assert not there.lost and there.died.empty()


def test_leaves_are_launched_in_one_order_on_all_workers_beside_those_that_nccl_does_not_take(cluster: Make) -> None:
    there = cluster(2)
    group = there.group((1, 1), (0, 0))
    leaves = [np.arange(2 * number).astype(np.int32 if number % 3 else np.int16) for number in range(1, 12)]
    for rank in range(2):
        group.submit(rank, leaves, SUM, **NCCL)
    for rank in range(2):
        packs = sorted(group.world.ranks[rank].done().pack for _ in leaves)
        assert packs == list(range(len(leaves)))
        rows = group.world.ranks[rank].local_rank.prepared[5].device_rows
        assert rows is not None
        for leaf, start, stop in zip(reversed(leaves), rows.offsets, rows.ends, strict=True):  # the last leaf first
            got = group.memory(rank, OUTPUT + start, stop - start).view(leaf.dtype)
            assert (got == 2 * np.array_split(leaf, 2)[rank]).all()
    assert there.nccls[0].calls == there.nccls[1].calls and len(there.nccls[0].calls) == 8
