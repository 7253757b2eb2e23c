"""Folding with the help of other threads: every piece once, and nobody at work after `stop`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.runtime.engine.conftest import World

from collectived_native import cores
from collectived_proto.types import DType, ReduceOp, ReportKind
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.engine.run.fold_pool import (
    MIN_PARALLEL_BYTES,
    PIECE_BYTES,
    FoldPool,
    ParallelFold,
    PoolClient,
)


@pytest.fixture
def fold_pool() -> Iterator[FoldPool]:
    made = FoldPool(2)
    yield made
    made.close()


def test_threads_help_only_where_the_quota_of_the_cgroup_leaves_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_quotas", lambda: [1])
    assert FoldPool().helpers == 0


def test_every_piece_is_worked_on_once_and_the_last_one_wakes_the_group_loop(fold_pool: FoldPool) -> None:
    counts = np.zeros(1000, np.int64)
    helped, woken = threading.Event(), threading.Event()
    me = threading.get_ident()

    def work(start: int, stop: int) -> None:
        counts[start:stop] += 1
        if threading.get_ident() != me:
            helped.set()

    job = PoolClient(fold_pool, woken.set).submit(len(counts), 7, work)
    assert helped.wait(10)
    while job.step():
        pass
    assert woken.wait(10) and job.done
    assert (counts == 1).all()


def test_a_group_loop_looks_at_the_world_between_pieces_that_take_long_and_not_between_short_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count()
    monkeypatch.setattr("collectived_runtime.engine.run.fold_pool.time.monotonic", lambda: next(clock) * 1.0)
    done: list[int] = []
    job = ParallelFold(5, 1, lambda start, stop: done.append(start), lambda: None)
    assert job.step() and done == [0]
    monkeypatch.setattr("collectived_runtime.engine.run.fold_pool.time.monotonic", lambda: 0.0)
    assert not job.step() and done == [0, 1, 2, 3, 4]


def test_after_stop_nobody_works_on_it(fold_pool: FoldPool) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()
    ended = []

    def work(start: int, stop: int) -> None:
        begun.release()
        assert go_on.wait(10)
        ended.append(start)

    job = PoolClient(fold_pool, lambda: None).submit(100, 1, work)
    for _ in range(fold_pool.helpers):
        assert begun.acquire(timeout=10)
    threading.Timer(0.05, go_on.set).start()
    job.stop()
    assert len(ended) == fold_pool.helpers  # those that had begun, and no other
    assert not job.step()


def test_a_fold_pool_that_ends_leaves_no_thread() -> None:
    before = threading.active_count()
    fold_pool = FoldPool(3)
    PoolClient(fold_pool, lambda: None).submit(3, 1, lambda start, stop: None).stop()
    assert threading.active_count() == before + 3
    fold_pool.close()
    assert threading.active_count() == before


def test_bits_are_the_same_with_help_and_without(fold_pool: FoldPool) -> None:
    count = 3 * MIN_PARALLEL_BYTES // 4 + 5
    random = np.random.default_rng(1)
    sources = [random.normal(size=count).astype(np.float32) for _ in range(3)]
    arithmetic = Arithmetic(ReduceOp.SUM, DType.FLOAT32, DType.FLOAT32, 3)
    alone, helped = np.empty(count, np.float32), np.empty(count, np.float32)
    arithmetic.fold_all(sources, alone)
    job = PoolClient(fold_pool, lambda: None).submit(
        count, PIECE_BYTES // 4, lambda i, j: arithmetic.fold_all([one[i:j] for one in sources], helped[i:j])
    )
    while job.step() or not job.done:
        pass
    assert alone.tobytes() == helped.tobytes()


def test_a_group_loop_folds_what_is_large_with_help(world: Callable[..., World]) -> None:
    one = world(2)
    values = np.arange(MIN_PARALLEL_BYTES // 4, dtype=np.float32)
    for rank in one.ranks:
        rank.submit(values)
    for rank in one.ranks:
        done = rank.done()
        assert (rank.result(done, count=len(values)) == 2 * values).all()
    assert "fold" in {thread.name for thread in threading.enumerate()}


def test_an_error_of_a_helper_ends_the_group_loop_that_asked_and_not_the_helper(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Arithmetic, sources: object, out: object) -> None:
        raise MemoryError("nothing left")

    one = world(2)
    monkeypatch.setattr(Arithmetic, "combine", fail)
    for rank in one.ranks:
        rank.submit(np.ones(MIN_PARALLEL_BYTES // 4, np.float32))
    assert "nothing left" in one.report(ReportKind.LOST).text
    helped = threading.Event()
    job = PoolClient(one.fold_pool, lambda: None).submit(100, 1, lambda start, stop: helped.set())
    assert helped.wait(10)
    job.stop()


def test_the_end_of_one_job_does_not_wait_for_another(fold_pool: FoldPool) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(start: int, stop: int) -> None:
        begun.set()
        assert go_on.wait(10)

    other = PoolClient(fold_pool, lambda: None).submit(1, 1, slow)
    assert begun.wait(10)
    PoolClient(fold_pool, lambda: None).submit(0, 1, slow).stop()
    PoolClient(fold_pool, lambda: None).submit(5, 1, lambda start, stop: None).stop()
    assert not other.done
    go_on.set()
    other.stop()
