"""The group loop: matches, runs, delivers, and is never deaf in its one wait."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.runtime.engine.conftest import wait_for

from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.types import (
    AllReduce,
    Barrier,
    Broadcast,
    CommunicationImplementation,
    Member,
    Packing,
    Reduce,
    ReduceOp,
    ReportKind,
    Tier,
)
from collectived_runtime.engine.loop import programs
from collectived_runtime.limits.rejections import MessageSource
from collectived_runtime.plan import moves
from collectived_runtime.transport.frame import FrameTemplate, encode_bye
from collectived_runtime.transport.link import Link, TcpStream


@pytest.mark.parametrize("hosts", [(1,), (2,), (4,), (1, 1), (2, 2), (3, 1), (1, 1, 1, 1)], ids=str)
def test_everybody_receives_the_sum(world: Any, hosts: tuple[int, ...]) -> None:
    here = world(*hosts)
    for rank in here.ranks:
        rank.submit(np.full(1000, rank.rank + 1, np.float32))
    expected = np.full(1000, sum(r.rank + 1 for r in here.ranks), np.float32)
    for rank in here.ranks:
        done = rank.done()
        assert done.is_last and done.has_result
        assert np.array_equal(rank.result(done, count=1000), expected)


ACROSS = ["ring", "tree", "halving_doubling", "shuffle", "double_tree", "one_shot"]


@pytest.mark.parametrize("algorithm", ACROSS)
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("hosts", [(2, 2, 2), (1, 1, 1, 1), (3, 1)], ids=str)
def test_every_algorithm_of_the_table_gives_the_sum_in_any_number_of_shards(
    world: Any, hosts: tuple[int, ...], shards: int, algorithm: str
) -> None:
    here = world(*hosts, table=(Tier(algorithm, shards),))
    values = [np.random.default_rng(rank.rank).standard_normal(1001).astype(np.float32) for rank in here.ranks]
    for rank in here.ranks:
        rank.submit(values[rank.rank])
    results = [rank.result(rank.done(), count=1001) for rank in here.ranks]
    exact = np.sum([one.astype(np.float64) for one in values], axis=0)
    assert np.all(np.abs(results[0] - exact) <= 1e-6 * np.sum(np.abs(values), axis=0))
    assert all(result.tobytes() == results[0].tobytes() for result in results)


@pytest.mark.parametrize("count", [0, 2, 10, 1001])
@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
def test_packs_by_number_cut_right_through_and_give_the_sum(world: Any, hosts: tuple[int, ...], count: int) -> None:
    here = world(*hosts)
    for rank in here.ranks:
        rank.submit(np.arange(count, dtype=np.float32) + rank.rank, packing=Packing(num_packs=4))
    for rank in here.ranks:
        done = rank.done()
        assert done.is_last and np.array_equal(
            rank.result(done, count=count), np.arange(count, dtype=np.float32) * 3 + 3
        )


@pytest.mark.parametrize("algorithm", ACROSS)
def test_signed_zeros_and_nans_have_the_same_bits_on_all_ranks(world: Any, algorithm: str) -> None:
    here = world(1, 2, 1, table=(Tier(algorithm),))
    patterns = np.array([0x80000000, 0x00000000, 0x7FC00001, 0xFFC00002], np.uint32)  # -0, +0, two NaNs
    for operation in (AllReduce(ReduceOp.MAX), AllReduce(ReduceOp.SUM)):
        for rank in here.ranks:
            rank.submit(np.roll(patterns, rank.rank).view(np.float32), operation=operation)
        results = [rank.result(rank.done(), np.uint32) for rank in here.ranks]
        assert all(np.array_equal(result, results[0]) for result in results)


def test_a_hint_for_nccl_on_cpus_falls_back_and_says_so_once(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    here = world(2)
    for count in (4, 5, 6):  # three programs
        for rank in here.ranks:
            rank.submit(np.ones(count, np.float32), implementation=CommunicationImplementation.NCCL)
        for rank in here.ranks:
            assert rank.done().is_last
    assert [record.getMessage() for record in caplog.records].count(
        "group world is on CPU devices: the hint NCCL falls back to RING"
    ) == 1


@pytest.mark.parametrize("hosts", [(3,), (2, 2)], ids=str)
def test_a_reduce_reaches_its_root_alone(world: Any, hosts: tuple[int, ...]) -> None:
    here = world(*hosts)
    for rank in here.ranks:
        rank.submit(operation=Reduce(ReduceOp.SUM, 1))
    dones = [rank.done() for rank in here.ranks]
    assert [done.has_result for done in dones] == [rank.rank == 1 for rank in here.ranks]
    assert here.ranks[1].result(dones[1]).tolist() == [len(here.ranks)] * 4


@pytest.mark.parametrize("hosts", [(3,), (1, 2), (2, 2)], ids=str)
def test_a_broadcast_brings_the_value_of_the_root(world: Any, hosts: tuple[int, ...]) -> None:
    here = world(*hosts)
    for rank in here.ranks:
        rank.submit(np.full(4, rank.rank, np.float32), operation=Broadcast(2))
    for rank in here.ranks:
        assert rank.result(rank.done()).tolist() == [2] * 4


def test_a_barrier_completes_when_the_last_rank_arrives(world: Any) -> None:
    here = world(1, 1, 1)
    empty = np.empty(0, np.float32)
    for rank in here.ranks:
        rank.submit(empty, operation=Barrier())
    for rank in here.ranks:
        assert rank.done().is_last


def test_results_of_one_instance_are_the_same_memory_for_all_local_ranks(world: Any) -> None:
    here = world(2)
    for rank in here.ranks:
        rank.submit()
    first, second = (rank.done() for rank in here.ranks)
    assert (first.arena, first.offset) == (second.arena, second.offset)


def test_a_slot_is_free_again_when_every_holder_has_released_it(world: Any) -> None:
    here = world(2)
    offsets = set()
    for _ in range(50):
        for rank in here.ranks:
            rank.submit()
        for rank in here.ranks:
            done = rank.done()
            offsets.add(done.offset)
            rank.doorbell.send(messages.encode_release((done.slot,)))
    assert len(offsets) <= 2


def test_several_instances_may_be_outstanding(world: Any) -> None:
    here = world(1, 1)
    for rank in here.ranks:
        for _ in range(10):
            rank.submit()
    for rank in here.ranks:
        assert [rank.done().instance for _ in range(10)] == list(range(10))


def test_a_repeated_instance_hears_its_recorded_outcome(world: Any) -> None:
    here = world(1)
    here.ranks[0].submit()
    first = here.ranks[0].done()
    here.ranks[0].submit(instance=0)
    assert here.ranks[0].done() == first


def test_an_address_out_of_bounds_is_that_clients_fault_alone(world: Any) -> None:
    here = world(2)
    rank = here.ranks[0]
    rank.submit()
    rank.doorbell.send(messages.Submit(100, next(iter(rank.local_rank.prepared)), 1, 0, True, ((1, 1 << 40),)).encode())
    report = here.report(ReportKind.LOST)
    assert report.rank == 0 and "malformed" in report.text and report.instance == 0


def test_ranks_of_one_worker_that_differ_are_reported_at_once_with_both_contracts(world: Any) -> None:
    here = world(2)
    here.ranks[0].submit(np.ones(4, np.float32))
    here.ranks[1].submit(np.ones(5, np.float32))
    report = here.report(ReportKind.MISMATCH)
    assert report.instance == 0
    assert [str(position.collective.leaves[0]) for position in report.ranks] == ["float32[4]", "float32[5]"]


def test_workers_that_differ_find_out_at_the_first_frame(world: Any) -> None:
    here = world(1, 1)
    here.ranks[0].submit(np.ones(4, np.float32))
    here.ranks[1].submit(np.ones(5, np.float32))
    assert here.report(ReportKind.MISMATCH).instance == 0


def test_what_comes_before_a_mismatch_completes_though_no_local_rank_had_come_to_it(world: Any) -> None:
    """Its worker hears the verdict first, and says no goodbye to those that wait for its ranks."""
    here = world(1, 1)
    here.ranks[0].submit()
    here.rule(here.verdict(Code.INVALID_ARGUMENT, from_instance=1, successor=101))
    for rank in here.ranks[1:]:
        rank.submit()
    assert [rank.done().instance for rank in here.ranks] == [0, 0]


def test_after_a_mismatch_the_group_goes_on_in_the_successor_generation(world: Any) -> None:
    here = world(1, 1)
    here.ranks[0].submit(np.ones(4, np.float32))
    here.ranks[1].submit(np.ones(5, np.float32))
    here.report(ReportKind.MISMATCH)
    here.rule(here.verdict(Code.INVALID_ARGUMENT, successor=101))
    for rank in here.ranks:
        instance, verdict = rank.failed()
        assert (instance, verdict.code, verdict.successor) == (0, Code.INVALID_ARGUMENT, 101)
    for rank in here.ranks:
        rank.submit(generation=101, instance=0)
    for rank in here.ranks:
        assert rank.result(rank.done()).tolist() == [2] * 4


def test_a_malformed_submission_to_a_generation_that_has_not_begun_is_that_clients_fault(world: Any) -> None:
    here = world(2)
    never_prepared = messages.Submit(101, 999, 0, 0.0, False, ())
    here.ranks[0].doorbell.send(never_prepared.encode())
    here.ranks[0].submit(np.ones(4, np.float32))
    here.ranks[1].submit(np.ones(5, np.float32))
    here.report(ReportKind.MISMATCH)
    here.rule(here.verdict(Code.INVALID_ARGUMENT, successor=101))
    assert here.ranks[1].failed()[1].successor == 101
    report = here.report(ReportKind.LOST)
    assert report.rank == 0 and "never prepared" in report.text
    here.ranks[1].submit(generation=101, instance=0)
    assert here.ranks[1].failed()[1].code == Code.UNAVAILABLE


def test_a_deadline_is_reported_once_and_decided_alone_when_nobody_answers(world: Any) -> None:
    here = world(2)
    here.ranks[0].submit(remaining=0.05)
    report = here.report(ReportKind.EXPIRED)
    assert [(p.rank, p.arrived) for p in report.ranks] == [(0, True), (1, False)]
    instance, verdict = here.ranks[0].failed()
    assert instance == 0 and verdict.code == Code.DEADLINE_EXCEEDED and verdict.decided_by == "worker 0"
    assert [member.rank for member in verdict.missing] == [1]


def test_a_rank_that_submits_after_the_verdict_gets_it_at_once(world: Any) -> None:
    here = world(2)
    here.ranks[0].submit()
    here.rule(here.verdict(Code.DEADLINE_EXCEEDED))
    here.ranks[0].failed()
    here.ranks[1].submit()
    assert here.ranks[1].failed()[1].message == "decided"
    here.ranks[1].submit()
    assert here.ranks[1].failed()[0] == 1


def test_waiting_is_reported_after_a_while_and_when_it_ends(world: Any) -> None:
    here = world(2, stall_after=0.05)
    here.ranks[0].submit()
    report = here.report(ReportKind.PENDING)
    assert [p.arrived for p in report.ranks] == [True, False]
    here.ranks[1].submit()
    here.report(ReportKind.RESUMED)
    assert here.ranks[0].done().is_last


def test_a_client_that_hangs_up_is_reported_with_its_last_instance(world: Any) -> None:
    here = world(2)
    here.ranks[0].submit()
    here.ranks[1].doorbell.close()
    report = here.report(ReportKind.LOST)
    assert (report.rank, report.instance) == (1, -1)


def test_who_waits_for_a_rank_that_never_came_is_told_on_a_worker_whose_ranks_could_share_memory(world: Any) -> None:
    here = world(2, late=(0, 1))
    here.add(0, uid=0).submit()
    here.group_loops[0].mark_absent(1, "it withdrew while joining")
    assert here.report(ReportKind.LOST).rank == 1
    here.rule(here.verdict(Code.UNAVAILABLE))
    assert here.ranks[0].failed()[1].code == Code.UNAVAILABLE


def test_what_a_lost_client_had_fully_submitted_completes(world: Any) -> None:
    here = world(2)
    here.ranks[1].submit(np.full(4, 5, np.float32))
    here.ranks[1].doorbell.close()
    assert here.report(ReportKind.LOST).instance == 0
    here.rule(here.verdict(Code.UNAVAILABLE, from_instance=1))
    here.ranks[0].submit()
    assert here.ranks[0].result(here.ranks[0].done()).tolist() == [6] * 4
    here.ranks[0].submit()
    assert here.ranks[0].failed()[0] == 1


def test_an_abort_stops_the_group_loop_before_it_is_answered_so_that_memory_may_be_used_again(world: Any) -> None:
    here = world(2)
    here.ranks[0].submit()
    here.ranks[0].doorbell.send(messages.encode_bare(messages.MessageType.ABORT, "interrupted"))
    here.ranks[0].doorbell.send(messages.encode_bare(messages.MessageType.PING))
    assert here.report(ReportKind.ABORT).text == "interrupted"
    while messages.parse_type(here.ranks[0].doorbell.recv(1000)) is not messages.MessageType.PONG:
        pass
    here.ranks[0].memory[:] = 0xFF  # what its caller does next
    here.ranks[1].submit()
    instance, verdict = here.ranks[1].failed()  # decided alone, for nobody answers here
    assert instance == 0 and verdict.code == Code.ABORTED


def test_frames_of_an_instance_that_is_over_are_a_mismatch_of_that_instance(world: Any) -> None:
    here = world(1, 1)
    for rank in here.ranks:  # each is the root, to itself
        rank.submit(operation=Broadcast(rank.rank))
    for rank in here.ranks:
        assert rank.done().is_last
    assert here.report(ReportKind.MISMATCH).instance == 0
    here.rule(here.verdict(Code.INVALID_ARGUMENT, successor=101))
    for rank in here.ranks:  # they had gone on, and hear of it unasked
        assert rank.failed()[1].code == Code.INVALID_ARGUMENT


def test_more_than_the_allowed_instances_outstanding_are_that_clients_fault(world: Any) -> None:
    here = world(2)
    for _ in range(messages.MAX_OUTSTANDING + 1):
        here.ranks[0].submit()
    report = here.report(ReportKind.LOST)
    assert report.rank == 0 and "64 instances outstanding" in report.text


def test_a_client_that_does_not_read_delays_nobody(world: Any) -> None:
    here = world(2)
    for step in range(2000):  # far more completions than its socket holds
        for rank in here.ranks:
            rank.submit()
        done = here.ranks[0].done()
        assert done.instance == step
        here.ranks[0].doorbell.send(messages.encode_release((done.slot,)))
    assert [here.ranks[1].done().instance for _ in range(2000)] == list(range(2000))
    assert here.reports.empty()


def test_a_verdict_over_very_many_ranks_fits_in_one_message(world: Any) -> None:
    here = world(2)
    members = tuple(Member(rank, "device" * 20, 0, "host" * 20, 1, "label" * 20) for rank in range(4096))
    here.ranks[0].submit()
    verdict = here.verdict(Code.UNAVAILABLE, message="x" * 1_000_000)
    here.rule(replace(verdict, members=members, missing=members))
    heard = here.ranks[0].failed()[1]
    assert [member.rank for member in heard.missing] == list(range(4096))


def test_a_defect_in_a_group_loop_is_reported_so_that_no_peer_waits_for_it(
    world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = world(2, 1)
    for rank in here.ranks:
        rank.submit()
    for rank in here.ranks:
        rank.done()

    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(here.group_loops[0].tracker, "record_arrival", broken)
    here.ranks[0].submit()
    reports = sorted((here.report(ReportKind.LOST) for _ in range(2)), key=lambda report: report.rank)
    assert [(report.rank, report.instance) for report in reports] == [(0, 0), (1, 0)]
    assert all("planted" in report.text for report in reports)
    assert here.ended.get(timeout=10) is here.group_loops[0]


def test_rings_of_a_generation_that_nobody_announced_are_not_kept_for_ever(world: Any) -> None:
    here = world(1)
    for instance in range(messages.MAX_OUTSTANDING + 1):
        here.ranks[0].submit(generation=999, instance=instance)
    assert "that was never announced" in here.report(ReportKind.LOST).text


def test_programs_of_ever_changing_shapes_are_forgotten_and_made_again(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 3)
    here = world(2)
    for count in (1, 2, 3, 4, 5, 1):
        for rank in here.ranks:
            rank.submit(np.full(count, 2, np.float32))
        for rank in here.ranks:
            assert rank.result(rank.done(), count=count).tolist() == [4] * count
    assert len(here.group_loops[0]._programs) == 3


def test_a_group_loop_ends_when_its_last_member_has_gone(world: Any) -> None:
    here = world(2)
    for rank in here.ranks:
        rank.submit()
    for rank in here.ranks:
        rank.done()
        rank.doorbell.send(messages.encode_bare(messages.MessageType.LEAVE))
        rank.doorbell.close()
    assert here.ended.get(timeout=10) is here.group_loops[0]
    kinds = [here.reports.get_nowait().kind for _ in range(here.reports.qsize())]
    assert kinds == [ReportKind.LEFT, ReportKind.LEFT]


def test_who_only_sent_tells_what_when_it_leaves_for_others_may_still_find_that_it_differs(world: Any) -> None:
    here = world(1, 1)
    root, other = here.ranks
    for count in (4, 5):
        root.submit(np.ones(count, np.float32), operation=Broadcast(0))
        root.done()
    root.doorbell.send(messages.encode_bare(messages.MessageType.LEAVE))
    report = here.report(ReportKind.LEFT)
    assert [(one.instance, one.op, one.site) for one in report.last] == [
        (number, "broadcast(root=0)", "test.py:1") for number in (0, 1)
    ]
    assert [str(one.collective.leaves[0]) for one in report.last] == ["float32[4]", "float32[5]"]
    other.submit(np.ones(7, np.float32), operation=Broadcast(0))
    mismatch = here.report(ReportKind.MISMATCH)
    assert mismatch.instance == 0 and mismatch.ranks[0].contract != report.last[0].contract


def test_leaving_in_order_alarms_no_peer(world: Any) -> None:
    here = world(1, 1)
    for rank in here.ranks:
        rank.submit()
    for rank in here.ranks:
        rank.done()
        rank.doorbell.send(messages.encode_bare(messages.MessageType.LEAVE))
        rank.doorbell.close()
        here.ended.get(timeout=10)
    assert {here.reports.get_nowait().kind for _ in range(here.reports.qsize())} == {ReportKind.LEFT}


class Opposite:
    """Worker 0 with one rank, that sums so many ones with worker 1, which is the test."""

    def __init__(self, world: Any, count: int) -> None:
        self.world = here = world(1, 1)
        here.group_loops[1].stop()
        here.group_loops[1].join()
        here.ended.get(timeout=10)
        here.ranks[0].submit(np.ones(count, np.float32))
        self.group_loop = group_loop = here.group_loops[0]
        wait_for(lambda: group_loop.execution is not None and here.board.dialled)
        self.link = next(iter(here.board.dialled.values()))
        assert group_loop.execution is not None
        task = group_loop.execution.program.tasks[0]
        self.stamp = FrameTemplate(7, 100, 0, 0, 0, task.plan_hash, group_loop._generation._phases.chain)


class Stalled(Opposite):
    """The rank waits in the middle of a frame whose payload never comes."""

    def __init__(self, world: Any) -> None:
        super().__init__(world, 100_000)
        self.link.sendall(self.stamp.header(0, 0, 200_000) + bytes(1000))
        wait_for(lambda: any(link.bytes_received > 1000 for link in self.group_loop._generation.links))


def test_a_farewell_that_is_read_together_with_the_last_frame_is_no_fault(world: Any) -> None:
    peer = Opposite(world, 4)
    peer.link.sendall(peer.stamp.header(0, 0, 16) + np.ones(4, np.float32).tobytes() + encode_bye(7, 100))
    done = peer.world.ranks[0].done()
    assert (peer.world.ranks[0].result(done) == 2).all()
    wait_for(lambda: not list(peer.group_loop._generation.links))  # the link has been given up
    assert peer.world.reports.empty()


def test_nonsense_that_is_read_together_with_the_last_frame_is_noticed(world: Any) -> None:
    peer = Opposite(world, 4)
    peer.link.sendall(peer.stamp.header(0, 0, 16) + np.ones(4, np.float32).tobytes() + b"garbage!" * 8)
    peer.world.ranks[0].done()
    assert "frame" in peer.world.report(ReportKind.LINK).text
    assert peer.group_loop._worker.resources.rejections.malformed_counts == {MessageSource.LINK: 1}


def test_a_verdict_ends_the_wait_for_a_peer_stalled_in_the_middle_of_a_frame(world: Any) -> None:
    stalled = Stalled(world)
    stalled.world.group_loops[0].apply_verdict(stalled.world.verdict(Code.ABORTED))
    assert stalled.world.ranks[0].failed()[1].code == Code.ABORTED


def test_a_clients_death_is_noticed_while_a_peer_is_stalled_in_the_middle_of_a_frame(world: Any) -> None:
    stalled = Stalled(world)
    stalled.world.ranks[0].doorbell.close()
    assert stalled.world.report(ReportKind.LOST).rank == 0


def test_a_stray_frame_on_another_link_is_noticed_while_a_peer_is_stalled_in_the_middle_of_a_frame(
    world: Any,
) -> None:
    stalled = Stalled(world)
    group_loop = stalled.world.group_loops[0]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        mine, _ = listener.accept()
    with theirs:
        group_loop._poller.call_soon_threadsafe(lambda: group_loop._generation.links.add(Link(1, 3, TcpStream(mine))))
        theirs.sendall(b"garbage!" * 8)
        report = stalled.world.report(ReportKind.LINK)
    assert report.worker == 1 and "frame" in report.text


def test_who_has_gone_is_said_again_to_a_coordinator_that_is_back(world: Any) -> None:
    here = world(3)
    here.ranks[0].doorbell.send(messages.encode_bare(messages.MessageType.LEAVE))
    assert here.report(ReportKind.LEFT).rank == 0
    here.ranks[1].doorbell.close()
    assert here.report(ReportKind.LOST).rank == 1
    here.group_loops[0].resend_reports()
    assert [(report.kind, report.rank) for report in (here.reports.get(timeout=10), here.reports.get(timeout=10))] == [
        (ReportKind.LEFT, 0),
        (ReportKind.LOST, 1),
    ]


def test_the_end_of_a_link_is_noticed_while_its_task_waits_for_another_one(world: Any) -> None:
    here = world(1, 1, 1, table=(Tier("ring"),))
    group_loop = here.group_loops[0]
    here.ranks[0].submit(np.ones(4, np.float32))  # sends to worker 1, and waits for worker 2

    def waits() -> bool:
        running = group_loop.execution
        return running is not None and {link.peer: events for link, events in running.link_events().items()}.get(1) == 0

    wait_for(waits)
    next(sock for (worker, _), sock in here.board.dialled.items() if worker == 1).close()
    report = here.report(ReportKind.LINK)
    assert report.worker == 1


def test_a_link_that_arrives_when_its_group_loop_has_ended_is_closed(world: Any) -> None:
    here = world(1)
    watch = here.group_loops[0]._poller
    here.group_loops[0].stop()
    here.group_loops[0].join()
    one, other = socket.socketpair()
    with other:
        watch.call_soon_threadsafe(lambda: None, one.close)
        assert other.recv(1) == b""


def test_when_a_link_breaks_nobody_reads_on_amid_the_frames_of_others(world: Any) -> None:
    """In a ring of four, worker 0 sends to 1 and receives from 3; 1 is gone while a frame of 3 is on its way."""
    here = world(1, 1, 1, 1, table=(Tier("ring"),))
    group_loop = here.group_loops[0]
    here.ranks[0].submit(np.ones(100_000, np.float32))
    wait_for(lambda: group_loop.execution is not None and {worker for worker, _ in here.board.dialled} >= {1, 3})
    links = {worker: sock for (worker, key), sock in here.board.dialled.items() if key[2] == 0}
    assert group_loop.execution is not None
    task = group_loop.execution.program.tasks[0]
    stamp = FrameTemplate(7, 100, 0, 0, 0, task.plan_hash, group_loop._generation._phases.chain)
    receive = next(move for move in task.plan[0] if isinstance(move, moves.RecvMove) and move.peer == 3)
    header = stamp.header(0, receive.span.start * 4, len(receive.span) * 4)
    links[3].sendall(header + b"not a header, but payload" * 100)
    wait_for(lambda: any(link.bytes_received > 1000 for link in group_loop._generation.links))
    links[1].close()
    assert here.report(ReportKind.LINK).worker == 1
    links[3].sendall(b"more of the payload" * 1000)
    group_loop.query_positions(
        0, lambda generation, positions: here.ended.put(group_loop)
    )  # the group loop has looked at everything by then
    here.ended.get(timeout=10)
    group_loop.query_positions(0, lambda generation, positions: here.ended.put(group_loop))
    here.ended.get(timeout=10)
    assert here.reports.empty()
