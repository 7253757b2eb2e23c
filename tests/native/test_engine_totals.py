"""What a seat has completed is counted in its own memory, by description, for the worker to read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
from tests.native.ranks import all_reduce, carry_out, finish, make_geometry, make_plan, make_value

from collectived_native import core, segment
from collectived_native.segment import Total
from collectived_proto.types import DType, ReduceOp

F32 = int(DType.FLOAT32)
PLACES = 243  # of descriptions; beyond them each operation has one place


def watched(seats: int, body: Callable[[core.Engine, int], None]) -> list[list[Total]]:
    """Runs ranks as threads; what a worker reads of each seat afterwards."""
    geometry = make_geometry(seats)
    descriptor = segment.create(geometry)
    watcher = segment.watch(descriptor, geometry)

    def run(rank: int) -> None:
        engine = segment.attach(descriptor, geometry, rank)
        body(engine, rank)
        engine.detach()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(seats)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive(), "a rank hangs"
    found = [[Total(*one) for one in watcher.totals(seat)] for seat in range(seats)]
    with pytest.raises(ValueError, match="no such seat"):
        watcher.totals(seats)
    watcher.close()
    os.close(descriptor)
    return found


@pytest.mark.parametrize("count", [1, 1000, 1_000_000])  # in one tick, and in several
def test_a_seat_counts_what_it_has_completed_by_description(count: int) -> None:
    value = make_value(DType.FLOAT32, count, 0)

    def body(engine: core.Engine, rank: int) -> None:
        work = all_reduce(DType.FLOAT32, value)
        plans = [work.plan(engine, description=10 * rank + which) for which in (1, 2)]
        for which in (0, 1, 1):
            finish(engine, engine.run(plans[which], work.inputs, work.make_outputs(), 0, None))
        finish(engine, engine.submit(plans[0], work.inputs, work.make_outputs(), 0, None, False))
        finish(engine, engine.run(make_plan(engine, core.BARRIER, description=7), (), (), 0, None))

    for rank, found in enumerate(watched(2, body)):
        first, second, barrier = found
        assert first[:4] == (10 * rank + 1, core.ALL_REDUCE, 2, 2 * value.nbytes)
        assert second[:4] == (10 * rank + 2, core.ALL_REDUCE, 2, 2 * value.nbytes)
        assert barrier[:4] == (7, core.BARRIER, 1, 0)
        assert all(0 < one.nanoseconds < 40e9 for one in found)


def test_a_broadcast_counts_the_bytes_of_its_root_on_every_seat() -> None:
    def body(engine: core.Engine, rank: int) -> None:
        phase = (F32, (100,), (100,) if rank == 1 else (), () if rank == 1 else (100,))
        plan = make_plan(engine, core.BROADCAST, (phase,), root=1)
        inputs = (np.ones(100, np.float32),) if rank == 1 else ()
        finish(engine, engine.run(plan, inputs, () if rank == 1 else (np.empty(100, np.float32),), 0, None))

    assert [found[0][:4] for found in watched(3, body)] == [(0, core.BROADCAST, 1, 400)] * 3


def test_descriptions_without_a_place_are_counted_together_by_operation() -> None:
    beyond = 30

    def body(engine: core.Engine, rank: int) -> None:
        work = all_reduce(DType.FLOAT32, np.ones(2, np.float32), ReduceOp.SUM)
        for number in range(PLACES + beyond):
            finish(engine, engine.run(work.plan(engine, description=number), work.inputs, work.make_outputs(), 0, None))
        finish(engine, engine.run(make_plan(engine, core.BARRIER, description=PLACES + 900), (), (), 0, None))
        finish(engine, engine.run(work.plan(engine, description=0), work.inputs, work.make_outputs(), 0, None))

    for found in watched(2, body):
        assert [one.description for one in found] == [*range(PLACES), -1, -1]
        assert found[0][:4] == (0, core.ALL_REDUCE, 2, 16)
        assert found[-2][:4] == (-1, core.ALL_REDUCE, beyond, beyond * 8)
        assert found[-1][:4] == (-1, core.BARRIER, 1, 0)


def test_an_instance_that_fails_is_not_counted() -> None:
    def body(engine: core.Engine, rank: int) -> None:
        carry_out(engine, all_reduce(DType.FLOAT32, np.ones(2, np.float32)))
        if rank:
            engine.abort(core.ABORTED, rank)
            return
        job = engine.run(make_plan(engine, core.BARRIER, description=1), (), (), 0, None)
        while job is not None and job.wait(-1) == core.KNOCK:
            pass

    assert [[one[:3] for one in found] for found in watched(2, body)] == [[(0, core.ALL_REDUCE, 1)]] * 2
