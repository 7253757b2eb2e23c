"""What the coordinator makes of what it knows and of what workers tell: releases, silence, failures of large groups."""

from __future__ import annotations

from collectived_proto.types import RELEASE, Member
from collectived_proto.v1 import status_pb2 as pb
from collectived_runtime.coordinator.core.events import WorkerHello
from collectived_runtime.coordinator.core.verdicts import pending_text
from collectived_runtime.coordinator.status import (
    FailureView,
    GroupView,
    PendingView,
    Snapshot,
    WorkerView,
    is_every_worker_attached,
    status_reply,
)

MEMBERS = tuple(Member(rank, "CPU:0", rank, "h", 70 + rank) for rank in range(2))


def view(*groups: GroupView, failures: tuple[FailureView, ...] = ()) -> Snapshot:
    workers = tuple(WorkerView(WorkerHello(task, f"i{task}", "h", 60 + task), True, 0.5) for task in range(2))
    return Snapshot(1, workers, groups, failures)


def test_a_worker_is_told_by_its_own_account_or_by_its_hello_where_it_is_silent() -> None:
    told = {0: pb.WorkerStatus(host="h", pid=60, release=RELEASE, arena_limit_bytes=9)}
    reply = status_reply(view(), told, 0.0, (), silent=[1])
    assert [worker.silent for worker in reply.workers] == [False, True]
    assert [(worker.pid, worker.release) for worker in reply.workers] == [(60, RELEASE), (61, "")]
    assert reply.answered_by == "coordinator"


def test_what_group_loops_told_before_they_were_stopped_is_not_lost() -> None:
    pending = PendingView(7, "barrier()", "train.py:9", 3.0, (0,), (1,))
    group = GroupView("job/train", 1, 2, "ready", 2, MEMBERS, pending=(pending,))
    group_loop = pb.LaneStatus(
        generation=2,
        ranks=[1],
        collectives_failed=1,
        rates=[pb.Rate(op="barrier", collectives=4)],
        in_flight=[pb.InFlight(instance=7, op="barrier()", arrived=[1], state="running")],
    )
    (shown,) = status_reply(view(group), {1: pb.WorkerStatus(lanes=[group_loop])}, 0.0, ()).groups
    (flight,) = shown.in_flight
    assert (list(flight.arrived), list(flight.missing), flight.seconds) == ([0, 1], [], 3.0)
    assert (flight.state, flight.site) == ("running", "train.py:9")
    assert (shown.collectives_failed, shown.rates[0].collectives) == (1, 4)


def test_a_coordinator_that_was_started_again_knows_whether_it_has_heard_the_workers_of_its_groups() -> None:
    group = GroupView("job/train", 1, 2, "ready", 2, MEMBERS)
    assert is_every_worker_attached(view(group)) and is_every_worker_attached(view())
    half = Snapshot(1, view().workers[:1], (group,), ())
    assert not is_every_worker_attached(half) and not is_every_worker_attached(Snapshot(1, (), (), ()))
    ended = Snapshot(1, view().workers[:1], (GroupView("job/train", 1, 2, "ended", 2, MEMBERS),), ())
    assert is_every_worker_attached(ended)


def test_how_long_something_has_waited_is_logged_as_status_says_it() -> None:
    said = pending_text("barrier() #1 of group 'w'", 200.0031, ["rank 1 has not come"], {})
    assert said == "barrier() #1 of group 'w' has waited for 3 min 20 s: rank 1 has not come"
