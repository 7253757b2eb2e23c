"""An instance whose lengths or structure are not known before, interrupts, and forked children."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.native.ranks import (
    DIGEST,
    LIMIT_SECONDS,
    TINY,
    Array,
    Failed,
    Work,
    as_bytes,
    as_threads,
    carry_out,
    finish,
    make_geometry,
    make_plan,
    make_value,
)
from tests.native.test_schedule import BUILDERS, Build

from collectived_native import core, segment
from collectived_native.segment import Waiting
from collectived_proto.types import DType

F32 = int(DType.FLOAT32)
LENGTHS = [(3, 3, 3), (3, 0, 5), (100, 100, 100), (100, 300, 90), (1000, 1, 2), (2000, 2000, 2000)]


def gather_plan(engine: core.Engine, rank: int, lengths: tuple[int, ...]) -> core.Plan:
    phase = (F32, lengths, (lengths[rank],), (sum(lengths),))
    return make_plan(engine, core.ALL_GATHER, (phase,), meets=core.MEETS_EQUAL)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths_that_differ_are_told_in_the_first_tick(lengths: tuple[int, ...], is_async: bool) -> None:
    seats = len(lengths)
    wanted = np.concatenate([make_value(DType.FLOAT32, n, r) for r, n in enumerate(lengths)])

    def body(engine: core.Engine, rank: int) -> bool:
        value = make_value(DType.FLOAT32, lengths[rank], rank)
        expected = (len(value),) * seats  # as if all were as long as this rank's
        out = np.zeros(sum(expected), np.float32)
        blob = b"%d" % len(value)
        arguments = (gather_plan(engine, rank, expected), (value,), (out,), 0, blob)
        job = engine.submit(*arguments, False) if is_async else engine.run(*arguments)
        described = False
        while job is not None and (state := job.wait(-1)) != core.COMPLETE:
            if state == core.DESCRIBE:
                told = tuple(int(one) for one in job.blobs())
                out = np.zeros(sum(told), np.float32)
                job.describe(gather_plan(engine, rank, told), (value,), (out,))
                described = True
            else:
                assert state == core.KNOCK
        assert described == (len(set(lengths)) > 1)
        return out.tobytes() == wanted.tobytes()

    for _ in range(2):
        assert as_threads(seats, body, geometry=TINY) == [True] * seats


@pytest.mark.parametrize("count", [0, 10, 128, 129, 5000])
def test_a_rank_may_take_what_the_root_broadcasts(count: int) -> None:
    """Rank 0 is the root, rank 1 has a template, rank 2 takes what comes."""
    value = make_value(DType.FLOAT32, count, 0)

    def body(engine: core.Engine, rank: int) -> bool:
        terms: dict[str, Any] = {"root": 0, "terms": 5}
        out = np.zeros(count, np.float32)
        job: core.Job | None
        for _ in range(3):
            out[:] = 0
            if rank == 0:
                plan = make_plan(
                    engine, core.BROADCAST, ((F32, (count,), (count,), ()),), meets=core.MEETS_KNOWN, **terms
                )
                finish(engine, engine.run(plan, (value,), (), 0, b"%d" % count))
                continue
            taking = ((F32, (count,), (), (count,)),)
            if rank == 1:
                plan = make_plan(engine, core.BROADCAST, taking, meets=core.MEETS_KNOWN, **terms)
                finish(engine, engine.run(plan, (), (out,), 0, None))
                continue
            plan = make_plan(engine, core.BROADCAST, (), is_open=True, digest=bytes(16), meets=core.MEETS_ANY, **terms)
            job = engine.run(plan, (), (), 0, None)
            while job is not None and (state := job.wait(-1)) != core.COMPLETE:
                if state == core.DESCRIBE:
                    assert [int(blob or b"-1") for blob in job.blobs()] == [count, -1, -1]
                    plan = make_plan(
                        engine, core.BROADCAST, taking, is_open=True, digest=bytes(16), meets=core.MEETS_ANY, **terms
                    )
                    job.describe(plan, (), (out,))
        return rank == 0 or out.tobytes() == value.tobytes()

    assert as_threads(3, body, geometry=TINY) == [True] * 3


def test_ranks_with_other_terms_than_the_root_differ() -> None:
    def body(engine: core.Engine, rank: int) -> int:
        is_open = rank == 1
        plan = make_plan(
            engine,
            core.BROADCAST,
            () if is_open else ((F32, (5,), (5,), ()),),
            is_open=is_open,
            terms=5 + rank,
            meets=core.MEETS_ANY if is_open else core.MEETS_KNOWN,
            digest=bytes(16) if is_open else DIGEST,
        )
        with pytest.raises(Failed) as caught:
            finish(engine, engine.run(plan, () if is_open else (np.zeros(5, np.float32),), (), 0, None))
        return caught.value.reason

    assert as_threads(2, body) == [core.MISMATCH] * 2


@pytest.mark.parametrize("name", BUILDERS)
def test_ranks_that_wait_in_different_ways_get_the_same_bits(name: str) -> None:
    """How a rank waits, on which cores, and where its arrays lie is its own affair; what it computes is not."""
    ways = [Waiting(0, 0, False), Waiting(60_000, 0, True), Waiting(0, 20, False), Waiting(5_000_000, 3, False)]
    mask = os.sched_getaffinity(0)
    build: Build = BUILDERS[name]

    def body(engine: core.Engine, rank: int) -> list[int]:
        if rank == 0:
            os.sched_setaffinity(0, {min(mask)})
        wrong = []
        for count in (1, 20_000, 40_000):
            work, wanted = build(4, rank, count)
            if rank == 2:
                work = replace(work, inputs=tuple(map(shift, work.inputs)))
            if as_bytes(carry_out(engine, work)) != as_bytes(wanted):
                wrong.append(count)
        return wrong

    assert as_threads(4, body, waiting=ways) == [[]] * 4


def shift(value: Array) -> Array:
    """The same value at an odd address."""
    memory = np.frombuffer(bytearray(b"\0" * 3 + value.tobytes()), np.uint8)
    return memory[3:].view(value.dtype)


def test_a_forked_child_is_refused_and_harms_nothing() -> None:
    geometry = make_geometry(1)
    descriptor = segment.create(geometry)
    engine = segment.attach(descriptor, geometry, 0)
    finish(engine, engine.submit(make_plan(engine, core.BARRIER), (), (), 0, None, False))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            mine = segment.attach(segment.create(geometry), geometry, 0)  # of its own: that works
            finish(mine, mine.run(make_plan(mine, core.BARRIER), (), (), 0, None))
            for call in (
                engine.verdict,
                engine.leave,
                lambda: engine.abort(1, 0),
                lambda: make_plan(engine, core.BARRIER),
            ):
                try:
                    call()
                except RuntimeError as error:
                    assert "parent" in str(error)
                else:
                    raise AssertionError(call)
            engine.detach()
            del engine
            finish(mine, mine.run(make_plan(mine, core.BARRIER), (), (), 0, None))
            mine.detach()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finish(engine, engine.run(make_plan(engine, core.BARRIER), (), (), 0, None))
    engine.detach()
    os.close(descriptor)


INTERRUPTED = textwrap.dedent("""
    import signal, sys
    from collectived_native import core, segment
    def raise_interrupt(number, frame):
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, raise_interrupt)
    engine = segment.attach(int(sys.argv[1]), segment.Geometry.decode(bytes.fromhex(sys.argv[2])), 0)
    plan = engine.plan(core.BARRIER, 0, 0, (), b"d" * 16, 0, False, 0, 0)
    signal.setitimer(signal.ITIMER_REAL, 0.5)  # by then it waits
    try:
        job = engine.run(plan, (), (), 0, None) if sys.argv[3] == "run" else engine.submit(plan, (), (), 0, None, False)
        while True:
            job.wait(-1)
    except KeyboardInterrupt:
        print("interrupted", engine.verdict(), flush=True)
    engine.detach()
    """)


@pytest.mark.parametrize("how", ["run", "submit"])
def test_an_interrupt_ends_the_generation(how: str) -> None:
    geometry = make_geometry(2)
    descriptor = segment.create(geometry)
    watcher = segment.watch(descriptor, geometry)
    command = [sys.executable, "-c", INTERRUPTED, str(descriptor), geometry.encode().hex(), how]
    out = subprocess.run(command, pass_fds=[descriptor], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert out == f"interrupted (0, {core.INTERRUPTED}, 0, ())\n"
    assert watcher.verdict() == (0, core.INTERRUPTED, 0, ())
    watcher.close()
    os.close(descriptor)


def test_ranks_end_by_their_own_clocks_where_one_of_them_has_written_the_word_that_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lies below what all have submitted, and so nobody takes the instance for open."""
    made, together = [], threading.Barrier(2)

    def create(geometry: segment.Geometry) -> int:
        made.append(make(geometry))
        return made[0]

    make = segment.create
    monkeypatch.setattr(segment, "create", create)

    def barrier(engine: core.Engine, timeout: float = 0.0) -> None:
        carry_out(engine, Work(core.BARRIER, (), (), ()), timeout)

    def body(engine: core.Engine, rank: int) -> None:
        heads = []
        for _ in range(4):
            barrier(engine)
            together.wait(LIMIT_SECONDS)
            heads.append(np.frombuffer(os.pread(made[0], mmap.PAGESIZE, 0), np.int64))
            together.wait(LIMIT_SECONDS)
        if rank == 0:
            steps = np.diff(heads, axis=0)
            [word] = np.flatnonzero((steps[0] == steps[1]) & (steps[1] == steps[2]) & (steps[0] > 0xFF))
            with mmap.mmap(made[0], mmap.PAGESIZE) as memory:
                memory[8 * word : 8 * word + 8] = heads[1][word].tobytes()
        together.wait(LIMIT_SECONDS)
        with contextlib.suppress(Failed):
            barrier(engine, 0.1)

    as_threads(2, body)
