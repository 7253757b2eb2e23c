"""Asynchronous collectives: any number in flight, on several groups and ranks, whoever waits first."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

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


@pytest.mark.parametrize("count", [0, 1, 40, 64])
@pytest.mark.parametrize("seats", [2, 3, 11])
@pytest.mark.parametrize(
    ("dtype", "op", "result"),
    [
        (DType.INT16, ReduceOp.MEAN, DType.FLOAT32),
        (DType.FLOAT16, ReduceOp.SUM, DType.FLOAT16),
        (DType.INT64, ReduceOp.MEAN, DType.FLOAT64),
        (DType.FLOAT32, ReduceOp.SUM, DType.FLOAT32),
    ],
)
def test_what_is_small_goes_across_hosts_by_the_worker(
    count: int, seats: int, dtype: DType, op: ReduceOp, result: DType
) -> None:
    """The worker, which sleeps on its eventfd, gets partials, and the ranks get what it brings; one has no result."""
    geometry = replace(make_geometry(seats, TINY), operated=1)
    descriptor = segment.create(geometry)
    knock = os.eventfd(0, os.EFD_NONBLOCK)
    values = [make_value(dtype, count, rank) for rank in range(seats - 1)]
    partial = np.zeros(count * core.arithmetic_sizes(dtype, REDUCE_OPS[op])[1], np.uint8)
    whole = make_value(result, count, 9)
    found: list[bytes] = []

    def make(engine: core.Engine, leaves_in: tuple[int, ...], leaves_out: tuple[int, ...]) -> core.Plan:
        phase = (int(dtype), (count, count, 0), leaves_in, leaves_out)
        return make_plan(engine, core.ACROSS, (phase,), reduce_op=REDUCE_OPS[op], root=seats - 1)

    def take_part(rank: int) -> None:
        engine = segment.attach(descriptor, geometry, rank, knock=knock)
        leaves_out = (count // 3, count - count // 3) if rank else ()
        outs = tuple(np.zeros_like(whole[:leaf]) for leaf in leaves_out)
        for _ in range(2):
            finish(engine, engine.run(make(engine, (count,), leaves_out), (values[rank],), outs, 0, None))
            assert engine.skip() in (1, 3)
        if rank:
            found.append(b"".join([out.tobytes() for out in outs]))
        engine.detach()

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(seats - 1)]
    for thread in threads:
        thread.start()
    worker = segment.attach(descriptor, geometry, seats - 1, knock=knock, waiting=segment.OPERATED)
    watcher = segment.watch(descriptor, geometry)
    poller = select.poll()
    poller.register(knock, select.POLLIN)

    gathers, brings = make(worker, (), (count,)), make(worker, (count,), ())
    for number in (0, 2):
        while not worker.attend(number, False):
            assert poller.poll(30_000), "nobody rang"  # no other wait, no timer
            os.eventfd_read(knock)
        assert worker.gather(gathers, number, (partial,)) == core.COMPLETE
        assert worker.bring(brings, number, (whole.view(np.uint8),), b"") == core.COMPLETE
        assert watcher.complete(number + 1)  # elsewhere
    for thread in threads:
        thread.join(30)
    wanted = np.zeros_like(partial)
    if count:
        core.fold_inputs(dtype, REDUCE_OPS[op], wanted, values, False, 1, False)
    assert partial.tobytes() == wanted.tobytes()
    assert found == [whole.tobytes()] * (seats - 2)
    worker.detach()
    watcher.close()
    os.close(knock)
    os.close(descriptor)


def test_what_is_moved_across_hosts_is_taken_from_who_has_it_and_brought_to_each() -> None:
    """Two ranks of a host; rank 1 gives three elements, each gets its own part of what comes, told to one that asks."""
    geometry = replace(make_geometry(3, TINY), operated=1)
    descriptor, knock = segment.create(geometry), os.eventfd(0, os.EFD_NONBLOCK)
    worker = segment.attach(descriptor, geometry, 2, knock=knock, waiting=segment.OPERATED)
    ranks = [segment.attach(descriptor, geometry, rank, knock=knock) for rank in range(2)]
    watcher = segment.watch(descriptor, geometry)

    def make(engine: core.Engine, begin: int, given: int, got: int, is_open: bool = False) -> core.Plan:
        phase = (int(DType.INT16), (0, 3, 5, begin), (given,) if given else (), (got,) if got else ())
        return make_plan(engine, core.ACROSS, () if is_open else (phase,), root=2, terms=7, is_open=is_open)

    gathers, brings = make(worker, 0, 0, 3), make(worker, 0, 5, 0)
    mine, outs = np.array([7, 8, 9], np.int16), [np.zeros(2, np.int16), np.zeros(3, np.int16)]
    for number in range(5):
        taken = np.zeros(3, np.int16)
        for out in outs:
            out[:] = 0
        if number == 1:  # its worker carries it out elsewhere
            jobs = [ranks[0].enqueue(make(ranks[0], 0, 0, 0, True), (), (), 0, None)]
            ranks[1].skip()
            assert ranks[0].advance(1000)
            assert watcher.complete(number)
            ranks[0].advance(1000)
            assert [job.state() for job in jobs] == [core.BY_DOORBELL]
            continue
        jobs = [
            ranks[0].enqueue(
                make(ranks[0], 0, 0, 2, is_open=number > 1), (), () if number > 1 else (outs[0],), 0, None
            ),
            ranks[1].enqueue(make(ranks[1], 2, 3, 3), (mine,), (outs[1],), 0, None),
        ]
        assert ranks[0].advance(1000) and worker.gather(gathers, number, (taken,)) == core.PENDING
        assert ranks[1].advance(1000) and worker.gather(gathers, number, (taken,)) == core.COMPLETE
        assert taken.tolist() == mine.tolist()
        results = np.arange(5, dtype=np.int16) + number
        assert worker.bring(brings, number, (results,), b"told" if number > 1 else b"") == core.COMPLETE
        for rank in ranks:
            rank.advance(1000)
        if number > 1:
            assert jobs[0].state() == core.DESCRIBE and jobs[0].blobs() == (b"", b"", b"told")
            jobs[0].describe(make(ranks[0], 0, 0, 2), (), (outs[0],))
            ranks[0].advance(1000)
        assert [job.state() for job in jobs] == [core.COMPLETE] * 2
        assert [*outs[0], *outs[1]] == results.tolist()
    for engine in (*ranks, worker):
        engine.detach()
    watcher.close()
    os.close(knock)
    os.close(descriptor)


def test_what_is_folded_across_hosts_is_brought_to_each_rank_in_its_part() -> None:
    geometry = replace(make_geometry(3, TINY), operated=1)
    descriptor, knock = segment.create(geometry), os.eventfd(0, os.EFD_NONBLOCK)
    worker = segment.attach(descriptor, geometry, 2, knock=knock, waiting=segment.OPERATED)
    ranks = [segment.attach(descriptor, geometry, rank, knock=knock) for rank in range(2)]

    def make(engine: core.Engine, begin: int, given: int, got: int) -> core.Plan:
        phase = (int(DType.INT16), (7, 5, begin), (given,) if given else (), (got,) if got else ())
        return make_plan(engine, core.ACROSS, (phase,), reduce_op=REDUCE_OPS[ReduceOp.SUM], root=2)

    value, outs = np.arange(7, dtype=np.int16), [np.zeros(2, np.int16), np.zeros(3, np.int16)]
    jobs = [
        engine.enqueue(make(engine, 2 * rank, 7, 2 + rank), (value,), (outs[rank],), 0, None)
        for rank, engine in enumerate(ranks)
    ]
    for engine in ranks:
        assert engine.advance(1000)
    partials = np.zeros(7 * core.arithmetic_sizes(DType.INT16, REDUCE_OPS[ReduceOp.SUM])[1], np.uint8)
    assert worker.gather(make(worker, 0, 0, 7), 0, (partials,)) == core.COMPLETE
    assert worker.bring(make(worker, 0, 5, 0), 0, (np.arange(5, dtype=np.int16),), b"") == core.COMPLETE
    for engine in ranks:
        engine.advance(1000)
    assert [job.state() for job in jobs] == [core.COMPLETE] * 2
    assert [one.tolist() for one in outs] == [[0, 1], [2, 3, 4]]
    for begin, got in ((3, 3), (6, 0)):
        with pytest.raises(ValueError, match="do not add up"):
            make(ranks[0], begin, 7, got or 1)
    for engine in (*ranks, worker):
        engine.detach()
    os.close(knock)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("counts", "given", "got"),
    [
        ((0, 3, 5), (), (2,)),  # one too few
        ((0, 3, 5, 4), (), (2,)),  # beyond what is brought
        ((0, 3, 5, 0), (1,), (2,)),  # it has none
        ((300, 3, 5, 0), (300,), ()),  # more than a tick takes
        ((0, 3, 300, 0), (), ()),
    ],
)
def test_a_plan_for_what_is_moved_across_hosts_has_to_fit(
    counts: tuple[int, ...], given: tuple[int, ...], got: tuple[int, ...]
) -> None:
    geometry = replace(make_geometry(3, TINY), operated=1)
    descriptor = segment.create(geometry)
    engine = segment.attach(descriptor, geometry, 0)
    assert make_plan(engine, core.ACROSS, ((int(DType.INT16), (0, 3, 5, 3), (), (2,)),), root=2)
    with pytest.raises(ValueError, match="counts|one tick"):
        make_plan(engine, core.ACROSS, ((int(DType.INT16), counts, given, got),), root=2)
    engine.detach()
    os.close(descriptor)


@pytest.fixture
def alone() -> Iterator[tuple[core.Engine, core.Job, socket.socket]]:
    """A rank that waits for another one in a barrier and has made itself known; the other end of its doorbell."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    geometry = make_geometry(2)
    descriptor = segment.create(geometry)
    engine = segment.attach(descriptor, geometry, 0, doorbell=near.fileno())
    with near, far:
        job = engine.run(make_plan(engine, core.BARRIER), (), (), 0, None)
        assert job is not None
        yield engine, job, far
        engine.detach()
    os.close(descriptor)


Alone = tuple["core.Engine", "core.Job", socket.socket]


def list_looks(job: core.Job, seconds: float) -> list[int]:
    """What a caller is told that waits for so long."""
    end, states = time.monotonic() + seconds, []
    while time.monotonic() < end:
        states.append(job.wait(-1))
    return states


def test_who_waits_for_a_collective_looks_up_seldom(alone: Alone) -> None:
    _, job, _ = alone
    assert len(list_looks(job, 1.0)) <= 5


def test_who_waits_for_a_collective_looks_up_when_its_doorbell_has_something_to_read(alone: Alone, delays: Any) -> None:
    _, job, far = alone
    far.send(b"news")

    def story() -> None:
        looks = list_looks(job, 1.0)  # it is not read, and told again
        assert set(looks) == {core.KNOCK} and len(looks) > 6

    delays.hold(story)


def test_callers_that_are_roused_look_up_and_do_so_often(alone: Alone, delays: Any) -> None:
    engine, job, _ = alone
    waiting = threading.Thread(target=job.wait, args=(-1,))
    waiting.start()
    engine.rouse()
    waiting.join(30)

    def story() -> None:
        looks = list_looks(job, 1.0)
        assert set(looks) == {core.KNOCK} and len(looks) > 6

    delays.hold(story)
