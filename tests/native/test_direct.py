"""Large values are read where they lie in the other rank's process, and only as long as they stay what they were."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.native.ranks import (
    DIRECT,
    LIMIT_SECONDS,
    PAGE,
    SLOW_BEHIND,
    Array,
    Failed,
    Work,
    as_bytes,
    as_threads,
    finish,
    make_geometry,
    make_plan,
    make_room,
    make_value,
)
from tests.native.test_schedule import BUILDERS, Build

from collectived_native import core, segment
from collectived_native.segment import OPERATED, Geometry, SeatState, Waiting
from collectived_proto.types import DType

MOVES = ("broadcast", "all_gather", "scatter", "all_to_all")
LARGE = 3 << 20  # bytes of a letter: more than the ring in which it would be sent


def end_in_time() -> None:
    """Have a forked child end, whatever it does, and not by what its parent would do at an alarm."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(LIMIT_SECONDS))


def count_ticks(descriptor: int, geometry: Geometry) -> list[int]:
    """What each rank has published so far."""
    watcher = segment.watch(descriptor, geometry)
    found = [SeatState(*watcher.seat(seat)).published for seat in range(geometry.seats)]
    watcher.close()
    return found


@pytest.mark.parametrize("ready", [(0, 1, 2), (0, 2), ()], ids=str)
@pytest.mark.parametrize("name", MOVES)
def test_a_large_value_takes_two_ticks_where_all_ranks_are_ready(name: str, ready: tuple[int, ...]) -> None:
    build: Build = BUILDERS[name]
    geometry = make_geometry(3, DIRECT)
    descriptor = segment.create(geometry)
    ways = [replace(Waiting.choose(3), shows_memory=rank in ready) for rank in range(3)]
    engines = [segment.attach(descriptor, geometry, rank, waiting=ways[rank]) for rank in range(3)]
    jobs = []
    for rank, engine in enumerate(engines):
        work, wanted = build(3, rank, 4000)
        outputs = work.make_outputs()
        jobs.append((engine.submit(work.plan(engine), work.inputs, outputs, 0, None, False), outputs, wanted))
    for engine, (job, outputs, wanted) in zip(engines, jobs, strict=True):
        finish(engine, job)
        assert as_bytes(outputs) == as_bytes(wanted)
    ticks = count_ticks(descriptor, geometry)
    assert ticks == [2] * 3 if len(ready) == 3 else min(ticks) > 2
    for engine in engines:
        engine.detach()
    os.close(descriptor)


@pytest.mark.parametrize("ready", [(0, 1, 2), (0, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("count", [5, 6000])
@pytest.mark.parametrize("operation", [core.BROADCAST, core.SCATTER])
def test_a_rank_that_takes_what_comes_reads_it_there_too(operation: int, count: int, ready: tuple[int, ...]) -> None:
    """Rank 1 has a template, rank 2 is told."""
    geometry = make_geometry(3, DIRECT)
    descriptor = segment.create(geometry)
    ways = [replace(Waiting.choose(3), shows_memory=rank in ready) for rank in range(3)]
    engines = [segment.attach(descriptor, geometry, rank, waiting=ways[rank]) for rank in range(3)]
    value = make_value(DType.INT32, count, 0)
    sizes = (count // 3 + 1, count // 3 - 1, count - 2 * (count // 3)) if operation == core.SCATTER else (count,) * 3
    counts = sizes if operation == core.SCATTER else (count,)
    outs = [np.zeros(size, np.int32) for size in sizes]

    def plan(rank: int, is_open: bool, phases: tuple[core.Phase, ...]) -> core.Plan:
        digest, meets = (bytes(16), core.MEETS_ANY) if is_open else (b"the same for all", core.MEETS_KNOWN)
        return make_plan(engines[rank], operation, phases, is_open=is_open, digest=digest, meets=meets, terms=3)

    def phase(rank: int) -> tuple[core.Phase, ...]:
        return ((int(DType.INT32), counts, (count,) if rank == 0 else (), (sizes[rank],)),)

    for _ in range(3):
        before = count_ticks(descriptor, geometry)
        for out in outs:
            out[:] = 0
        jobs = [
            engines[0].submit(plan(0, False, phase(0)), (value,), (outs[0],), 0, b"told", False),
            engines[1].submit(plan(1, False, phase(1)), (), (outs[1],), 0, None, False),
            engines[2].submit(plan(2, True, ()), (), (), 0, None, False),
        ]
        while (state := jobs[2].wait(-1)) == core.KNOCK:
            pass
        assert state == core.DESCRIBE
        jobs[2].describe(plan(2, True, phase(2)), (), (outs[2],))
        for engine, job in zip(engines, jobs, strict=True):
            finish(engine, job)
        wanted = np.split(value, np.cumsum(sizes)[:2]) if operation == core.SCATTER else [value] * 3
        assert [out.tolist() for out in outs] == [one.tolist() for one in wanted]
        ticks = [after - one for one, after in zip(before, count_ticks(descriptor, geometry), strict=True)]
        assert count < 1000 or (ticks == [2] * 3 if len(ready) == 3 else min(ticks) > 2)
    for engine in engines:
        engine.detach()
    os.close(descriptor)


@pytest.mark.parametrize("count", [3000, 50_000])
@pytest.mark.parametrize(
    "value_at, result_at", [(0, 0), (0, SLOW_BEHIND), (SLOW_BEHIND, 0), (8, 24), (PAGE - 4, PAGE + 12)]
)
def test_value_and_result_may_lie_anywhere_in_a_page(value_at: int, result_at: int, count: int) -> None:
    """The kernel copies; where that would be slow bytes go by a bounce buffer."""
    geometry = make_geometry(2, DIRECT)
    descriptor = segment.create(geometry)
    engines = [segment.attach(descriptor, geometry, rank) for rank in range(2)]
    value, result = make_room(count, value_at)[1], make_room(count, result_at)[1]
    value[:] = make_value(DType.UINT8, count, 0)
    plans = [broadcast(rank, count).plan(engine) for rank, engine in enumerate(engines)]
    jobs = [
        engines[0].submit(plans[0], (value,), (), 0, None, False),
        engines[1].submit(plans[1], (), (result,), 0, None, False),
    ]
    for engine, job in zip(engines, jobs, strict=True):
        finish(engine, job)
    assert result.tobytes() == value.tobytes()
    assert count_ticks(descriptor, geometry) == [2, 2]
    for engine in engines:
        engine.detach()
    os.close(descriptor)


def test_a_result_may_lie_over_the_value() -> None:
    """The root of a broadcast writes nothing else there. In an all_to_all a rank would write over what others read."""

    def body(engine: core.Engine, rank: int) -> list[str]:
        wrong = []
        for count in (300, 5000):
            values = [make_value(DType.INT32, count, sender) for sender in range(3)]
            value = values[rank].copy()
            work = Work(core.BROADCAST, ((int(DType.INT32), (count,), (count,), (count,)),), (), (), 0, 1)
            finish(engine, engine.run(work.plan(engine), (value,), (value,), 0, None))
            wrong += ["broadcast"] * (value.tobytes() != values[1].tobytes())
            rows = [np.concatenate([10 * sender + values[to] for to in range(3)]) for sender in range(3)]
            value = rows[rank].copy()
            work = Work(core.ALL_TO_ALL, ((int(DType.INT32), (count,) * 9, (3 * count,), (3 * count,)),), (), ())
            finish(engine, engine.run(work.plan(engine), (value,), (value,), 0, None))
            wanted = np.concatenate([10 * sender + values[rank] for sender in range(3)])
            wrong += ["all_to_all"] * (value.tobytes() != wanted.tobytes())
        return wrong

    assert as_threads(3, body, geometry=DIRECT) == [[]] * 3


@pytest.fixture
def pair() -> Iterator[tuple[int, Geometry, core.Engine, core.Engine]]:
    """A segment with a sender, and a receiver that moves only when it is called."""
    geometry = make_geometry(2, replace(DIRECT, mail=16 << 20))
    descriptor = segment.create(geometry)
    sender = segment.attach(descriptor, geometry, 0)
    knock = os.eventfd(0, os.EFD_NONBLOCK)
    receiver = segment.attach(descriptor, geometry, 1, waiting=replace(OPERATED, shows_memory=True), knock=knock)
    yield descriptor, geometry, sender, receiver
    sender.detach()
    receiver.detach()
    os.close(knock)
    os.close(descriptor)


def broadcast(rank: int, count: int) -> Work:
    phase = (int(DType.UINT8), (count,), (count,) if rank == 0 else (), (count,) if rank == 1 else ())
    return Work(core.BROADCAST, (phase,), (np.full(count, 7, np.uint8),) if rank == 0 else (), ())


def wait_until_published(descriptor: int, geometry: Geometry, ticks: int) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while count_ticks(descriptor, geometry)[0] < ticks:
        assert time.monotonic() < end, "the root does not go on"
        time.sleep(0.001)


def advance_until(receiver: core.Engine, job: core.Job) -> int:
    end = time.monotonic() + LIMIT_SECONDS
    while (state := job.state()) == core.PENDING:
        assert time.monotonic() < end, "it hangs"
        receiver.advance(1 << 20)
    return state


def test_a_root_that_dies_before_it_has_been_read_fails_the_instance(
    pair: tuple[int, Geometry, core.Engine, core.Engine],
) -> None:
    """It has done its part, and nobody can have its value any more."""
    descriptor, geometry, _, receiver = pair
    work = broadcast(1, 1 << 20)
    out = np.zeros(1 << 20, np.uint8)
    root = os.fork()
    if root == 0:
        end_in_time()
        own = segment.attach(descriptor, geometry, 0)
        mine = broadcast(0, 1 << 20)
        finish(own, own.run(mine.plan(own), mine.inputs, (), 0, None))
        os._exit(0)
    wait_until_published(descriptor, geometry, 1)
    job = receiver.enqueue(work.plan(receiver), (), (out,), 0, None)
    while count_ticks(descriptor, geometry)[1] < 1:
        receiver.advance(1)
    wait_until_published(descriptor, geometry, 2)
    os.kill(root, signal.SIGKILL)
    os.waitpid(root, 0)
    for _ in range(10):
        receiver.advance(1 << 20)
    assert job.state() == core.PENDING  # who is to blame is for the worker to say
    watcher = segment.watch(descriptor, geometry)
    assert watcher.lost(0) == 0
    assert advance_until(receiver, job) == core.LOST
    assert watcher.verdict()[:3] == (0, core.LOST, 0)
    watcher.close()


def test_a_value_that_is_not_there_any_more_is_its_rank_s_fault(
    pair: tuple[int, Geometry, core.Engine, core.Engine],
) -> None:
    descriptor, geometry, sender, receiver = pair
    memory = mmap.mmap(-1, 1 << 20)
    mine = broadcast(0, 1 << 20)
    sending = sender.submit(mine.plan(sender), (memory,), (), 0, None, False)
    wait_until_published(descriptor, geometry, 1)
    out = np.zeros(1 << 20, np.uint8)
    job = receiver.enqueue(broadcast(1, 1 << 20).plan(receiver), (), (out,), 0, None)
    while count_ticks(descriptor, geometry)[1] < 1:
        receiver.advance(1)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address), 1 << 20, 0) == 0
    assert advance_until(receiver, job) == core.NONSENSE
    assert receiver.verdict()[:3] == (0, core.NONSENSE, 0)
    with pytest.raises(Failed):
        finish(sender, sending)


def send(sender: core.Engine, value: Array, mode: int = core.BLOCKING) -> core.Job | None:
    return sender.send(1, 3, (value,), 0, b"blob", mode)


@pytest.mark.parametrize("behind", [0, SLOW_BEHIND])
def test_a_rank_whose_result_cannot_be_written_blames_itself(
    pair: tuple[int, Geometry, core.Engine, core.Engine], tmp_path: Path, behind: int
) -> None:
    """Not the rank whose value it reads: the kernel says the same of either."""
    descriptor, geometry, sender, receiver = pair
    path = tmp_path / "result"
    path.write_bytes(bytes(1 << 20))
    count = (1 << 20) - SLOW_BEHIND
    out = np.memmap(path, np.uint8, "r+")[behind : behind + count]
    os.truncate(path, 4096)  # as where a disk is full
    sending = sender.submit(broadcast(0, count).plan(sender), (make_room(count, 0)[1],), (), 0, None, False)
    wait_until_published(descriptor, geometry, 1)
    job = receiver.enqueue(broadcast(1, count).plan(receiver), (), (out,), 0, None)
    assert advance_until(receiver, job) == core.FAILED
    assert receiver.verdict()[:3] == (0, core.FAILED, 1)
    with pytest.raises(Failed):
        finish(sender, sending)


def test_a_value_counts_only_if_its_rank_is_still_there_when_it_has_been_read(
    pair: tuple[int, Geometry, core.Engine, core.Engine],
) -> None:
    """A rank that detaches has its array back, although it has done its part."""
    descriptor, geometry, sender, receiver = pair
    mine = broadcast(0, 1 << 20)
    sending = sender.submit(mine.plan(sender), mine.inputs, (), 0, None, False)
    wait_until_published(descriptor, geometry, 1)
    out = np.zeros(1 << 20, np.uint8)
    job = receiver.enqueue(broadcast(1, 1 << 20).plan(receiver), (), (out,), 0, None)
    while count_ticks(descriptor, geometry)[1] < 1:
        receiver.advance(1)
    wait_until_published(descriptor, geometry, 2)
    sender.detach()
    assert sending.state() == core.DETACHED
    mine.inputs[0][:] = 9
    for _ in range(10):
        receiver.advance(1 << 20)
    assert job.state() == core.PENDING
    watcher = segment.watch(descriptor, geometry)
    assert watcher.left(0) == 0
    assert advance_until(receiver, job) == core.LEFT
    watcher.close()


def await_end(job: core.Job) -> int:
    while (state := job.wait(int(LIMIT_SECONDS * 1e9))) == core.KNOCK:
        pass
    return state


def pass_letter(size: int, seconds: float | None = None) -> tuple[int, int, bool]:
    """Sends a long letter that is expected, and aborts so much later: bytes of the segment that were written to,
    how the receive ended, and whether something else arrived than was sent.
    """
    geometry = make_geometry(2, replace(DIRECT, mail=2 * size))
    descriptor = segment.create(geometry)
    sender, receiver = (segment.attach(descriptor, geometry, seat) for seat in range(2))
    value, out = np.full(size, 5, np.uint8), np.zeros(size, np.uint8)
    receiving = receiver.receive(0, 3, (out,), 0, b"blob", core.QUIET)
    before = os.fstat(descriptor).st_blocks
    sending = send(sender, value, core.QUIET)
    assert receiving is not None and sending is not None
    if seconds is not None:
        time.sleep(seconds)
        sender.abort(core.ABORTED, 0)
    sent = await_end(sending)
    value[:] = 6  # it is the caller's again
    state = await_end(receiving)
    is_wrong = state == core.COMPLETE and out.tobytes() != bytes([5]) * size
    assert sent in (core.COMPLETE, core.ABORTED) and state in (core.COMPLETE, core.ABORTED)
    written = (os.fstat(descriptor).st_blocks - before) * 512
    sender.detach()
    receiver.detach()
    os.close(descriptor)
    return written, state, is_wrong


def test_a_long_letter_that_is_expected_does_not_pass_the_segment() -> None:
    """Where its receiver comes in time, which a busy machine does not allow each time."""
    size = 32 << 20
    for _ in range(20):
        written, state, is_wrong = pass_letter(size)
        assert state == core.COMPLETE and not is_wrong
        if written <= size // 2:
            return
    pytest.fail("each time most of it was written to the segment")


def test_a_letter_whose_send_has_failed_is_not_received() -> None:
    """The sender's memory may be anything by then."""
    moments = np.random.default_rng(1).uniform(0, 1e-3, 60)
    assert [pass_letter(LARGE, float(moment))[2] for moment in moments] == [False] * 60


def test_a_send_does_not_wait_for_its_receive(pair: tuple[int, Geometry, core.Engine, core.Engine]) -> None:
    _, _, sender, receiver = pair
    value, out = np.full(LARGE, 5, np.uint8), np.zeros(LARGE, np.uint8)
    finish(sender, send(sender, value))
    value[:] = 6  # it is the caller's again
    receiving = receiver.receive(0, 3, (out,), 0, b"blob", core.QUIET)
    assert receiving is not None
    assert advance_until(receiver, receiving) == core.COMPLETE
    assert out.tobytes() == bytes([5]) * LARGE


def test_a_value_is_never_read_after_its_send_is_done() -> None:
    """Whichever comes first, and however close they come."""
    rounds = 150

    def body(engine: core.Engine, rank: int) -> list[int]:
        pause = np.random.default_rng(rank).uniform(0, 1e-3, rounds)
        memory, wrong = np.zeros(LARGE // 4, np.uint8), []
        for number in range(rounds):
            until = time.perf_counter() + pause[number]
            while time.perf_counter() < until:
                pass
            if rank == 0:
                memory[:] = number + 1
                finish(engine, engine.send(1, 3, (memory,), 0, b"blob", core.BLOCKING))
                memory[:] = 255
            else:
                finish(engine, engine.receive(0, 3, (memory,), 0, b"blob", core.BLOCKING))
                if memory.tobytes() != bytes([number + 1]) * memory.size:
                    wrong.append(number)
        return wrong

    assert as_threads(2, body, geometry=replace(DIRECT, mail=8 << 20)) == [[], []]


LONG = 32 << 20
MOMENTS = np.linspace(5e-4, 8e-3, 30)  # in which some of such a letter is read


@contextlib.contextmanager
def stopped_peer(moment: float, *, sends: bool) -> Iterator[tuple[core.Engine, core.Job, int, Callable[[], bool]]]:
    """A rank that gets a long letter from the other one, or sends it one, which is stopped after so many seconds.

    Its engine and job, the other process, and whether the letter is being read where it lies.
    """
    geometry = make_geometry(2, replace(DIRECT, mail=2 * LONG))
    descriptor, is_there = segment.create(geometry), os.eventfd(0)
    peer = os.fork()
    if peer == 0:
        end_in_time()
        own, memory = segment.attach(descriptor, geometry, 1), np.full(LONG, 5, np.uint8)
        if sends:
            own.send(0, 3, (memory,), 0, b"blob", core.BLOCKING)
        else:
            job = own.receive(0, 3, (memory,), 0, b"blob", core.QUIET)
            os.eventfd_write(is_there, 1)
            await_end(job)  # type: ignore[arg-type]
        os._exit(0)
    own, memory = segment.attach(descriptor, geometry, 0), np.full(LONG, 5, np.uint8)
    before = os.fstat(descriptor).st_blocks
    if sends:
        job = own.receive(1, 3, (memory,), 0, b"blob", core.QUIET)
    else:
        os.eventfd_read(is_there)
        job = own.send(1, 3, (memory,), 0, b"blob", core.QUIET)
    assert job is not None
    time.sleep(moment)
    os.kill(peer, signal.SIGSTOP)

    def is_read() -> bool:
        return job.state() == core.PENDING and (os.fstat(descriptor).st_blocks - before) * 512 < LONG // 8

    try:
        yield own, job, peer, is_read
    finally:
        os.kill(peer, signal.SIGKILL)
        os.waitpid(peer, 0)
        own.detach()
        for one in (descriptor, is_there):
            os.close(one)


def test_a_sender_sleeps_while_its_letter_is_read() -> None:
    for moment in MOMENTS:
        with stopped_peer(float(moment), sends=False) as (_, sending, peer, is_read):
            time.sleep(0.05)
            if is_read():
                began = time.process_time()
                time.sleep(1.0)
                used = time.process_time() - began
                os.kill(peer, signal.SIGCONT)
                assert await_end(sending) == core.COMPLETE
                assert used < 0.3, "seconds of the processor in a second of waiting"
                return
    pytest.fail("each time the letter was there, or went to the segment")


def test_a_letter_that_is_read_does_not_arrive_once_the_generation_is_over() -> None:
    """Its sender hears that it has failed, even if it sleeps for so long that it has taken nothing back yet."""
    for moment in MOMENTS:
        with stopped_peer(float(moment), sends=True) as (engine, receiving, _, is_read):
            if is_read():
                engine.abort(core.ABORTED, 0)
                if await_end(receiving) == core.ABORTED:
                    return
    pytest.fail("each time the letter arrived")


NOBODY, PR_SET_DUMPABLE = 65534, 4
BLAMES_READER = (core.FAILED, (0, core.FAILED, 1))


def become_another_user() -> None:
    end_in_time()
    os.setresuid(NOBODY, NOBODY, NOBODY)
    allow_reading(True)


def allow_reading(is_allowed: bool) -> None:
    assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, int(is_allowed), 0, 0, 0) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root may begin processes of another user; itself it may read all")
def test_a_rank_that_may_not_read_a_living_process_any_more_blames_itself() -> None:
    """The kernel does not say that the other has done anything wrong."""
    geometry = make_geometry(2, DIRECT)
    descriptor = segment.create(geometry)
    is_there, is_hidden = os.eventfd(0), os.eventfd(0)
    root = os.fork()
    if root == 0:
        become_another_user()
        own, work = segment.attach(descriptor, geometry, 0), broadcast(0, 1 << 20)
        os.eventfd_read(is_there)
        job = own.submit(work.plan(own), work.inputs, (), 0, None, False)
        wait_until_published(descriptor, geometry, 2)
        allow_reading(False)
        os.eventfd_write(is_hidden, 1)
        os._exit(int((await_end(job), own.verdict()[:3]) != BLAMES_READER))
    reader = os.fork()
    if reader == 0:
        become_another_user()
        own = segment.attach(descriptor, geometry, 1, waiting=replace(OPERATED, shows_memory=True))
        os.eventfd_write(is_there, 1)
        wait_until_published(descriptor, geometry, 1)
        job = own.enqueue(broadcast(1, 1 << 20).plan(own), (), (np.zeros(1 << 20, np.uint8),), 0, None)
        while count_ticks(descriptor, geometry)[1] < 1:
            own.advance(1)
        os.eventfd_read(is_hidden)
        os._exit(int((advance_until(own, job), own.verdict()[:3]) != BLAMES_READER))
    assert [os.waitpid(child, 0)[1] for child in (root, reader)] == [0, 0]
    for one in (is_there, is_hidden, descriptor):
        os.close(one)


def test_processes_read_each_other_and_a_stranger_s_number_is_not_believed() -> None:
    """A rank says which process it is as that knows itself; another that has this number here has not its token."""
    geometry = make_geometry(2, DIRECT)
    descriptor = segment.create(geometry)
    child = os.fork()
    if child == 0:
        end_in_time()
        own = segment.attach(descriptor, geometry, 1)
        out = np.zeros(1 << 20, np.uint8)
        finish(own, own.run(broadcast(1, 1 << 20).plan(own), (), (out,), 0, None))
        finish(own, own.run(broadcast(1, 1 << 20).plan(own), (), (out,), 0, None))
        os._exit(int(out.tobytes() != bytes([7]) * out.size))
    engine = segment.attach(descriptor, geometry, 0)
    end = time.monotonic() + LIMIT_SECONDS
    for _ in range(2):
        work = broadcast(0, 1 << 20)
        while not count_ticks(descriptor, geometry)[1]:  # it has come, and shown itself
            assert time.monotonic() < end
        before = count_ticks(descriptor, geometry)[0]
        finish(engine, engine.run(work.plan(engine), work.inputs, (), 0, None))
        direct = count_ticks(descriptor, geometry)[0] - before == 2
    assert direct
    assert os.waitpid(child, 0)[1] == 0
    engine.detach()
    os.close(descriptor)
