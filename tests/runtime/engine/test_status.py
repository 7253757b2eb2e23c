"""What a worker tells of a lane: collectives, sends and receives that wait, and what its users should know."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectived_proto.types import CommunicationImplementation, Recv, ReportKind, Send
from collectived_proto.v1 import status_pb2
from collectived_runtime.coordinator.overview import status_reply
from collectived_runtime.coordinator.snapshot import GroupView, Snapshot
from collectived_runtime.worker.status import lane_status


def test_a_receive_that_waits_is_told_with_its_sender_its_tag_and_its_line(world: Any) -> None:
    here = world(2, stall_after=0.01)
    here.ranks[1].post(Recv(0, 3))
    here.report(ReportKind.UNANSWERED)
    (post,) = lane_status(here.lanes[0]).posts
    assert (post.rank, post.peer, post.tag, post.op, post.site) == (1, 0, 3, "recv(source=0, tag=3)", "test.py:1")
    assert post.seconds >= 0.01 and post.bytes == 0
    here.ranks[0].post(Send(1, 3), np.ones(4, np.float32))
    here.ranks[1].done()
    assert not lane_status(here.lanes[0]).posts


def test_a_send_that_waits_is_told_with_its_bytes(world: Any) -> None:
    here = world(1, 1, stall_after=0.01)
    here.lanes[1].stop()
    here.lanes[1].join()  # which then takes no letter
    here.ranks[0].post(Send(1, 4), np.ones(100_000, np.float32))
    here.ranks[0].post(Recv(1, 5))
    here.report(ReportKind.UNANSWERED)
    posts = {post.op: post for post in lane_status(here.lanes[0]).posts}
    assert posts["recv(source=1, tag=5)"].peer == 1
    if "send(to=1, tag=4)" in posts:  # unless the system has taken all of it
        assert (posts["send(to=1, tag=4)"].peer, posts["send(to=1, tag=4)"].bytes) == (1, 400_000)


def test_a_hint_that_falls_back_is_told(world: Any) -> None:
    here = world(2)
    assert not lane_status(here.lanes[0]).notes
    for count in (4, 5):  # two programs
        for rank in here.ranks:
            rank.submit(np.ones(count, np.float32), implementation=CommunicationImplementation.NCCL)
        for rank in here.ranks:
            rank.done()
    assert list(lane_status(here.lanes[0]).notes) == ["on CPU devices: the hint NCCL falls back to RING"]


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
    told = {task: status_pb2.WorkerStatus(lanes=[lane_status(lane)]) for task, lane in enumerate(here.lanes)}
    view = GroupView("job/train", 7, 100, "ready", 2, here.group.members, idle=True)
    (group,) = status_reply(Snapshot(1, (), (view,), ()), told, 0.0, ()).groups
    assert [(post.rank, post.peer, post.tag) for post in group.posts] == [(0, 1, 0), (1, 0, 1)]
    assert list(group.notes) == ["on CPU devices: the hint NCCL falls back to RING"]
    assert group.idle


@pytest.mark.parametrize("idle", [False, True])
def test_whether_waiting_is_normal_is_told_and_warned_of_accordingly(
    world: Any, caplog: pytest.LogCaptureFixture, idle: bool
) -> None:
    here = world(2, stall_after=0.01, idle=idle)
    here.ranks[0].submit()
    here.ranks[0].post(Recv(1))
    for _ in range(3):  # with back-off
        here.report(ReportKind.PENDING)
        here.report(ReportKind.UNANSWERED)
    assert lane_status(here.lanes[0]).idle is idle
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [sum(word in text for text in warned) >= 2 for word in ("all_reduce(sum) #0 has been", "recv(source=1")] == [
        not idle
    ] * 2
    assert bool(warned) is not idle
