"""What a worker tells of a group loop: collectives, sends and receives that wait, and what its users should know."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from collectived_proto.types import (
    AllReduce,
    Collective,
    CommunicationImplementation,
    DType,
    GroupInfo,
    Leaf,
    Member,
    Peer,
    Recv,
    ReduceOp,
    ReportKind,
    Send,
    Tier,
)
from collectived_proto.v1 import common_pb2, status_pb2
from collectived_proto.version import VersionRange
from collectived_runtime.coordinator.status import GroupView, Snapshot, status_reply
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.compile.program import compile_program
from collectived_runtime.worker.observe.status import (
    WorkerCounts,
    WorkerIdentity,
    make_loop_status,
    make_partial_group_status,
    worker_status,
)


def test_a_receive_that_waits_is_told_with_its_sender_its_tag_and_its_line(world: Any) -> None:
    here = world(2, stall_after=0.01)
    here.ranks[1].post(Recv(0, 3))
    here.report(ReportKind.UNANSWERED)
    (post,) = make_loop_status(here.group_loops[0]).posts
    assert (post.rank, post.peer, post.tag, post.op, post.site) == (1, 0, 3, "recv(source=0, tag=3)", "test.py:1")
    assert post.seconds >= 0.01 and post.bytes == 0
    here.ranks[0].post(Send(1, 3), np.ones(4, np.float32))
    here.ranks[1].done()
    assert not make_loop_status(here.group_loops[0]).posts


def test_a_send_that_waits_is_told_with_its_bytes(world: Any) -> None:
    here = world(1, 1, stall_after=0.01)
    here.group_loops[1].stop()
    here.group_loops[1].join()  # which then takes no letter
    here.ranks[0].post(Send(1, 4), np.ones(100_000, np.float32))
    here.ranks[0].post(Recv(1, 5))
    here.report(ReportKind.UNANSWERED)
    posts = {post.op: post for post in make_loop_status(here.group_loops[0]).posts}
    assert posts["recv(source=1, tag=5)"].peer == 1
    if "send(to=1, tag=4)" in posts:  # unless the system has taken all of it
        assert (posts["send(to=1, tag=4)"].peer, posts["send(to=1, tag=4)"].bytes) == (1, 400_000)


def test_a_hint_that_falls_back_is_told(world: Any) -> None:
    here = world(2)
    assert not make_loop_status(here.group_loops[0]).notes
    for count in (4, 5):  # two programs
        for rank in here.ranks:
            rank.submit(np.ones(count, np.float32), implementation=CommunicationImplementation.NCCL)
        for rank in here.ranks:
            rank.done()
    assert list(make_loop_status(here.group_loops[0]).notes) == ["on CPU devices: the hint NCCL falls back to RING"]


def test_the_coordinator_puts_together_what_all_workers_tell(world: Any) -> None:
    here = world(1, 1, stall_after=0.01)
    for rank in here.ranks:
        rank.submit(implementation=CommunicationImplementation.NCCL)
    for rank in here.ranks:
        rank.done()
        rank.post(Recv(1 - rank.rank, rank.rank))
    waiting = {0, 1}
    while waiting:
        waiting.discard(here.report(ReportKind.UNANSWERED).rank)
    told = {
        task: status_pb2.WorkerStatus(lanes=[make_loop_status(group_loop)])
        for task, group_loop in enumerate(here.group_loops)
    }
    view = GroupView("job/train", 7, 100, "ready", 2, here.group.members, idle=True)
    (group,) = status_reply(Snapshot(1, (), (view,), ()), told, 0.0, ()).groups
    assert [(post.rank, post.peer, post.tag) for post in group.posts] == [(0, 1, 0), (1, 0, 1)]
    assert list(group.notes) == ["on CPU devices: the hint NCCL falls back to RING"]
    assert group.idle


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("connected", [False, True])
def test_a_worker_warns_of_waiting_where_that_is_not_normal_and_the_coordinator_cannot(
    world: Any, caplog: pytest.LogCaptureFixture, idle: bool, connected: bool
) -> None:
    caplog.set_level("INFO", "collectived.group_loop")
    here = world(2, stall_after=0.01, idle=idle, connected=connected)
    here.ranks[0].submit()
    here.ranks[0].post(Recv(1))
    for _ in range(3):  # with back-off
        here.report(ReportKind.PENDING)
        here.report(ReportKind.UNANSWERED)
    assert make_loop_status(here.group_loops[0]).idle is idle
    said = [record for record in caplog.records if "waiting" in record.getMessage()]
    for word in ("all_reduce(sum) #0 has been", "recv(source=1"):
        assert (sum(word in record.getMessage() for record in said) >= 2) is not idle
    assert {record.levelname for record in said} == (set() if idle else {"INFO" if connected else "WARNING"})


def test_what_waits_behind_another_collective_is_queued_and_what_waits_for_ranks_arrives(world: Any) -> None:
    here = world(1, 1, stall_after=0.01)
    for _ in range(2):
        here.ranks[0].submit()
    deadline = time.monotonic() + 20
    while len(told := make_loop_status(here.group_loops[0]).in_flight) < 2 or not told[0].packs:
        assert time.monotonic() < deadline, told
    first, second = told  # the first one runs here, and waits for the other worker
    assert (first.state, second.state) == ("running", "queued")
    assert (first.packs, first.packs_done, first.shards) == (1, 0, 1) and not second.packs
    assert first.why.startswith("table of AUTO for ") and first.why.endswith(first.algorithm)
    alone = world(2, stall_after=0.01)
    alone.ranks[0].submit()
    alone.report(ReportKind.PENDING)
    (flight,) = make_loop_status(alone.group_loops[0]).in_flight
    assert (flight.state, list(flight.arrived), list(flight.missing)) == ("arriving", [0], [1])


@pytest.mark.parametrize("places", [(2,), (1, 1)], ids=["of this worker", "of another one"])
def test_the_time_for_which_a_rank_is_missing_counts_as_waiting(world: Any, places: tuple[int, ...]) -> None:
    here = world(*places, stall_after=0.01)
    here.ranks[0].submit()
    here.report(ReportKind.PENDING)
    (rate,) = make_loop_status(here.group_loops[0]).rates
    assert (rate.op, rate.collectives) == ("all_reduce", 0) and rate.waiting_seconds > 0


def test_what_was_done_lately_is_told_by_operation(world: Any) -> None:
    here = world(2)
    for _ in range(3):
        for rank in here.ranks:
            rank.submit(np.ones(100, np.float32))
        for rank in here.ranks:
            rank.done()
    deadline = time.monotonic() + 20
    while make_loop_status(here.group_loops[0]).collectives_done < 3:  # ranks are told before it is counted
        assert time.monotonic() < deadline
    here.group_loops[0].stop()
    here.group_loops[0].join()
    (rate,) = make_loop_status(here.group_loops[0]).rates
    assert (rate.op, rate.collectives, rate.bytes, rate.bus_bytes) == ("all_reduce", 3, 1200, 1200)
    assert rate.busy_seconds > 0 and rate.bus_bandwidth == pytest.approx(rate.bus_bytes / rate.busy_seconds)


@pytest.mark.parametrize(
    ("options", "algorithm", "why"),
    [
        ({}, "ring", "table of AUTO for 12 bytes: more: ring"),
        ({"implementation": CommunicationImplementation.RING}, "ring", "the hint RING"),
        (
            {"implementation": CommunicationImplementation.NCCL},
            "ring",
            "the hint NCCL, which falls back to RING on CPU devices",
        ),
        ({"all_reduce_spec": (Tier("xring", 1, -1),)}, "xring", "all_reduce_spec: more: xring"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_why_an_algorithm_was_chosen_is_told(options: dict[str, Any], algorithm: str, why: str) -> None:
    members = tuple(Member(rank, f"/job:worker/replica:0/task:{rank}/device:CPU:0", rank, "h", 1) for rank in range(2))
    peers = tuple(Peer(rank, "i", "h", "h:1", (rank,)) for rank in range(2))
    topology = GroupTopology.from_peers(GroupInfo("train", 1, 2, members), peers, 0, (Tier("ring", 1, -1),))
    leaf = Leaf("", DType.FLOAT32, (3,))
    program = compile_program(Collective(AllReduce(ReduceOp.SUM), "*", (leaf,), **options), topology)
    assert program.reasons == {algorithm: why}


def test_without_a_coordinator_a_worker_tells_of_the_group_what_it_knows(world: Any) -> None:
    here = world(1, 1, stall_after=0.01)
    here.ranks[0].submit()
    here.report(ReportKind.PENDING)
    group_loop = here.group_loops[0]
    group = make_partial_group_status(make_loop_status(group_loop), group_loop.group)
    assert (group.state, group.size, len(group.members)) == ("partial", 2, 2)
    assert [member.last_op for member in group.members] == ["all_reduce(sum)", ""]
    assert len(group.in_flight) == 1 and not group.in_flight[0].missing  # what rank 1 does nobody here knows


def test_a_worker_of_many_groups_tells_of_them_in_slices(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two group loops others have their turn, once one has taken longer than a slice."""
    monkeypatch.setattr("collectived_runtime.worker.observe.status.SLICE_SECONDS", -1.0)
    group_loops = [group_loop for _ in range(3) for group_loop in world(1).group_loops]
    turns = 0

    async def asked() -> status_pb2.WorkerStatus:
        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        identity = WorkerIdentity(0, "h", "i", (), "unix:/w", "h:1")
        told = await worker_status(identity, group_loops, WorkerCounts(True, 0, [VersionRange(1, 2, "0.1.0")], 1, 2))
        beside.cancel()
        return told

    told = asyncio.run(asked())
    assert len(told.lanes) == 3 and turns >= 3
    assert (told.arena_bytes, told.arena_limit_bytes, list(told.client_releases)) == (1, 2, ["0.1.0"])
    assert told.protocol.release == told.release
    assert list(told.clients) == [common_pb2.Protocol(lowest=1, highest=2, release="0.1.0")]
