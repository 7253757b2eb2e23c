"""Asynchronous collectives: any number in flight, on several groups and ranks, whoever waits first."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.native.ranks import (
    REDUCE_OPS,
    TINY,
    all_reduce,
    as_threads,
    finish,
    fold,
    make_geometry,
    make_plan,
    make_value,
)
from tests.waiting import settle

from collectived_native import core, segment
from collectived_proto.types import DType, ReduceOp

SIZES = (1, 100, 5000, 3, 40_000)


def submit(engine: core.Engine, rank: int, count: int, notify: bool = False) -> tuple[core.Job, np.ndarray]:
    value = make_value(DType.FLOAT32, count, rank)
    out = np.zeros_like(value)
    return engine.submit(all_reduce(DType.FLOAT32, value).plan(engine), (value,), (out,), 0, None, notify), out


def wanted(seats: int, count: int) -> np.ndarray:
    return fold(DType.FLOAT32, ReduceOp.SUM, [make_value(DType.FLOAT32, count, r) for r in range(seats)])


@pytest.mark.parametrize("seats", [2, 4])
@pytest.mark.parametrize("backwards", [False, True])
def test_many_in_flight_all_complete(seats: int, backwards: bool) -> None:
    def body(engine: core.Engine, rank: int) -> list[bool]:
        flight = [(size, *submit(engine, rank, size)) for _ in range(13) for size in SIZES]
        for _, job, _ in reversed(flight) if backwards else flight:
            finish(engine, job)
        return [out.tobytes() == wanted(seats, size).tobytes() for size, _, out in flight]

    for found in as_threads(seats, body):
        assert found == [True] * 13 * len(SIZES)


def test_what_nobody_waits_for_completes_all_the_same() -> None:
    def body(engine: core.Engine, rank: int) -> bool:
        job, out = submit(engine, rank, 40_000)
        settle(lambda: job.state() == core.COMPLETE)
        return out.tobytes() == wanted(2, 40_000).tobytes()

    assert as_threads(2, body) == [True, True]


def test_two_groups_used_in_opposite_order_do_not_block_each_other() -> None:
    geometry = make_geometry(2)
    first, second = segment.create(geometry), segment.create(geometry)

    def run(rank: int, found: list[bool]) -> None:
        engines = [segment.attach(one, geometry, rank) for one in (first, second)]
        order = engines if rank == 0 else engines[::-1]
        flight = [submit(engine, rank, 5000) for engine in order]
        for engine, (job, out) in zip(order, flight, strict=True):
            finish(engine, job)
            found.append(out.tobytes() == wanted(2, 5000).tobytes())
        for engine in engines:
            engine.detach()

    found: list[bool] = []
    threads = [threading.Thread(target=run, args=(rank, found)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [True] * 4
    os.close(first)
    os.close(second)


def on_one_thread(seats: int, body: Callable[[list[core.Engine]], None]) -> None:
    geometry = make_geometry(seats)
    descriptor = segment.create(geometry)
    engines = [segment.attach(descriptor, geometry, rank) for rank in range(seats)]
    try:
        body(engines)
    finally:
        for engine in engines:
            engine.detach()
        os.close(descriptor)


@pytest.mark.parametrize("count", [1, 300_000])
def test_one_thread_submits_for_every_rank_and_then_waits(count: int) -> None:
    def body(engines: list[core.Engine]) -> None:
        flight = [submit(engine, rank, count) for rank, engine in enumerate(engines)]
        for engine, (job, out) in zip(engines, flight, strict=True):
            finish(engine, job)
            assert out.tobytes() == wanted(3, count).tobytes()

    on_one_thread(3, body)


def test_a_blocking_call_comes_after_what_was_submitted_before() -> None:
    def body(engine: core.Engine, rank: int) -> bool:
        job, out = submit(engine, rank, 300_000)
        finish(engine, engine.run(make_plan(engine, core.BARRIER), (), (), 0, None))
        return job.state() == core.COMPLETE and out.tobytes() == wanted(2, 300_000).tobytes()

    assert as_threads(2, body) == [True, True]


def test_finished_jobs_are_collected_once() -> None:
    def body(engine: core.Engine, rank: int) -> int:
        jobs = {submit(engine, rank, size, notify=True)[0] for size in SIZES}
        seen: list[core.Job] = []
        end = time.monotonic() + 30
        while len(seen) < len(jobs) and time.monotonic() < end:
            seen += engine.collect(100_000_000)
        assert set(seen) == jobs and engine.collect(0) == []
        return len(seen)

    assert as_threads(2, body) == [len(SIZES)] * 2


def test_several_threads_use_one_engine() -> None:
    """All jobs of an engine are numbered; which thread's come first does not matter where all are alike."""
    rounds, per_rank = 100, 3

    def body(engine: core.Engine, rank: int) -> int:
        wrong = []

        def use() -> None:
            value = np.full(100, rank + 1.0, np.float32)
            plan = all_reduce(DType.FLOAT32, value).plan(engine)
            for number in range(rounds):
                out = np.zeros_like(value)
                if number % 3:
                    finish(engine, engine.run(plan, (value,), (out,), 0, None))
                else:
                    finish(engine, engine.submit(plan, (value,), (out,), 0, None, False))
                if not (out == 3.0).all():
                    wrong.append(number)

        threads = [threading.Thread(target=use) for _ in range(per_rank)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        return len(wrong) + engine.next_instance()

    assert as_threads(2, body) == [rounds * per_rank] * 2


def test_a_wait_with_a_timeout_leaves_the_job_alone() -> None:
    gate = threading.Event()

    def body(engine: core.Engine, rank: int) -> bool:
        if rank == 1:
            assert gate.wait(30)
        job, out = submit(engine, rank, 100)
        if rank == 0:
            assert job.wait(1_000_000) == core.PENDING
            gate.set()
        finish(engine, job)
        return out.tobytes() == wanted(2, 100).tobytes()

    assert as_threads(2, body) == [True, True]


def test_detaching_ends_jobs_that_are_not_done() -> None:
    geometry = make_geometry(2)
    descriptor = segment.create(geometry)
    engine = segment.attach(descriptor, geometry, 0)
    jobs = [submit(engine, 0, size)[0] for size in SIZES]
    waiter = threading.Thread(target=lambda: finished.append(jobs[-1].wait(-1)))
    finished: list[int] = []
    waiter.start()
    settle(lambda: jobs[0].state() == core.PENDING)
    engine.detach()
    waiter.join(30)
    assert [job.state() for job in jobs] == [core.DETACHED] * len(SIZES)
    assert finished in ([core.DETACHED], [core.KNOCK])
    with pytest.raises(RuntimeError, match="detached"):
        engine.verdict()
    os.close(descriptor)


def test_a_worker_operates_a_rank_without_ever_waiting() -> None:
    geometry = make_geometry(2, TINY)
    descriptor = segment.create(geometry)
    engines = [segment.attach(descriptor, geometry, rank) for rank in range(2)]
    values = [make_value(DType.FLOAT32, 5000, rank) for rank in range(2)]
    outs = [np.zeros_like(value) for value in values]
    other = threading.Thread(
        target=lambda: finish(
            engines[0],
            engines[0].run(all_reduce(DType.FLOAT32, values[0]).plan(engines[0]), (values[0],), (outs[0],), 0, None),
        )
    )
    other.start()
    job = engines[1].enqueue(all_reduce(DType.FLOAT32, values[1]).plan(engines[1]), (values[1],), (outs[1],), 0, None)
    while job.state() == core.PENDING:
        if not engines[1].advance(4096):
            time.sleep(0)
    other.join(30)
    assert outs[0].tobytes() == outs[1].tobytes() == wanted(2, 5000).tobytes()
    for engine in engines:
        engine.detach()
    os.close(descriptor)


def test_a_worker_that_sleeps_on_its_eventfd_operates_a_rank() -> None:
    """A host's share of a sum goes to the worker as partials, and the whole sum comes back from it."""
    seats, count, op = 3, 3000, ReduceOp.MEAN
    geometry = make_geometry(seats, TINY)
    descriptor = segment.create(geometry)
    knock = os.eventfd(0, os.EFD_NONBLOCK)
    values = [make_value(DType.INT16, count, rank) for rank in range(seats - 1)]
    partial = np.zeros(count, np.int64)
    whole = make_value(DType.FLOAT32, count, 9)
    found: list[bytes] = []

    def reduce(engine: core.Engine, leaves_in: tuple[int, ...], leaves_out: tuple[int, ...]) -> core.Plan:
        phase = (int(DType.INT16), (count,), leaves_in, leaves_out)
        return make_plan(engine, core.REDUCE_PARTIAL, (phase,), reduce_op=REDUCE_OPS[op], root=seats - 1)

    def bring(engine: core.Engine, leaves_in: tuple[int, ...], leaves_out: tuple[int, ...]) -> core.Plan:
        phase = (int(DType.FLOAT32), (count,), leaves_in, leaves_out)
        return make_plan(engine, core.BROADCAST, (phase,), root=seats - 1)

    def take_part(rank: int) -> None:
        engine = segment.attach(descriptor, geometry, rank, knock=knock)
        finish(engine, engine.run(reduce(engine, (count,), ()), (values[rank],), (), 0, None))
        out = np.zeros(count, np.float32)
        finish(engine, engine.run(bring(engine, (), (count,)), (), (out,), 0, None))
        found.append(out.tobytes())
        engine.detach()

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(seats - 1)]
    for thread in threads:
        thread.start()
    worker = segment.attach(descriptor, geometry, seats - 1, knock=knock, waiting=segment.OPERATED)
    poller = select.poll()
    poller.register(knock, select.POLLIN)
    for plan, inputs, outputs in (
        (reduce(worker, (), (count,)), (), (partial,)),
        (bring(worker, (count,), ()), (whole,), ()),
    ):
        job = worker.enqueue(plan, inputs, outputs, 0, None)
        while True:
            while worker.advance(4096):
                pass
            if job.state() != core.PENDING:
                break
            assert poller.poll(30_000), "nobody rang"  # no other wait, no timer
            os.eventfd_read(knock)
        finish(worker, job)
    for thread in threads:
        thread.join(30)
    wanted = np.zeros(count, np.int64)
    core.fold_inputs(DType.INT16, REDUCE_OPS[op], wanted.view(np.uint8), values, False, 1, False)
    assert partial.tobytes() == wanted.tobytes()
    assert found == [whole.tobytes()] * (seats - 1)
    worker.detach()
    os.close(knock)
    os.close(descriptor)
