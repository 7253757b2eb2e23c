"""What a coordinator still knows of workers that do not answer, and of groups that are over."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectived_proto.v1 import status_pb2 as pb
from collectived_runtime.coordinator.status import LastStatus

COUNT = 50  # workers
ACCOUNT = pb.WorkerStatus(
    task=0,
    incarnation="i",
    release="0.1.0",
    resident_bytes=9,
    connected=True,
    devices=["CPU:0"],
    lanes=[pb.LaneStatus()],
)


def reply(worker: pb.WorkerStatus, **group: object) -> pb.StatusReply:
    return pb.StatusReply(workers=[worker], groups=[pb.GroupStatus(generation=5, **group)])  # type: ignore[arg-type]


def private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty:"))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the kernel does not tell")
def test_group_loops_that_are_not_kept_take_no_memory() -> None:
    told = pb.WorkerStatus(lanes=[pb.LaneStatus(group="g" * 1000)] * 1000).SerializeToString()
    kept = LastStatus()
    kept.record(COUNT, pb.WorkerStatus.FromString(told))
    before = private_bytes()
    for task in range(COUNT):
        kept.record(task, pb.WorkerStatus.FromString(told))
    assert private_bytes() - before < COUNT * len(told) // 4


def test_a_silent_worker_is_shown_with_what_it_told_before_and_a_group_with_its_counts() -> None:
    kept = LastStatus()
    kept.record(0, ACCOUNT)
    kept.fill(reply(ACCOUNT, collectives_done=7, collectives_failed=1, bytes_reduced=64))
    hello = pb.WorkerStatus(task=0, incarnation="i", silent=True, last_heartbeat_seconds=3, devices=["CPU:0"])
    later = reply(hello, state="ended")
    kept.fill(later)
    (worker,), (group,) = later.workers, later.groups
    assert (worker.resident_bytes, worker.silent, worker.connected, worker.last_heartbeat_seconds) == (
        9,
        True,
        False,
        3,
    )
    assert list(worker.devices) == ["CPU:0"] and not worker.lanes
    assert (group.collectives_done, group.collectives_failed, group.bytes_reduced) == (7, 1, 64)


def test_of_a_worker_that_came_anew_nothing_old_is_told_and_what_is_gone_is_forgotten() -> None:
    kept = LastStatus()
    kept.record(0, ACCOUNT)
    anew = reply(pb.WorkerStatus(task=0, incarnation="other"))
    kept.fill(anew)
    assert not anew.workers[0].resident_bytes
    kept.fill(pb.StatusReply())
    again = reply(pb.WorkerStatus(task=0, incarnation="i"))
    kept.fill(again)
    assert not again.workers[0].resident_bytes
