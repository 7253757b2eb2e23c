"""What a worker tells of collectives that its ranks carry out themselves: each counted once, exactly, for good."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.runtime.engine.failure.segment_host import BARRIERS, COUNT, MIB, SESSION_LIMIT, SUMS, Host

from collectived_native import core, segment
from collectived_native.segment import Geometry
from collectived_proto.ipc import messages
from collectived_proto.types import DType, ReportKind
from collectived_runtime.engine.base.memory_budget import MemoryExhausted
from collectived_runtime.engine.clients.segment import NS
from collectived_runtime.engine.record.counters import POINT_TO_POINT, SEGMENT
from collectived_runtime.engine.record.flight_recorder import ProgramSummary


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


def plans(engine: core.Engine, rank: int) -> tuple[core.Plan, core.Plan]:
    phase = (int(DType.FLOAT32), (COUNT,), (COUNT,), (COUNT,))
    sums = engine.plan(core.ALL_REDUCE, 1, 0, (phase,), bytes(16), 0, False, core.MEETS_NOT, SUMS + 10 * rank)
    barriers = engine.plan(core.BARRIER, 0, 0, (), bytes(15) + b"b", 0, False, core.MEETS_NOT, BARRIERS + 10 * rank)
    return sums, barriers


def carry_out(engine: core.Engine, rank: int, *, sums: int = 0, barriers: int = 0) -> None:
    of_sums, of_barriers = plans(engine, rank)
    value, out = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
    arrays: tuple[core.Buffers, core.Buffers] = (value,), (out,)
    for plan, (inputs, outputs) in [(of_sums, arrays)] * sums + [(of_barriers, ((), ()))] * barriers:
        finish(engine.run(plan, inputs, outputs, 0, None))


def finish(job: core.Job | None) -> None:
    """Wait for what may have knocked, on a machine that is late."""
    while job is not None and (state := job.wait(-1)) != core.COMPLETE:
        assert state == core.KNOCK


def together(engines: list[core.Engine], body: Callable[[core.Engine, int], None]) -> None:
    threads = [threading.Thread(target=body, args=(engine, rank)) for rank, engine in enumerate(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive(), "a rank hangs"


def counted(host: Host) -> dict[str, tuple[int, int]]:
    """By operation: how many, and how many bytes; all of them by the ranks themselves."""
    assert {algorithm for _, algorithm in host.counters.totals} <= {SEGMENT}
    assert sum(sum(total.durations.counts) for total in host.counters.totals.values()) == host.counters.done
    return {op: (sum(total.durations.counts), total.nbytes) for (op, _), total in sorted(host.counters.totals.items())}


def test_each_instance_counts_once_however_often_the_worker_looks(host: Host) -> None:
    engines = [host.attach(rank) for rank in range(2)]
    for turn in range(1, 4):
        together(engines, lambda engine, rank: carry_out(engine, rank, sums=200, barriers=3))
        for _ in range(3):
            host.watch.look()
            assert counted(host) == {"all_reduce": (200 * turn, 800_000 * turn), "barrier": (3 * turn, 0)}
    assert host.counters.result_bytes == 2_400_000
    rates = {rate.op: rate for rate in host.rates.rates(time.monotonic())}
    assert (rates["all_reduce"].collectives, rates["all_reduce"].bytes) == (600, 2_400_000)
    assert rates["all_reduce"].bus_bytes == 2_400_000  # twice, by half of the ranks
    assert 0 < rates["all_reduce"].busy_seconds == host.counters.totals["all_reduce", SEGMENT].durations.seconds
    for engine in engines:
        engine.detach()
    host.watch.close()
    assert host.counters.done == 609


def test_looks_amid_the_work_lose_and_repeat_nothing(host: Host) -> None:
    engines = [host.attach(rank) for rank in range(2)]
    running = threading.Thread(
        target=together, args=(engines, lambda engine, rank: carry_out(engine, rank, sums=3000, barriers=500))
    )
    running.start()
    seen = [0]
    while running.is_alive():
        host.watch.look()
        seen.append(host.counters.done)
    running.join()
    host.watch.look()
    assert seen == sorted(seen)
    assert counted(host) == {"all_reduce": (3000, 12_000_000), "barrier": (500, 0)}
    for engine in engines:
        engine.detach()
    host.watch.close()


def test_what_has_completed_is_recorded_with_when_each_rank_came(host: Host) -> None:
    engines = [host.attach(rank) for rank in range(2)]
    before = time.monotonic()

    def come_one_after_the_other(engine: core.Engine, rank: int) -> None:
        time.sleep(0.01 * rank)
        carry_out(engine, rank, sums=3, barriers=1)

    together(engines, come_one_after_the_other)
    for _ in range(2):
        host.watch.look()
    entries = host.recorder.entries()
    assert [(one.instance, one.op) for one in entries] == [
        *((n, "all_reduce(sum)") for n in range(3)),
        (3, "barrier()"),
    ]
    assert {one.summary for one in entries} == {ProgramSummary(SEGMENT, 4 * COUNT), ProgramSummary(SEGMENT, 0)}
    assert entries[0].ranks == (0, 1) and entries[0].sites == ("train.py:5",) * 2
    for one in entries:
        first, last = one.arrival_times
        assert before <= first <= last == one.started_at <= one.ended_at <= time.monotonic()
    first, last = entries[0].arrival_times
    assert last - first > 0.005 and host.counters.waits["all_reduce"].seconds >= last - first
    waited = [progress.waited_seconds for progress in host.tracker.progress.values()]
    assert [progress.waits for progress in host.tracker.progress.values()] == [4, 4] and waited[0] > waited[1]
    together(engines, lambda engine, rank: carry_out(engine, rank, sums=700))
    for engine in engines:
        engine.detach()
    host.watch.close()
    assert [one.instance for one in host.recorder.entries()[4:]] == list(range(704 - 512, 704)), "the latest"


def test_messages_of_each_rank_count_once_however_often_the_worker_looks(host: Host) -> None:
    engines = [host.attach(rank) for rank in range(2)]

    def exchange(engine: core.Engine, rank: int) -> None:
        out = np.empty(COUNT, np.float32)
        for _ in range(100):
            finish(engine.send(1 - rank, 0, (np.ones(COUNT, np.float32),), 0, b"ones", core.BLOCKING))
        for _ in range(100 - 20 * rank):  # rank 1 leaves some unread
            finish(engine.receive(1 - rank, 0, (out,), 0, b"ones", core.BLOCKING))

    for turn in range(1, 4):
        together(engines, exchange)
        for _ in range(3):
            host.watch.look()
            found = {
                op: (sum(total.durations.counts), total.nbytes)
                for (op, algorithm), total in host.counters.totals.items()
                if algorithm == POINT_TO_POINT
            }
            assert found == {"send": (200 * turn, 200 * turn * 4 * COUNT), "recv": (180 * turn, 0)}
    assert host.counters.done == 0, "they are no collectives of the group"
    for engine in engines:
        engine.detach()


def test_where_ranks_stand_is_known_once_the_worker_has_looked(host: Host) -> None:
    engines = [host.attach(rank) for rank in range(2)]
    before = time.monotonic()
    together(engines, lambda engine, rank: carry_out(engine, rank, sums=5, barriers=1))
    host.watch.look()
    for standing in host.tracker.progress.values():
        assert (standing.finished, standing.submitted, standing.op, standing.site) == (5, 5, "barrier()", "train.py:6")
        assert before <= standing.active_at <= time.monotonic()
    for engine in engines:
        engine.detach()
    host.watch.close()


def write_last_part(host: Host, size: int) -> int:
    """Have rank 1, and its session, write so much of its part; the memory's descriptor, which it keeps."""
    host.watch.offer(host.doorbells.local_ranks[1])
    _, knockers, _, _ = socket.recv_fds(host.ends[1], messages.MAX_MESSAGE, 1)
    _, memories, _, _ = socket.recv_fds(host.ends[1], messages.MAX_MESSAGE, 1)
    os.close(knockers[0])
    with mmap.mmap(memories[0], 0) as memory:
        memory[len(memory) - size :] = bytes(size)  # room for letters
    return memories[0]


def test_its_memory_is_charged_and_so_is_what_members_write_into_their_parts(host: Host) -> None:
    fixed = host.budget.used
    assert 0 < fixed < 16 * MIB
    descriptor = write_last_part(host, 40 * MIB)
    host.watch.look()
    assert host.budget.used >= 40 * MIB and host.ended == []
    idle, writer = host.sessions
    assert idle.lent_bytes == fixed // 2 and writer.lent_bytes == host.budget.used - idle.lent_bytes
    os.close(descriptor)
    host.watch.close()
    assert host.budget.used == 0
    host.budget.limit = fixed - 1
    with pytest.raises(MemoryExhausted):
        host.begin(101, 0)
    assert host.budget.used == 0


@pytest.mark.parametrize(
    ("size", "limit", "ended", "closed"),
    [
        (SESSION_LIMIT - 8 * MIB, 1024 * MIB, [], False),
        (SESSION_LIMIT + 8 * MIB, 1024 * MIB, [1], False),
        (40 * MIB, 20 * MIB, [], True),
    ],
    ids=["as much as it may", "more than it may", "more than the worker has"],
)
def test_the_session_that_has_written_too_much_is_ended_or_its_rank_let_go(
    host: Host, size: int, limit: int, ended: list[int], closed: bool
) -> None:
    descriptor = write_last_part(host, size)
    host.budget.limit = limit
    host.watch.look()
    assert host.ended == ended
    assert [host.doorbells.local_ranks[rank].closed for rank in range(2)] == [False, closed]
    os.close(descriptor)
    host.watch.close()
    assert host.budget.used == 0 == host.sessions[0].lent_bytes


def test_memory_that_a_rank_keeps_counts_of_those_who_wrote_it_when_the_generation_is_over(host: Host) -> None:
    descriptor = write_last_part(host, 40 * MIB)
    host.watch.close()
    idle, writer = host.sessions
    taken = os.fstat(descriptor).st_blocks * 512
    assert taken >= 40 * MIB and host.budget.used == host.budget.lent.retained_bytes == taken
    assert idle.lent_bytes < MIB and writer.lent_bytes >= 40 * MIB
    with mmap.mmap(descriptor, 0) as memory:
        memory[-90 * MIB :] = bytes(90 * MIB)
        host.budget.lent.settle()
        assert writer.lent_bytes >= 90 * MIB and host.ended == []
        memory[-110 * MIB :] = bytes(110 * MIB)
        host.budget.lent.settle()
        assert host.ended == [1], "what it writes later counts too"
    writer.close()
    assert host.user.orphaned_bytes == 0 and host.budget.used >= 110 * MIB
    idle.close()
    assert host.user.orphaned_bytes == host.budget.used >= 110 * MIB
    os.close(descriptor)
    host.budget.lent.settle()
    assert host.user.orphaned_bytes == 0 == host.budget.used


def test_who_scatters_what_it_writes_has_written_all_of_its_part(host: Host) -> None:
    descriptor = write_last_part(host, MIB)
    with mmap.mmap(descriptor, 0) as memory:
        part = len(memory) // 2
        for page in range(600):
            memory[len(memory) - 2 * (page + 1) * mmap.PAGESIZE] = 1
        memory[part // 2] = 1
    host.watch.look()
    idle, writer = host.sessions
    assert idle.lent_bytes < 16 * MIB and writer.lent_bytes >= part and host.ended == [1]
    os.close(descriptor)
    host.watch.close()


def test_generations_add_up(host: Host) -> None:
    start = 0
    for generation in (100, 101, 102):
        engines = [host.attach(rank) for rank in range(2)]
        together(engines, lambda engine, rank: carry_out(engine, rank, sums=7))
        for engine in engines:
            engine.detach()
        host.watch.close()  # what nobody had looked at counts all the same
        start += 7
        assert counted(host) == {"all_reduce": (start, 4000 * start)}
        host.watch, host.tracker = host.begin(generation + 1, start)
        assert host.tracker.next_number == start
    host.watch.close()
    assert host.counters.done == 21


def test_an_instance_that_the_first_rank_did_not_live_to_count_counts(host: Host) -> None:
    engines = [host.attach(rank) for rank in range(2)]
    together(engines, lambda engine, rank: carry_out(engine, rank, sums=4))
    value, out = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
    last = engines[0].enqueue(plans(engines[0], 0)[0], (value,), (out,), 0, None)
    engines[0].advance(1)  # it has published its value, and never goes on
    carry_out(engines[1], 1, sums=1)
    assert last.state() == core.PENDING
    host.watch.look()
    assert host.counters.done == 4
    host.watch.lost(0)
    host.tracker.progress[0].has_departed = True
    for _ in range(2):
        host.watch.look()
        assert counted(host) == {"all_reduce": (5, 20_000)}
    engines[1].detach()
    host.watch.close()
    assert host.counters.done == 5
    engines[0].detach()


def test_a_number_that_no_rank_can_have_come_to_is_a_mismatch_of_the_instance_that_was_open(host: Host) -> None:
    engines = [host.attach(rank) for rank in range(2)]
    host.watch.offer(host.doorbells.local_ranks[0])
    _, knockers, _, _ = socket.recv_fds(host.ends[0], messages.MAX_MESSAGE, 1)
    _, memories, _, _ = socket.recv_fds(host.ends[0], messages.MAX_MESSAGE, 1)
    with mmap.mmap(memories[0], mmap.PAGESIZE) as memory:
        words = np.frombuffer(memory, np.uint64)
        before = words.copy()
        together(engines, lambda engine, rank: carry_out(engine, rank, sums=3))
        host.watch.look()
        [decided] = [place for place in np.flatnonzero(words - before) if words[place] >> np.uint64(24) == 3]
        words[decided] |= np.uint64(1 << 63)
        host.watch.look()
        for _ in range(4):  # as many steps its patience has
            host.watch.on_timer(host.watch.next_deadline())
        del words
    [report] = host.reports
    assert (report.kind, report.instance) == (ReportKind.MISMATCH, 3) and "shared memory" in report.text
    for engine in engines:
        engine.detach()
    for descriptor in (*knockers, *memories):
        os.close(descriptor)
    host.watch.close()
    assert host.counters.done == 3


def test_an_end_whose_culprit_a_member_has_made_up_since_is_a_mismatch_that_names_nobody(host: Host) -> None:
    host.watch.offer(host.doorbells.local_ranks[0])
    _, knockers, _, _ = socket.recv_fds(host.ends[0], messages.MAX_MESSAGE, 1)
    data, memories, _, _ = socket.recv_fds(host.ends[0], messages.MAX_MESSAGE, 1)
    offer = messages.parse_segment(data)
    engine = segment.attach(memories[0], Geometry.decode(offer.geometry), offer.seat)
    with mmap.mmap(memories[0], mmap.PAGESIZE) as memory:
        words = np.frombuffer(memory, np.int64)
        before = words.copy()
        engine.abort(core.ABORTED, 0)
        host.watch.look()
        [decided] = np.flatnonzero(words - before == core.ABORTED)
        words[decided] |= 9 << 4  # there is no such seat
        for _ in range(4):  # as many steps its patience has
            host.watch.on_timer(host.watch.next_deadline())
        del words
    [report] = host.reports
    assert report.kind is ReportKind.MISMATCH and "shared memory" in report.text
    engine.detach()
    for descriptor in (*knockers, *memories):
        os.close(descriptor)
    host.watch.close()


def test_a_deadline_is_told_with_the_timeout_that_the_caller_gave_not_with_what_was_left_of_it(host: Host) -> None:
    engines = [host.attach(rank) for rank in range(2)]
    plan, value, out = plans(engines[0], 0)[0], np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
    job = engines[0].submit(plan, (value,), (out,), 40 * NS, None, False, 50 * NS)
    while host.tracker.instances.get(0) is None:
        host.watch.look()
    instance = host.tracker.instances[0]
    assert instance.timeout == 50.0 and 30 < instance.deadline - time.monotonic() <= 40
    carry_out(engines[1], 1, sums=1)
    finish(job)
    for engine in engines:
        engine.detach()
    host.watch.close()
