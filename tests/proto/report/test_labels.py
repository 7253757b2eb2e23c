"""What `status`, `top` and the page say alike."""

from __future__ import annotations

import pytest

from collectived_proto.errors import Code
from collectived_proto.report.findings import code_name
from collectived_proto.report.labels import (
    finished_text,
    has_counts,
    has_reported,
    is_late,
    rank_count,
    size_text,
    worker_state,
)
from collectived_proto.v1 import common_pb2 as common
from collectived_proto.v1 import status_pb2 as pb


@pytest.mark.parametrize(
    ("worker", "state"),
    [
        (pb.WorkerStatus(connected=True), "connected"),
        (pb.WorkerStatus(connected=True, draining=True), "draining"),
        (pb.WorkerStatus(connected=True, silent=True), "silent"),
        (pb.WorkerStatus(last_heartbeat_seconds=12), "lost"),
        (pb.WorkerStatus(), "not connected"),
    ],
)
def test_how_a_worker_stands(worker: pb.WorkerStatus, state: str) -> None:
    assert worker_state(worker) == state


def test_ranks_of_what_is_over_and_those_that_left_do_not_count() -> None:
    members = [common.Member(rank=rank) for rank in range(3)]
    groups = [pb.GroupStatus(state=state, members=members, left=members[:1]) for state in ("ready", "failed", "ended")]
    assert rank_count(pb.StatusReply(groups=groups)) == 2


def test_a_collective_is_late_while_ranks_are_missing_and_later_though_all_came() -> None:
    group = pb.GroupStatus()
    assert [is_late(group, pb.InFlight(seconds=s, missing=[1])) for s in (0.9, 1.1)] == [False, True]
    assert [is_late(group, pb.InFlight(seconds=s)) for s in (4.9, 5.1)] == [False, True]
    assert not is_late(pb.GroupStatus(idle=True), pb.InFlight(seconds=9, missing=[1]))


def test_sizes_and_what_was_finished() -> None:
    assert size_text(pb.GroupStatus(state="forming", size=8, min_size=4)) == "0 of 4 to 8"
    assert size_text(pb.GroupStatus(state="ready", size=8)) == "8"
    assert [finished_text(common.Member(last_instance=n)) for n in (-1, 0)] == ["nothing yet", "#0"]


def test_every_code_has_its_name() -> None:
    assert [code_name(code) for code in Code] == [code.name for code in Code] and code_name(99) == "code 99"


def test_what_nobody_has_told_is_unknown_and_not_nothing() -> None:
    worker = pb.WorkerStatus(task=0, release="0.1.0")
    reply = pb.StatusReply(workers=[worker])
    members = [common.Member(rank=0, worker=0)]
    assert has_reported(worker) and not has_reported(pb.WorkerStatus(silent=True))
    assert has_counts(reply, pb.GroupStatus(state="ready", members=members))
    assert not has_counts(reply, pb.GroupStatus(state="ended", members=members))
    assert has_counts(reply, pb.GroupStatus(state="ended", collectives_done=7))
    reply.workers[0].silent = True
    assert not has_counts(reply, pb.GroupStatus(state="ready", members=members))
