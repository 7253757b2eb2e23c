"""What is wrong: which findings a reply holds, in which words, and in which order."""

from __future__ import annotations

import pytest

from collectived_proto.report.findings import FindingKind, Severity, StatusFinding, collect_findings
from collectived_proto.report.phrases import format_duration
from collectived_proto.types import ANY_SOURCE
from collectived_proto.v1 import common_pb2 as common
from collectived_proto.v1 import status_pb2 as pb

HINT = "on CPU devices: the hint NCCL falls back to RING"


def member(rank: int) -> common.Member:
    return common.Member(
        rank=rank,
        worker=rank // 2,
        host="h",
        pid=70 + rank,
        device=f"CPU:{rank}",
        label="pod-3" if rank == 3 else "",
        last_instance=6,
        last_op="all_reduce(mean)",
        last_site="train.py:88",
        idle_seconds=2.5,
    )


def job(*, missing: tuple[int, ...] = (), size: int = 4, seconds: float = 2.5) -> pb.StatusReply:
    """A job of two workers and one group, in which a barrier is in flight where ranks are missing."""
    group = pb.GroupStatus(name="j/world", generation=5, state="ready", size=size)
    group.members.extend(member(rank) for rank in range(size))
    if missing:
        group.in_flight.add(
            instance=7,
            op="barrier()",
            site="train.py:90",
            seconds=seconds,
            missing=missing,
            arrived=[rank for rank in range(size) if rank not in missing],
            state="arriving",
        )
    return pb.StatusReply(
        unix_time=1000.0,
        answered_by="coordinator",
        coordinator=pb.CoordinatorStatus(address="unix:/c", job="j", release="0.1.0"),
        workers=[
            pb.WorkerStatus(task=task, host="h", pid=61 + task, connected=True, release="0.1.0") for task in range(2)
        ],
        groups=[group],
    )


def only(reply: pb.StatusReply) -> StatusFinding:
    (finding,) = collect_findings(reply)
    return finding


def test_nothing_hurts_where_all_is_well() -> None:
    assert collect_findings(job()) == []


def test_a_rank_that_is_missing_is_named_with_where_it_is_and_what_it_last_did() -> None:
    assert only(job(missing=(3,))) == StatusFinding(
        FindingKind.MISSING,
        Severity.ERROR,
        "group world: barrier() #7 at train.py:90 has waited 2.5 s for rank 3 (pod-3, host h, pid 73), "
        "which last called all_reduce(mean) #6 at train.py:88, 2.5 s ago",
        "world",
        5,
        age_seconds=2.5,
        ranks=(3,),
    )


def test_of_many_ranks_that_are_missing_a_few_are_named_and_the_others_counted() -> None:
    sentence = only(job(missing=tuple(range(1, 20)), size=20)).sentence
    assert sentence.count("pid ") == 3
    assert sentence.endswith("; and 16 more: ranks 4-19")


def test_what_waits_behind_a_collective_that_waits_is_only_counted() -> None:
    reply = job(missing=(3,))
    for instance in (8, 9):
        reply.groups[0].in_flight.add(instance=instance, op="barrier()", seconds=2, missing=[3])
    assert only(reply).sentence.endswith("; 2 more wait behind it")


def test_a_rank_that_has_called_nothing_yet_is_said_to() -> None:
    reply = job(missing=(3,))
    reply.groups[0].members[3].CopyFrom(common.Member(rank=3, worker=1, host="h", pid=73, idle_seconds=9))
    assert "which has called no collective in this group yet" in only(reply).sentence


def test_the_number_of_a_call_is_said_only_where_it_is_known() -> None:
    reply = job(missing=(3,))
    reply.groups[0].members[3].last_instance = 4  # what it called last is not over yet
    assert "which last called all_reduce(mean) at train.py:88" in only(reply).sentence


def test_a_young_collective_does_not_hurt_nor_one_of_a_group_in_which_waiting_is_normal() -> None:
    assert collect_findings(job(missing=(3,), seconds=0.2)) == []
    reply = job(missing=(3,))
    reply.groups[0].idle = True
    reply.groups[0].posts.add(rank=1, peer=0, op="recv(source=0)", seconds=75)
    assert collect_findings(reply) == []


def test_ranks_of_a_worker_that_is_lost_or_silent_are_said_to_be_there() -> None:
    reply = job(missing=(3,))
    reply.workers[1].silent = True
    assert only(reply).sentence.endswith("(worker 1 does not answer: this is old)")
    reply.workers[1].connected = False
    reply.workers[1].last_heartbeat_seconds = 12
    missing, lost = collect_findings(reply)
    assert missing.sentence.endswith("(worker 1 is lost)")
    assert (lost.kind, lost.worker, lost.age_seconds) == (FindingKind.LOST, 1, 12)
    assert lost.sentence == "worker 1 (host h, pid 62) last reported 12.0 s ago"


def test_without_a_coordinator_a_worker_that_answers_is_not_lost() -> None:
    reply = job()
    reply.ClearField("coordinator")
    reply.workers[0].connected = False
    assert collect_findings(reply) == []


def test_a_collective_for_which_all_have_come_and_that_does_not_end_is_stalled() -> None:
    reply = job()
    flight = reply.groups[0].in_flight.add(
        instance=7, op="all_reduce(sum)", seconds=9, state="running", algorithm="ring", packs=8, packs_done=2
    )
    finding = only(reply)
    assert (finding.kind, finding.age_seconds) == (FindingKind.STALLED, 9)
    assert finding.sentence == (
        "group world: all_reduce(sum) #7 has run for 9.0 s: all ranks have come, 2 of 8 packs are done (ring)"
    )
    flight.state = "queued"  # behind another one, which is to be blamed
    assert collect_findings(reply) == []


def test_a_receive_that_waits_long_names_the_rank_at_its_other_end() -> None:
    reply = job()
    reply.groups[0].posts.add(rank=1, peer=0, tag=3, op="recv(source=0, tag=3)", site="train.py:95", seconds=75)
    reply.groups[0].posts.add(rank=0, peer=1, op="send(to=1, tag=0)", seconds=0.5)
    assert only(reply).sentence == (
        "group world: recv(source=0, tag=3) of rank 1 at train.py:95 has waited 1 min 15 s for rank 0 "
        "(host h, pid 70), which last called all_reduce(mean) at train.py:88, 2.5 s ago"
    )


def test_a_receive_from_any_rank_that_waits_long_names_none() -> None:
    reply = job()
    reply.groups[0].posts.add(rank=1, peer=ANY_SOURCE, op="recv(source=None, tag=0)", site="train.py:95", seconds=75)
    finding = only(reply)
    assert finding.ranks == () and finding.sentence == (
        "group world: recv(source=None, tag=0) of rank 1 at train.py:95 has waited 1 min 15 s for any rank"
    )


def test_a_group_that_forms_says_who_it_waits_for() -> None:
    reply = job()
    reply.groups[0].MergeFrom(
        pb.GroupStatus(state="forming", waiting_for="3 of 4 ranks here, waiting for 1 more", forming_seconds=12)
    )
    finding = only(reply)
    assert (finding.kind, finding.severity) == (FindingKind.MISSING, Severity.WARNING)
    assert finding.sentence == "group world has been forming for 12.0 s: 3 of 4 ranks here, waiting for 1 more"


def failure(generation: int, unix_time: float) -> pb.Failure:
    verdict = common.Verdict(group="j/world", generation=generation, code=14, message=f"rank 0 lost in {generation}")
    return pb.Failure(unix_time=unix_time, verdict=verdict)


def test_failures_come_latest_first_and_old_ones_not_at_all() -> None:
    reply = job()
    reply.groups[0].state = "failed"
    reply.failures.extend([failure(5, 940), failure(5, 990), failure(5, 300)])
    assert [finding.sentence for finding in collect_findings(reply)] == [
        "group world, 10.0 s ago: UNAVAILABLE: rank 0 lost in 5",
        "group world, 1 min 0 s ago: UNAVAILABLE: rank 0 lost in 5",
    ]


def test_a_failure_after_which_the_group_runs_again_is_worth_less() -> None:
    reply = job()
    reply.failures.append(failure(4, 990))
    finding = only(reply)
    assert finding.severity is Severity.WARNING
    assert "10.0 s ago (the group runs again): UNAVAILABLE" in finding.sentence


def test_releases_that_differ_are_told_with_who_has_them() -> None:
    reply = job()
    reply.workers[1].release = "0.2.0"
    reply.workers[0].client_releases.append("0.1.0")
    reply.workers[1].client_releases.append("0.0.9")
    assert only(reply).sentence == (
        "releases differ: 0.0.9: clients of worker 1; 0.1.0: the coordinator, worker 0, clients of worker 0; "
        "0.2.0: worker 1"
    )


def test_protocols_that_differ_are_told_beside_the_releases_oldest_first() -> None:
    reply = job()
    reply.workers[1].release = "0.2.0"
    reply.workers[1].protocol.CopyFrom(common.Protocol(lowest=1, highest=2, release="0.2.0"))
    reply.workers[1].clients.append(common.Protocol(lowest=1, highest=2, release="0.2.0"))
    reply.workers[1].clients.append(common.Protocol(release="0.0.9"))
    assert only(reply).sentence == (
        "releases differ: 0.0.9 (protocol 1): clients of worker 1; 0.1.0 (protocol 1): the coordinator, worker 0; "
        "0.2.0 (protocol 1 to 2): worker 1, clients of worker 1"
    )


def test_one_release_that_is_everywhere_is_no_trouble_whoever_tells_its_protocol() -> None:
    reply = job()
    reply.coordinator.protocol.CopyFrom(common.Protocol(lowest=1, highest=1, release="0.1.0"))
    reply.workers[0].clients.append(common.Protocol(lowest=1, highest=1, release="0.1.0"))
    reply.workers[0].clients.append(common.Protocol(lowest=1, highest=1))  # in another language
    reply.workers[1].client_releases.append("0.1.0")
    assert collect_findings(reply) == []


def test_daemons_that_admit_everybody_are_told() -> None:
    reply = job()
    assert not collect_findings(reply)
    reply.workers[1].insecure = True
    assert only(reply).sentence == "worker 1 (host h): any process that can connect to it may do all (--insecure)"
    reply.coordinator.insecure = True
    assert only(reply).sentence.startswith(
        "the coordinator, worker 1 (host h): any process that can connect to them may"
    )
    assert only(reply).kind is FindingKind.INSECURE


def test_a_coordinator_that_was_started_again_is_told_for_a_while() -> None:
    reply = job()
    reply.coordinator.uptime_seconds = 12
    assert not collect_findings(reply)
    reply.coordinator.restarted = True
    assert only(reply).kind is FindingKind.RESTARTED
    assert only(reply).sentence == "the coordinator was started again 12.0 s ago; its counts begin there"
    reply.coordinator.uptime_seconds = 601
    assert not collect_findings(reply)


@pytest.mark.parametrize(("used", "told"), [(89, False), (90, True)])
def test_memory_that_is_nearly_used_up_is_told(used: int, told: bool) -> None:
    reply = job()
    reply.workers[0].arena_bytes, reply.workers[0].arena_limit_bytes = used << 20, 100 << 20
    assert [finding.kind for finding in collect_findings(reply)] == [FindingKind.MEMORY] * told


@pytest.mark.parametrize(
    ("limit", "ago", "told"),
    [("sessions", 3.2, True), ("sessions", 700.0, False), ("session_memory", 3.2, False)],
)
def test_a_limit_that_was_met_lately_is_told(limit: str, ago: float, told: bool) -> None:
    reply = job()
    reply.workers[1].limits_met.add(limit=limit, refused=17, last_seconds=ago)
    expected = "worker 1 (host h) has met its limit of sessions 17 times, the last 3.2 s ago: a request was refused"
    assert [(one.kind, one.sentence) for one in collect_findings(reply)] == [(FindingKind.LIMIT, expected)] * told


def test_kinds_come_in_their_order_and_what_lasts_longest_first() -> None:
    reply = job(missing=(3,))
    reply.warnings.append("worker 1 did not answer")
    reply.groups[0].notes.append(HINT)
    reply.failures.append(failure(3, 990))
    reply.workers[1].connected, reply.workers[1].last_heartbeat_seconds = False, 12
    reply.workers[1].release = "0.2.0"
    older = reply.groups.add()
    older.CopyFrom(reply.groups[0])
    older.name, older.in_flight[0].seconds = "j/old", 30
    reply.groups[0].in_flight.add(instance=8, op="reduce(sum)", seconds=9, state="running")
    reply.groups.add(name="j/new", state="forming", waiting_for="1 of 2 ranks here, waiting for 1 more")
    assert [(finding.kind, finding.group) for finding in collect_findings(reply)] == [
        (FindingKind.INCOMPLETE, ""),
        (FindingKind.MISSING, "old"),
        (FindingKind.MISSING, "world"),
        (FindingKind.MISSING, "new"),
        (FindingKind.STALLED, "world"),
        (FindingKind.LOST, ""),
        (FindingKind.FAILED, "world"),
        (FindingKind.VERSIONS, ""),
        (FindingKind.HINT, "world"),
        (FindingKind.HINT, "old"),
    ]


def test_numbers_are_told_as_people_read_them() -> None:
    assert [format_duration(s) for s in (0.44, 59.9, 200, 7500)] == ["0.4 s", "59.9 s", "3 min 20 s", "2 h 5 min"]
