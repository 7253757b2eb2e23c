"""The flight recorder: what is kept of collectives, how much, and that it is read while group loops hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from tests.runtime.engine.conftest import World, wait_for

from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.types import Recv, Send, Tier
from collectived_proto.v1 import trace_pb2
from collectived_runtime.engine.loop.group_loop import GroupLoop
from collectived_runtime.engine.record.flight_recorder import MOST_MARKS, MOST_MOVES, Entry, MarkKind, RingBuffer
from collectived_runtime.transport.frame import HEADER_BYTES
from collectived_runtime.worker.observe.status import WorkerIdentity
from collectived_runtime.worker.observe.trace import worker_trace

Worlds = Callable[..., World]


def kept(group_loop: GroupLoop, count: int = 1) -> list[Entry]:
    """So many entries, once they are there: ranks hear that they are done a moment before it is recorded."""
    recorder = group_loop._worker.resources.recorder
    wait_for(lambda: len(recorder.entries()) >= count)
    return recorder.entries()


def fields(number: int) -> tuple[Any, ...]:
    return ("label", 1, number, "op", None, (), (), (), 0.0, float(number))


def test_a_ring_keeps_the_latest_in_order() -> None:
    ring = RingBuffer(4)
    for number in range(10):
        ring.put(fields(number))
    assert [(entry.number, entry.instance) for entry in ring.entries()] == [(6, 6), (7, 7), (8, 8), (9, 9)]
    assert [entry.number for entry in ring.entries(first=8)] == [8, 9]


def test_a_ring_takes_from_many_threads_and_loses_nothing_that_fits() -> None:
    ring = RingBuffer(4 * 500)

    def write() -> None:
        for number in range(500):
            ring.put(fields(number))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry.number for entry in ring.entries()] == list(range(2000))


def test_what_a_collective_leaves(world: Worlds) -> None:
    here = world(2)
    for rank in reversed(here.ranks):
        rank.submit()
    for rank in here.ranks:
        rank.done()
    (entry,) = kept(here.group_loops[0])
    assert (entry.label.name, entry.label.key, entry.label.size, entry.label.ranks) == ("world", 7, 2, (0, 1))
    assert (entry.generation, entry.instance, entry.op, entry.code) == (100, 0, "all_reduce(sum)", 0)
    assert (entry.summary.algorithm, entry.summary.nbytes, entry.summary.packs, entry.summary.shards) == (
        "local",
        16,
        1,
        1,
    )
    assert set(entry.ranks) == {0, 1} and entry.sites == ("test.py:1",) * 2
    assert entry.arrival_times[0] <= entry.arrival_times[1] <= entry.started_at <= entry.ended_at


def test_between_workers_folds_and_moves_are_marked_and_add_up_to_what_was_sent(world: Worlds) -> None:
    here = world(2, 2, table=(Tier("ring"),))
    values = np.ones(1000, np.float32)
    for rank in here.ranks:
        rank.submit(values)
    for rank in here.ranks:
        rank.done()
    for group_loop, other in ((here.group_loops[0], 1), (here.group_loops[1], 0)):
        (entry,) = kept(group_loop)
        kinds = [mark[0] for mark in entry.marks]
        assert kinds[0] == MarkKind.FOLD and kinds[-1] == MarkKind.STRAND
        moves = [mark for mark in entry.marks if mark[0] in (MarkKind.SEND, MarkKind.RECEIVE)]
        assert sorted((kind, round) for kind, _, _, round, _, _, _ in moves) == [(3, 0), (3, 1), (4, 0), (4, 1)]
        assert {peer for _, _, _, _, peer, _, _ in moves} == {other}
        assert all(entry.started_at <= begin <= end <= entry.ended_at for *_, begin, end in entry.marks)
        (flow,) = entry.summary.traffic
        sent, received = group_loop.traffic()
        assert (flow.task, flow.sent, flow.received) == (other, sent - 2 * HEADER_BYTES, received - 2 * HEADER_BYTES)


def test_a_collective_leaves_one_record_and_few_marks_however_much_it_moves(world: Worlds) -> None:
    here = world(1, 1, 1, 1, table=(Tier("ring", shards=4),))
    for _ in range(3):
        for rank in here.ranks:
            rank.submit(np.ones(10_000, np.float32))
        for rank in here.ranks:
            rank.done()
    for group_loop in here.group_loops:
        entries = kept(group_loop, 3)
        assert [entry.instance for entry in entries] == [0, 1, 2]
        for entry in entries:
            moves = sum(mark[0] != MarkKind.STRAND for mark in entry.marks)
            assert moves <= MOST_MOVES and len(entry.marks) <= MOST_MARKS
            assert sum(mark[0] == MarkKind.STRAND for mark in entry.marks) >= MOST_MARKS - MOST_MOVES


def test_a_record_is_a_fixed_number_of_values_and_holds_nothing_of_the_call(world: Worlds) -> None:
    here = world(2)
    for _ in range(50):
        for rank in here.ranks:
            rank.submit()
        for rank in here.ranks:
            rank.doorbell.send(messages.encode_release((rank.done().slot,)))
    entries = kept(here.group_loops[0], 50)
    recorder = here.group_loops[0]._worker.resources.recorder
    assert len(recorder.completed.slots) == recorder.completed.size  # made once, never grown
    assert {len(slot) for slot in recorder.completed.slots if slot is not None} == {12}
    assert len({id(entry.label) for entry in entries}) == len({id(entry.summary) for entry in entries}) == 1
    kinds = {type(value).__name__ for entry in entries for value in entry}
    assert kinds == {"int", "GroupLabel", "str", "ProgramSummary", "tuple", "float", "list"}


def test_a_failure_is_kept_with_its_verdict_and_no_busy_group_flushes_it(world: Worlds) -> None:
    here = world(2, stall_after=60.0)
    here.ranks[0].submit()
    wait_for(lambda: here.group_loops[0].tracker.instances)
    verdict = here.verdict(Code.DEADLINE_EXCEEDED, message="rank 1 was missing")
    here.rule(verdict)
    here.ranks[0].failed()
    recorder = here.group_loops[0]._worker.resources.recorder
    (entry,) = kept(here.group_loops[0])
    for number in range(recorder.completed.size + 1):
        recorder.completed.put(fields(number))
    assert entry in recorder.failed.entries()
    assert (entry.code, entry.message, entry.ranks, entry.started_at) == (4, "rank 1 was missing", (0,), 0.0)
    here.ranks[1].submit()  # too late: that it came is kept too
    here.ranks[1].failed()
    late = recorder.failed.entries()[-1]
    assert (late.ranks, late.instance, late.code) == ((1,), 0, 4)


def test_sends_and_recvs_are_kept_with_the_rank_at_their_other_end(world: Worlds) -> None:
    here = world(1, 1)
    here.ranks[0].post(Send(1, 3), np.ones(4, np.float32))
    here.ranks[1].post(Recv(0, 3))
    here.ranks[0].done()
    here.ranks[1].done()
    (sent,), (received,) = kept(here.group_loops[0]), kept(here.group_loops[1])
    assert (sent.ranks, sent.peer, sent.op, sent.summary.nbytes) == ((0,), 1, "send(to=1, tag=3)", 16)
    assert (received.ranks, received.peer, received.op) == ((1,), 0, "recv(source=0, tag=3)")


def test_what_is_under_way_is_told_while_its_group_loop_hangs(world: Worlds) -> None:
    here = world(2, 2)
    (group_loop, other), ranks = here.group_loops, here.ranks
    for rank in ranks[:3]:
        rank.submit()
    ranks[0].post(Recv(3, 9))
    wait_for(lambda: group_loop.execution is not None and group_loop.execution.awaited_peers and group_loop.pending_ops)
    wait_for(lambda: other.tracker.instances)
    hold, held = threading.Event(), threading.Event()

    def hang() -> None:
        held.set()
        hold.wait(30)

    group_loop._poller.call_soon_threadsafe(hang)
    assert held.wait(30)
    try:
        identity = WorkerIdentity(0, "host", "i", (), "", "")
        (part,) = worker_trace(
            identity, [group_loop], group_loop._worker.resources.recorder, trace_pb2.TraceRequest(group="world")
        )
        (theirs,) = worker_trace(identity, [other], other._worker.resources.recorder, trace_pb2.TraceRequest())
    finally:
        hold.set()
    running, receiving = part.collectives
    assert (running.instance, running.ended, list(running.waits_for)) == (0, 0.0, [1])
    assert [arrival.rank for arrival in running.arrivals] == [0, 1] and running.started
    assert (receiving.op, receiving.peer, receiving.ended) == ("recv(source=3, tag=9)", 3, 0.0)
    (waiting,) = theirs.collectives
    assert ([arrival.rank for arrival in waiting.arrivals], list(waiting.missing)) == ([2], [3])
    assert [(one.rank, one.submitted) for one in theirs.lanes[0].standings] == [(2, 0), (3, -1)]
    assert (
        part.last
        and part.lanes[0].living
        and [list(place.ranks) for place in part.lanes[0].places]
        == [
            [0, 1],
            [2, 3],
        ]
    )
    assert not list(
        worker_trace(identity, [group_loop], group_loop._worker.resources.recorder, trace_pb2.TraceRequest(group="x"))
    )[0].lanes
