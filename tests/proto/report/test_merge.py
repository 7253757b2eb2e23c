"""What group loops tell together: who has come, how far it is, and how fast it goes."""

from __future__ import annotations

from collectived_proto.report.merge import (
    RESTARTED_WARNING,
    merge_in_flight,
    merge_own_reply,
    merge_rates,
    merge_replies,
)
from collectived_proto.v1 import common_pb2 as common
from collectived_proto.v1 import status_pb2 as pb


def group_loop(task: int, *in_flight: pb.InFlight, **fields: object) -> pb.LaneStatus:
    """Of two ranks; the first of these is twice the task."""
    ranks = [2 * task, 2 * task + 1]
    members = [common.Member(rank=rank, last_instance=6, last_op="barrier()", worker=task) for rank in ranks]
    return pb.LaneStatus(
        group="j/world",
        key=1,
        generation=5,
        ranks=ranks,
        in_flight=in_flight,
        members=members,
        **fields,  # type: ignore[arg-type]
    )


def flight(arrived: list[int], **fields: object) -> pb.InFlight:
    return pb.InFlight(instance=7, op="all_reduce(sum)", arrived=arrived, **fields)  # type: ignore[arg-type]


def test_who_has_come_anywhere_has_come() -> None:
    first, second = flight([0, 1], seconds=2, site="a.py:1", bytes=8), flight([3], seconds=9, bytes=8)
    (merged,) = merge_in_flight([group_loop(0, first), group_loop(1, second)], range(4))
    assert (list(merged.arrived), list(merged.missing), merged.state) == ([0, 1, 3], [2], "arriving")
    assert (merged.seconds, merged.site, merged.bytes) == (9, "a.py:1", 8)


def test_only_ranks_of_which_something_is_known_can_be_missing() -> None:
    (merged,) = merge_in_flight([group_loop(0, flight([0]))], [0, 1])
    assert list(merged.missing) == [1]


def test_a_rank_that_is_through_with_it_has_come() -> None:
    through = group_loop(1)
    through.members[0].last_instance = 7
    (merged,) = merge_in_flight([group_loop(0, flight([0, 1])), through], range(4))
    assert list(merged.missing) == [3]


def test_of_packs_that_are_done_the_worker_counts_that_is_furthest_behind() -> None:
    behind = flight([0, 1], state="running", packs=8, packs_done=2, shards=2, algorithm="ring", why="the hint RING")
    ahead = flight([2, 3], state="running", packs=8, packs_done=5, shards=2, algorithm="ring", why="the hint RING")
    for group_loops in ([group_loop(0, behind), group_loop(1, ahead)], [group_loop(0, ahead), group_loop(1, behind)]):
        (merged,) = merge_in_flight(group_loops, range(4))
        assert (merged.packs, merged.packs_done, merged.shards, merged.state) == (8, 2, 2, "running")
        assert (merged.algorithm, merged.why) == ("ring", "the hint RING")


def test_what_runs_on_one_worker_and_is_queued_on_another_runs() -> None:
    running, queued = flight([0, 1], state="running"), flight([2, 3], state="queued")
    (merged,) = merge_in_flight([group_loop(0, running), group_loop(1, queued)], range(4))
    assert merged.state == "running"


def test_collectives_of_a_group_are_not_added_up_over_its_workers() -> None:
    early = pb.Rate(op="all_reduce", collectives=9, bytes=90, busy_seconds=5, waiting_seconds=1, bus_bandwidth=18)
    late = pb.Rate(op="all_reduce", collectives=9, bytes=90, busy_seconds=2, waiting_seconds=4, bus_bandwidth=45)
    behind = pb.Rate(op="all_reduce", collectives=8, bytes=80, busy_seconds=1)
    barrier = pb.Rate(op="barrier", collectives=3)
    merged = merge_rates(
        [group_loop(task, rates=told) for task, told in enumerate([[early, barrier], [late], [behind]])]
    )
    assert [rate.op for rate in merged] == ["all_reduce", "barrier"]
    assert (merged[0].collectives, merged[0].bytes, merged[0].busy_seconds) == (9, 90, 2)
    assert (merged[0].bus_bandwidth, merged[0].waiting_seconds) == (45, 4)


def alone(task: int, told: pb.LaneStatus) -> pb.StatusReply:
    """What one of three workers with two ranks each answers."""
    group = pb.GroupStatus(name="j/world", generation=5, state="partial", size=6, members=[])
    group.members.extend(common.Member(rank=rank, worker=rank // 2) for rank in range(6))
    return pb.StatusReply(
        answered_by=f"/job:worker/task:{task}",
        workers=[pb.WorkerStatus(task=task, lanes=[told])],
        groups=[group],
        warnings=["the coordinator does not answer"] if task == 0 else [],
    )


def test_workers_without_a_coordinator_tell_together_who_is_missing() -> None:
    first = group_loop(0, flight([0, 1]), collectives_done=7, notes=["slow"], bytes_reduced=3)
    second = group_loop(1, flight([3]), collectives_done=8, notes=["slow"], bytes_reduced=4)
    whole = merge_replies([alone(0, first), alone(1, second)])
    (group,) = whole.groups
    (merged,) = group.in_flight
    assert (list(merged.arrived), list(merged.missing)) == ([0, 1, 3], [2])  # of 4 and 5 nobody knows
    assert [member.last_op for member in group.members] == ["barrier()"] * 4 + [""] * 2
    assert (group.collectives_done, group.bytes_reduced, list(group.notes)) == (8, 7, ["slow"])
    assert [worker.task for worker in whole.workers] == [0, 1]
    assert whole.answered_by == "/job:worker/task:0, /job:worker/task:1"
    assert list(whole.warnings) == ["the coordinator does not answer"]


def test_what_a_coordinator_that_was_started_again_has_not_heard_is_added_by_the_worker_that_is_asked() -> None:
    forming = [pb.GroupStatus(name=name, state="forming", size=2) for name in ("j/a", "j/b")]
    reply = pb.StatusReply(coordinator=pb.CoordinatorStatus(address="c"), groups=forming, answered_by="coordinator")
    account = pb.WorkerStatus(task=0, incarnation="i", lanes=[group_loop(0, flight([0]))])
    group = pb.GroupStatus(name="j/world", generation=5, state="partial", size=2, members=account.lanes[0].members)
    own = pb.StatusReply(workers=[account], groups=[group], answered_by="/job:worker/task:0")
    whole = merge_own_reply(reply, own)
    assert [group.name for group in whole.groups] == ["j/a", "j/b", "j/world"]
    assert list(whole.groups[2].in_flight[0].missing) == [1] and [worker.task for worker in whole.workers] == [0]
    assert list(whole.warnings) == [RESTARTED_WARNING] and whole.coordinator.address == "c"
    assert list(merge_own_reply(whole, own).warnings) == [RESTARTED_WARNING]  # said once


def test_a_worker_that_two_tell_of_is_there_once_by_its_own_account() -> None:
    heard = pb.WorkerStatus(task=0, incarnation="i", connected=True, last_heartbeat_seconds=3, silent=True)
    whole = merge_replies(
        [pb.StatusReply(workers=[heard]), pb.StatusReply(workers=[pb.WorkerStatus(incarnation="i", pid=7)])]
    )
    (worker,) = whole.workers
    assert (worker.pid, worker.connected, worker.last_heartbeat_seconds, worker.silent) == (7, True, 3, False)
