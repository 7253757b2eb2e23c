"""A collective that cannot complete ends alike on all ranks: one instance, one reason, one culprit."""

from __future__ import annotations

import mmap
import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.native.ranks import (
    TINY,
    Failed,
    all_reduce,
    carry_out,
    finish,
    make_geometry,
    make_plan,
    make_value,
)
from tests.waiting import settle

from collectived_native import core, segment
from collectived_native.segment import Review, SeatState, Waiting
from collectived_proto.types import DType

Verdict = tuple[int, int, int, tuple[int, ...]]
VALUE = make_value(DType.FLOAT32, 5000, 0)


def fail(engine: core.Engine, job: core.Job | None) -> Verdict:
    """The verdict of a collective that must not complete."""
    with pytest.raises(Failed) as caught:
        finish(engine, job)
    assert caught.value.reason == caught.value.verdict[1]
    return caught.value.verdict


def watched(
    seats: int, body: Callable[[core.Engine, int], Verdict], watch: Callable[[core.Watcher], None], start: int = 0
) -> list[Verdict]:
    """Runs ranks as threads beside a worker; what each rank returned."""
    geometry = replace(make_geometry(seats, TINY), start=start)
    descriptor = segment.create(geometry)
    watcher = segment.watch(descriptor, geometry)
    found: dict[int, Verdict] = {}

    def run(rank: int) -> None:
        engine = segment.attach(descriptor, geometry, rank)
        found[rank] = body(engine, rank)
        engine.detach()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(seats)]
    for thread in threads:
        thread.start()
    watch(watcher)
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive(), "a rank hangs"
    assert set(found.values()) == {watcher.verdict()}
    watcher.close()
    os.close(descriptor)
    return [found[rank] for rank in range(seats)]


def test_an_abort_ends_the_open_instance_for_all() -> None:
    gate = threading.Event()

    def body(engine: core.Engine, rank: int) -> Verdict:
        for _ in range(5):
            carry_out(engine, all_reduce(DType.FLOAT32, VALUE))
        if rank == 2:
            assert gate.wait(30)
        return fail(engine, engine.run(make_plan(engine, core.BARRIER), (), (), 0, None))

    def watch(watcher: core.Watcher) -> None:
        settle(lambda: Review(*watcher.review())[:2] == (5, (0, 1)))
        assert watcher.abort(core.ABORTED, 2) == 5
        gate.set()

    assert watched(3, body, watch) == [(5, core.ABORTED, 2, ())] * 3


@pytest.mark.parametrize("count", [1, 5000])
def test_contracts_that_differ_end_the_generation_before_anything_is_written(count: int) -> None:
    def body(engine: core.Engine, rank: int) -> Verdict:
        value = np.ones(count if rank < 2 else count + 1, np.float32)
        out = np.full_like(value, 7)
        plan = all_reduce(DType.FLOAT32, value).plan(engine, digest=b"%16d" % len(value))
        verdict = fail(engine, engine.run(plan, (value,), (out,), 0, None))
        assert (out == 7).all()
        return verdict

    found = watched(3, body, lambda watcher: None)
    assert {verdict[:2] for verdict in found} == {(0, core.MISMATCH)}


def test_ranks_that_differ_are_told_though_a_third_never_comes() -> None:
    geometry = make_geometry(3)
    descriptor = segment.create(geometry)
    found = []

    def run(rank: int) -> None:
        engine = segment.attach(descriptor, geometry, rank)
        plan = make_plan(engine, core.BARRIER, digest=b"%16d" % rank)
        found.append(fail(engine, engine.run(plan, (), (), 0, None)))
        engine.detach()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [verdict[:2] for verdict in found] == [(0, core.MISMATCH)] * 2
    os.close(descriptor)


def test_ranks_with_other_geometries_never_compute_together() -> None:
    """A rank that was told another number than the others is one whose contract differs."""
    geometry = make_geometry(2)
    descriptor = segment.create(geometry)
    other = replace(geometry, streamed=geometry.streamed + 1)
    child = os.fork()
    if child == 0:
        engine = segment.attach(descriptor, other, 1)
        job = engine.submit(make_plan(engine, core.BARRIER), (), (), 0, None, False)
        while (state := job.wait(-1)) == core.KNOCK:
            pass
        os._exit(max(0, state))
    engine = segment.attach(descriptor, geometry, 0)
    assert fail(engine, engine.run(make_plan(engine, core.BARRIER), (), (), 0, None))[1] == core.MISMATCH
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == core.MISMATCH
    engine.detach()
    os.close(descriptor)


@pytest.mark.parametrize("with_worker", [True, False])
def test_a_deadline_names_who_has_not_come(with_worker: bool) -> None:
    over = threading.Event()

    def body(engine: core.Engine, rank: int) -> Verdict:
        if rank == 1:
            assert over.wait(30)
        plan = make_plan(engine, core.BARRIER)
        verdict = fail(engine, engine.run(plan, (), (), 100_000_000 if rank == 0 else 0, None))
        over.set()
        return verdict

    def watch(watcher: core.Watcher) -> None:
        if with_worker:
            settle(lambda: Review(*watcher.review()).deadline_ns == 0)
            watcher.expire(0)

    found = watched(3, body, watch)
    assert {(verdict[0], verdict[1], verdict[3]) for verdict in found} == {(0, core.DEADLINE, (1,))}


def test_a_rank_that_never_sleeps_knocks_too() -> None:
    """It takes long because it is busy all the time; the worker hears of it, and can end it at its deadline."""
    knock = os.eventfd(0, os.EFD_NONBLOCK)
    geometry = make_geometry(1, TINY)
    descriptor = segment.create(geometry)
    watcher = segment.watch(descriptor, geometry)
    engine = segment.attach(descriptor, geometry, 0, knock=knock, waiting=Waiting(1_000_000_000, 0, False))

    over = threading.Event()

    def work_as_worker() -> None:
        while not over.is_set():
            if select.select([knock], [], [], 0.1)[0]:
                os.eventfd_read(knock)
                watcher.expire(watcher.review()[0])

    worker = threading.Thread(target=work_as_worker)
    worker.start()
    value = np.ones(100_000_000, np.float32)  # in ticks of a few bytes

    def run_until_it_fails() -> None:  # a worker may be late, and then it ends a later one
        for _ in range(200):
            finish(engine, engine.run(all_reduce(DType.FLOAT32, value).plan(engine), (value,), (value,), 0, None))

    with pytest.raises(Failed) as caught:
        run_until_it_fails()
    assert caught.value.verdict[1] == core.DEADLINE
    over.set()
    worker.join()
    engine.detach()
    watcher.close()
    os.close(knock)
    os.close(descriptor)


def test_the_deadline_of_a_queued_job_ends_the_generation_and_names_who_holds_up_the_open_instance() -> None:
    geometry = make_geometry(2)
    descriptor = segment.create(geometry)
    engine = segment.attach(descriptor, geometry, 0)
    plan = make_plan(engine, core.BARRIER)
    first = engine.submit(plan, (), (), 0, None, False)
    second = engine.submit(plan, (), (), 50_000_000, None, False)
    settle(lambda: second.state() == core.DEADLINE)
    settle(lambda: first.state() == core.DEADLINE)
    assert engine.verdict() == (0, core.DEADLINE, 0, (1,))
    engine.detach()
    os.close(descriptor)


def test_what_a_dead_rank_has_published_completes_and_nothing_later() -> None:
    gate = threading.Event()

    def body(engine: core.Engine, rank: int) -> Verdict:
        if rank == 0:  # the dead one: it has contributed to instance 0 and not to instance 1
            job = engine.submit(make_plan(engine, core.BARRIER), (), (), 0, None, False)
            gate.set()
            finish(engine, job)
        else:
            assert gate.wait(30)
            finish(engine, engine.run(make_plan(engine, core.BARRIER), (), (), 0, None))
        return (
            fail(engine, engine.run(make_plan(engine, core.BARRIER), (), (), 0, None))
            if rank
            else (1, core.LOST, 0, ())
        )

    def watch(watcher: core.Watcher) -> None:
        settle(lambda: SeatState(*watcher.seat(0)).instance == 1)
        assert watcher.lost(0) == 1

    assert watched(3, body, watch) == [(1, core.LOST, 0, ())] * 3


def test_a_rank_that_leaves_ends_only_what_comes_later() -> None:
    def body(engine: core.Engine, rank: int) -> Verdict:
        finish(engine, engine.run(make_plan(engine, core.BARRIER), (), (), 0, None))
        if rank == 1:
            engine.leave()
            settle(lambda: engine.verdict()[1] == core.LEFT)
            return engine.verdict()
        return fail(engine, engine.run(make_plan(engine, core.BARRIER), (), (), 0, None))

    assert watched(2, body, lambda watcher: None) == [(1, core.LEFT, 1, ())] * 2


def test_a_rank_that_looks_late_reads_the_same_number_of_waiting_processes() -> None:
    """Another has seen it, and has left for it, before this one has looked."""
    geometry = make_geometry(2)
    descriptor = segment.create(geometry)
    watcher = segment.watch(descriptor, geometry)
    watcher.set_waiting(5)
    quick, slow = (segment.attach(descriptor, geometry, seat) for seat in range(2))
    plans = [make_plan(engine, core.BARRIER) for engine in (quick, slow)]
    jobs = [engine.submit(plan, (), (), 0, None, False) for engine, plan in zip((quick, slow), plans, strict=True)]
    watcher.set_waiting(6)
    finish(quick, jobs[0])
    watcher.abort(core.LEFT, 0)
    finish(slow, jobs[1])
    assert [job.waiting() for job in jobs] == [slow.waiting()] * 2 == [5, 5]
    for engine in (quick, slow):
        engine.detach()
    watcher.close()
    os.close(descriptor)


def test_who_left_after_a_value_that_was_whole_in_its_first_tick_took_part_in_it() -> None:
    left = threading.Event()

    def body(engine: core.Engine, rank: int) -> Verdict:
        value = np.zeros(1, np.float32)
        phase = (int(DType.FLOAT32), (1, 1), (1,), (2,))
        plan = make_plan(engine, core.ALL_GATHER, (phase,), meets=core.MEETS_EQUAL)
        finish(engine, engine.run(plan, (value,), (np.zeros(2, np.float32),), 0, b"1"))
        assert left.wait(30)
        return engine.verdict()

    def watch(watcher: core.Watcher) -> None:
        settle(lambda: watcher.decided()[0] == 1)
        assert watcher.left(0) == 1
        left.set()

    assert watched(2, body, watch) == [(1, core.LEFT, 0, ())] * 2


def test_all_read_the_same_number_of_waiting_processes() -> None:
    turn = threading.Barrier(4)

    def body(engine: core.Engine, rank: int) -> Verdict:
        for number in (0, 3, 1023):
            turn.wait(30)
            turn.wait(30)
            finish(engine, engine.run(make_plan(engine, core.BARRIER), (), (), 0, None))
            assert engine.waiting() == number
        return engine.verdict()

    def watch(watcher: core.Watcher) -> None:
        for number in (0, 3, 100_000):
            turn.wait(30)
            watcher.set_waiting(number)
            turn.wait(30)

    assert watched(3, body, watch) == [(3, 0, -1, ())] * 3


def test_numbers_go_on_from_where_the_generation_starts() -> None:
    def body(engine: core.Engine, rank: int) -> Verdict:
        assert engine.next_instance() == 1_000_000
        carry_out(engine, all_reduce(DType.FLOAT32, VALUE))
        return engine.verdict()

    assert watched(2, body, lambda watcher: None, start=1_000_000) == [(1_000_001, 0, -1, ())] * 2


def test_a_rank_whose_worker_is_gone_ends_the_generation() -> None:
    near, far = socket.socketpair()
    geometry = make_geometry(2)
    descriptor = segment.create(geometry)
    engine = segment.attach(descriptor, geometry, 0, doorbell=near.fileno())
    job = engine.submit(make_plan(engine, core.BARRIER), (), (), 0, None, False)
    far.close()
    settle(lambda: job.state() == core.WORKER)
    assert engine.verdict() == (0, core.WORKER, core.WORKER_SEAT, ())
    engine.detach()
    near.close()
    os.close(descriptor)


def test_a_rank_that_waits_long_knocks_once_an_instance() -> None:
    knock = os.eventfd(0, os.EFD_NONBLOCK)
    geometry = make_geometry(2)
    descriptor = segment.create(geometry)
    engine = segment.attach(descriptor, geometry, 0, knock=knock, waiting=Waiting(0, 0, False))
    job = engine.run(make_plan(engine, core.BARRIER), (), (), 0, None)
    assert job is not None and job.wait(-1) == core.KNOCK and job.wait(-1) == core.KNOCK
    assert os.eventfd_read(knock) == 1
    engine.detach()
    os.close(knock)
    os.close(descriptor)


def test_forged_progress_is_blamed_on_who_wrote_it() -> None:
    geometry = replace(make_geometry(2, TINY), start=0x1234567)
    descriptor = segment.create(geometry)
    watcher = segment.watch(descriptor, geometry)
    with mmap.mmap(descriptor, core.segment_bytes(geometry.encode())) as memory:
        last = memory.rfind((geometry.start << 20).to_bytes(8, "little"))  # the progress of rank 1
        memory[last : last + 8] = b"\xff" * 8
    watcher.review()
    assert watcher.verdict() == (geometry.start, core.NONSENSE, 1, ())
    watcher.close()
    os.close(descriptor)


def test_a_dead_rank_that_forged_its_progress_is_blamed_for_the_open_instance() -> None:
    geometry = replace(make_geometry(2, TINY), start=0x1234567)
    descriptor = segment.create(geometry)
    watcher = segment.watch(descriptor, geometry)
    with mmap.mmap(descriptor, core.segment_bytes(geometry.encode())) as memory:
        last = memory.rfind((geometry.start << 20).to_bytes(8, "little"))
        memory[last : last + 8] = b"\xff" * 8
    assert watcher.lost(1) == geometry.start
    assert watcher.verdict() == (geometry.start, core.LOST, 1, ())
    watcher.close()
    os.close(descriptor)


def test_an_instance_that_completes_between_two_looks_of_a_rank_is_complete_for_it_too() -> None:
    """The rank finds that another has not come, and then that the instance is decided: it has come in between."""
    geometry = replace(make_geometry(2, TINY), start=0x1234567)
    descriptor = segment.create(geometry)
    engine = segment.attach(descriptor, geometry, 0, waiting=Waiting(0, 0, False))
    work = all_reduce(DType.FLOAT32, np.ones(5000, np.float32))
    with mmap.mmap(descriptor, core.segment_bytes(geometry.encode())) as memory:
        decided = memory.find((geometry.start << 24).to_bytes(8, "little"))
        progress = memory.rfind((geometry.start << 20).to_bytes(8, "little"))  # of rank 1, which this test plays
        memory[progress : progress + 8] = (geometry.start << 20 | 0xFFFFF).to_bytes(
            8, "little"
        )  # all ticks but the last
        job = engine.run(work.plan(engine), work.inputs, work.make_outputs(), 0, None)
        assert job is not None and job.wait(0) == core.PENDING
        memory[decided : decided + 8] = (geometry.start + 1 << 24).to_bytes(8, "little")
        finish(engine, job)
    engine.detach()
    os.close(descriptor)


def test_a_limit_beyond_every_instance_limits_nothing() -> None:
    """A verdict follows from numbers that members write, and may be made up."""
    geometry = make_geometry(2)
    descriptor = segment.create(geometry)
    watcher = segment.watch(descriptor, geometry)
    for instance in (1 << 39, (1 << 64) - 1):
        watcher.limit(instance, core.LOST, 0)
    assert watcher.review() and watcher.decided() == (0, 0, 0)
    with pytest.raises(ValueError, match="no such reason or culprit"):
        watcher.limit(0, 16, 0)
    watcher.close()
    os.close(descriptor)


def test_a_rank_that_closes_its_knock_leaves_the_worker_audible_to_others_of_its_process() -> None:
    """The number of its descriptor may belong to anything soon; nothing is written there."""
    knock = os.eventfd(0, os.EFD_NONBLOCK)
    knocks = [os.dup(knock) for _ in range(2)]
    geometry = replace(make_geometry(3), operated=1)
    descriptor = segment.create(geometry)
    worker = segment.attach(descriptor, geometry, 2, knock=knock, waiting=segment.OPERATED)
    engines = [segment.attach(descriptor, geometry, rank, knock=knocks[rank]) for rank in range(2)]
    engines[1].detach()
    near, far = socket.socketpair()
    for number in knocks:
        os.dup2(near.fileno(), number)

    engines[0].abort(core.ABORTED, 0)
    assert os.eventfd_read(knock) >= 1
    assert not select.select([far], [], [], 0)[0]
    engines[0].detach()
    worker.detach()
    for number in (knock, descriptor, *knocks):
        os.close(number)
    near.close()
    far.close()
