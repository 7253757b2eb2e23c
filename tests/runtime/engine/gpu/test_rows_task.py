"""What cuts values apart or joins them, in the memory of GPUs, through real group loops on fake devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.runtime.engine.conftest import wait_for
from tests.runtime.engine.gpu.test_gpu_task import LAYOUTS, Make, Party, hold, party

from collectived_proto.errors import Code
from collectived_proto.types import AllGather, AllToAll, Operation, ReduceOp, ReduceScatter
from collectived_runtime.engine.gpu import rows_task

__all__ = ["hold", "party"]  # fixtures

SUM = ReduceScatter(ReduceOp.SUM)


def values_of(size: int, length: int, dtype: Any = np.float32) -> list[NDArray[Any]]:
    return [((np.arange(length) + 10 * rank) % 50).astype(dtype) for rank in range(size)]


def run(ranks: Party, operation: Operation, values: list[NDArray[Any]], dtype: Any = None) -> list[NDArray[Any]]:
    """What every rank has received."""
    for rank, value in enumerate(values):
        ranks.submit(rank, [value], operation)
    dones = [ranks.world.ranks[rank].done() for rank in range(len(values))]
    return [ranks.rows(rank, dtype or values[0].dtype, done) for rank, done in enumerate(dones)]


def pieces(values: list[NDArray[Any]], rank: int) -> NDArray[Any]:
    """The rows of that rank, of each value."""
    return np.concatenate([np.array_split(value, len(values))[rank] for value in values])


@pytest.mark.parametrize(("hosts", "places"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_every_rank_has_its_rows_wherever_it_is(
    party: Make, hosts: tuple[int, ...], places: tuple[int, ...], dtype: Any
) -> None:
    ranks, size = party(hosts, places), len(places)
    values = values_of(size, 100, dtype)
    for got in run(ranks, AllGather(), values):
        assert (got == np.concatenate(values)).all()
    for rank, got in enumerate(run(ranks, AllToAll(), values)):
        assert (got == pieces(values, rank)).all()
    whole = np.sum(values, axis=0, dtype=np.int64)
    for rank, got in enumerate(run(ranks, SUM, values)):
        assert (got == np.array_split(whole, size)[rank]).all()
    assert not ranks.lost


@pytest.mark.parametrize("dtype", [np.int32, np.float16, np.complex64])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN], ids=lambda op: op.value)
def test_pieces_are_finished_as_on_the_host(party: Make, dtype: Any, op: ReduceOp) -> None:
    values = values_of(3, 100, dtype)
    kind = np.float64 if (dtype, op) == (np.int32, ReduceOp.MEAN) else dtype
    there = run(party((3,), (0, 0, 0)), ReduceScatter(op), values, kind)
    here = run(party((3,), (-1, -1, -1)), ReduceScatter(op), values, kind)
    for one, other in zip(there, here, strict=True):
        assert one.tobytes() == other.tobytes()


def test_what_meets_on_one_gpu_never_leaves_it(party: Make) -> None:
    ranks, values = party((3,), (0, 0, 0)), values_of(3, 300)
    (cuda,) = ranks.cudas
    run(ranks, AllGather(), values)
    assert [sources for _, sources in cuda.folds] == [1, 1, 1], "a kernel reads each value once for all results"
    assert cuda.copied_bytes == 0
    run(ranks, AllToAll(), values)
    assert cuda.copied_bytes == 3 * 1200
    run(ranks, SUM, values)
    assert cuda.copied_bytes == 3 * 1200, "each rank's piece is folded to where it belongs"
    assert [sources for _, sources in cuda.folds] == [1, 1, 1, 3, 3, 3]
    assert not any(gpu.pinned._free or gpu.scratch._free for gpu in ranks.gpus)


def test_more_ranks_than_one_kernel_takes_are_folded_on_the_host(party: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_task, "MOST_SOURCES", 2)
    values = values_of(3, 10)
    for rank, got in enumerate(run(party((3,), (0, 0, 0)), SUM, values)):
        assert (got == np.array_split(np.sum(values, axis=0), 3)[rank]).all()


@pytest.mark.parametrize(("hosts", "places"), LAYOUTS.values(), ids=LAYOUTS)
def test_lengths_that_differ_come_by_a_slot_of_the_host(
    party: Make, hosts: tuple[int, ...], places: tuple[int, ...]
) -> None:
    ranks = party(hosts, places)
    values = [np.full(rank * rank + 1, rank, np.float32) for rank in range(len(places))]
    for rank, value in enumerate(values):
        ranks.submit(rank, [value], AllGather())
    for rank in range(len(places)):
        done = ranks.world.ranks[rank].done()
        assert done.has_result or places == (0,)
        assert (ranks.rows(rank, np.float32, done) == np.concatenate(values)).all()


@pytest.mark.parametrize(("hosts", "places"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("is_even", [True, False])
def test_rows_are_dealt_out_by_sizes(
    party: Make, hosts: tuple[int, ...], places: tuple[int, ...], is_even: bool
) -> None:
    ranks, size = party(hosts, places), len(places)
    sizes = [[3 if is_even else 1 + rank + 2 * to for to in range(size)] for rank in range(size)]
    values = [np.arange(sum(one), dtype=np.int16) + 100 * rank for rank, one in enumerate(sizes)]
    for rank, value in enumerate(values):
        ranks.submit(rank, [value], AllToAll(0, tuple(sizes[rank])))
    for rank in range(size):
        done = ranks.world.ranks[rank].done()
        parts = [np.split(value, np.cumsum(cut)[:-1])[rank] for value, cut in zip(values, sizes, strict=True)]
        assert (ranks.rows(rank, np.int16, done) == np.concatenate(parts)).all()
        assert not is_even or done.has_result == (places[rank] < 0)


def test_one_rank_may_fit_where_others_do_not(party: Make) -> None:
    """Three ranks with 1, 2 and 3 rows have 6: as many as the second one has reckoned with."""
    ranks = party((3,), (0, 0, 0))
    values = [np.full(rank + 1, rank, np.float32) for rank in range(3)]
    for rank, value in enumerate(values):
        ranks.submit(rank, [value], AllGather())
    dones = [ranks.world.ranks[rank].done() for rank in range(3)]
    assert [done.has_result for done in dones] == [True, False, True]
    for rank, done in enumerate(dones):
        assert (ranks.rows(rank, np.float32, done) == np.concatenate(values)).all()


def test_leaves_lie_one_behind_the_other_in_order_of_the_value(party: Make) -> None:
    ranks = party((2,), (0, 0))
    for rank in range(2):
        ranks.submit(rank, [np.full(5, rank, np.int16), np.full(3, 10 + rank, np.float64)], AllGather())
    for rank in range(2):
        for pack in (0, 1):  # the last leaf first
            assert ranks.world.ranks[rank].done().pack == pack
        rows = ranks.world.ranks[rank].local_rank.prepared[5].device_rows
        assert rows is not None and rows.offsets == (64, 0)
        first, last = ranks.memory(rank, 2 << 20, 20).view(np.int16), ranks.memory(rank, (2 << 20) + 64, 48)
        assert first.tolist() == [0] * 5 + [1] * 5 and last.view(np.float64).tolist() == [10] * 3 + [11] * 3


@pytest.mark.parametrize(("hosts", "places"), [((2,), (0, 0)), ((3,), (0, 1, 0)), ((1, 1), (0, 0))], ids=str)
@pytest.mark.parametrize("operation", [AllGather(), SUM, AllToAll()], ids=str)
def test_a_verdict_is_told_while_gpus_hang_and_their_memory_is_free_when_they_go_on(
    party: Make, hold: Path, hosts: tuple[int, ...], places: tuple[int, ...], operation: Operation
) -> None:
    ranks = party(hosts, places)
    values = values_of(len(places), 60_000)
    run(ranks, operation, values)
    idle = [(len(gpu.pinned._free), len(gpu.scratch._free)) for gpu in ranks.gpus]
    hold.touch()
    for rank, value in enumerate(values):
        ranks.submit(rank, [value], operation)
    wait_for(lambda: all(any(stream for stream in cuda._streams.values()) for cuda in ranks.cudas))
    ranks.world.rule(ranks.world.verdict(Code.DEADLINE_EXCEEDED, 1))
    for one in ranks.world.ranks:
        assert one.failed()[1].code == Code.DEADLINE_EXCEEDED
        assert one.in_use and not one.freed
    hold.unlink()
    for one in ranks.world.ranks:
        assert one.hear_freed() == (100, 1)
    wait_for(lambda: [(len(gpu.pinned._free), len(gpu.scratch._free)) for gpu in ranks.gpus] == idle)
    assert not ranks.lost
