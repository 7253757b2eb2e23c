"""What a worker decides alone says who and where they are, as the coordinator would."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collectived_proto.cause import Cause
from collectived_proto.errors import CODE_BY_CAUSE, Code
from collectived_proto.types import GroupInfo, Member, Peer, RankPosition, Report, ReportKind
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.failure import local_verdict

MEMBERS = tuple(Member(rank, f"CPU:{rank}", rank // 2, f"host{rank // 2}", 70 + rank) for rank in range(4))
TOPOLOGY = GroupTopology.from_peers(
    GroupInfo("job/train", 7, 100, MEMBERS),
    (Peer(0, "i", "host0", "h:1", (0, 1)), Peer(1, "i", "host1", "h:2", (2, 3))),
    0,
    (),
)
ALONE = " (decided by worker 0 alone: the coordinator did not answer)"
FIRST = RankPosition(0, 17, 16, "all_reduce(sum)", "train.py:88", 0.0, True, "all_reduce(sum)", "train.py:88")
SECOND = RankPosition(1, 16, 16, "all_reduce(sum)", "train.py:70")
ASLEEP = replace(SECOND, stack="data.py:88 in load\nthread pin: wait.py:1 in wait")
WHAT = "all_reduce(sum) #17 of group 'train'"
RANK_1 = "rank 1 (host host0, pid 71)"
RANK_2 = "rank 2 (host host1, pid 72)"
RANK_3 = "rank 3 (host host1, pid 73)"


@pytest.mark.parametrize(
    ("report", "text", "missing"),
    [
        (
            Report(7, 100, ReportKind.EXPIRED, 17, timeout_seconds=2, ranks=(FIRST, SECOND)),
            f"{WHAT} did not complete within 2.0 s: {RANK_1} has not come; it last did all_reduce(sum) #16 at "
            "train.py:70; rank 0 is waiting at train.py:88",
            [1],
        ),
        (
            Report(7, 100, ReportKind.EXPIRED, 17, timeout_seconds=2, ranks=(FIRST,)),
            f"{WHAT} did not complete within 2.0 s: all ranks of this worker have come; "
            "rank 0 is waiting at train.py:88",
            [],
        ),
        (
            Report(7, 100, ReportKind.LOST, 16, rank=1, text="its process ended", ranks=(FIRST, SECOND)),
            f"{RANK_1} is lost: its process ended (last finished #16, last did all_reduce(sum) #16 at train.py:70)",
            [1],
        ),
        (
            Report(7, 100, ReportKind.ABORT, 17, rank=1, text="loss is NaN", ranks=(FIRST, SECOND)),
            f"{RANK_1} aborted the group: loss is NaN",
            [1],
        ),
        (
            Report(7, 100, ReportKind.LINK, 17, worker=1, text="closed by peer", ranks=(FIRST, SECOND)),
            f"{RANK_2}, {RANK_3} are lost: the link of worker 0 to worker 1 broke: closed by peer",
            [2, 3],
        ),
        (
            Report(7, 100, ReportKind.NATIVE, 17, text="NCCL: init: no (code 2)", ranks=(FIRST, SECOND)),
            f"{WHAT} failed: on worker 0, of rank 0 (host host0, pid 70), {RANK_1}, NCCL: init: no (code 2); "
            "no member of the group is known to be lost",
            [],
        ),
        (
            Report(7, 100, ReportKind.OVERDUE, -1, 1, 0, "recv(source=2, tag=0)", 0.5, (FIRST, SECOND), 2),
            f"recv(source=2, tag=0) on {RANK_1} did not complete within 0.5 s: {RANK_2} has not come",
            [2],
        ),
        (
            Report(7, 100, ReportKind.UNCLAIMED, -1, 1, text="9 bytes", ranks=(FIRST, SECOND), peer=2),
            f"there is no memory for what {RANK_2} has sent to {RANK_1}, which has not received it: 9 bytes",
            [2],
        ),
        (
            Report(7, 100, ReportKind.EXHAUSTED, 17, rank=1, text="it holds 9 bytes", ranks=(FIRST, SECOND)),
            f"{RANK_1} has no memory left: it holds 9 bytes",
            [1],
        ),
    ],
    ids=lambda value: value.kind.name if isinstance(value, Report) else "",
)
def test_it_names_ranks_in_full(report: Report, text: str, missing: list[int]) -> None:
    verdict = local_verdict.make_verdict(TOPOLOGY, "/job:worker/task:0", 100, 17, "all_reduce(sum)", report)
    assert verdict.message == text + ALONE
    assert [member.rank for member in verdict.missing] == missing
    assert (verdict.group, verdict.decided_by) == ("train", "/job:worker/task:0")


def test_it_tells_what_the_ranks_of_this_worker_did_last() -> None:
    report = Report(7, 100, ReportKind.LOST, 16, rank=1, text="its process ended", ranks=(FIRST, SECOND))
    verdict = local_verdict.make_verdict(TOPOLOGY, "/job:worker/task:0", 100, 17, "all_reduce(sum)", report)
    assert [(member.last_instance, member.last_site) for member in verdict.members] == [
        (16, "train.py:88"),
        (16, "train.py:70"),
        (-1, ""),
        (-1, ""),
    ]
    assert verdict.missing[0].last_instance == 16 and verdict.code == Code.UNAVAILABLE


def test_of_a_link_that_was_refused_no_rank_is_to_blame() -> None:
    report = Report(
        7, 100, ReportKind.LINK, 17, worker=1, text="no room", ranks=(FIRST, SECOND), cause=Cause.LINK_REFUSED
    )
    verdict = local_verdict.make_verdict(TOPOLOGY, "/job:worker/task:0", 100, 17, "all_reduce(sum)", report)
    assert (verdict.cause, verdict.code, verdict.missing, verdict.origin) == (
        Cause.LINK_REFUSED,
        Code.UNAVAILABLE,
        (),
        None,
    )
    assert verdict.message == (
        f"worker 0 (host host0) has no link to worker 1 (host host1): no room; no rank is known to be lost{ALONE}"
    )


def test_where_nobody_has_submitted_it_the_group_is_named() -> None:
    report = Report(7, 100, ReportKind.MISMATCH, 17)
    verdict = local_verdict.make_verdict(TOPOLOGY, "/job:worker/task:0", 100, 17, "", report)
    assert verdict.message == f"group 'train': the ranks differ in what they submitted{ALONE}"


def test_ranks_of_one_worker_that_differ_are_named_by_it() -> None:
    here, there = (
        replace(FIRST, contract=b"a"),
        replace(FIRST, rank=1, contract=b"b", op="barrier()", site="train.py:9"),
    )
    report = Report(7, 100, ReportKind.MISMATCH, 17, ranks=(here, there))
    verdict = local_verdict.make_verdict(TOPOLOGY, "/job:worker/task:0", 100, 17, "all_reduce(sum)", report)
    assert verdict.message.startswith("rank 1 differs: barrier() there, all_reduce(sum) on rank 0")
    assert "; 2 of 4 ranks have come, so that it is not known which of these are mistaken)" in verdict.message
    assert [member.rank for member in verdict.differing] == [0, 1] and verdict.origin is None


@pytest.mark.parametrize(
    ("kind", "cause", "origin"),
    [
        (ReportKind.EXPIRED, Cause.DEADLINE, None),
        (ReportKind.LOST, Cause.LOST_RANK, 1),
        (ReportKind.ABORT, Cause.ABORTED, 1),
        (ReportKind.LINK, Cause.LOST_LINK, None),
        (ReportKind.NATIVE, Cause.NATIVE, None),
        (ReportKind.OVERDUE, Cause.DEADLINE, None),
        (ReportKind.UNCLAIMED, Cause.EXHAUSTED, 2),
        (ReportKind.EXHAUSTED, Cause.EXHAUSTED, 1),
        (ReportKind.MISMATCH, Cause.MISMATCH, None),
        (ReportKind.PENDING, Cause.DEFECT, None),
    ],
)
def test_each_kind_of_report_has_its_cause(kind: ReportKind, cause: Cause, origin: int | None) -> None:
    report = Report(7, 100, kind, 17, rank=1, worker=1, ranks=(FIRST, SECOND), peer=2)
    verdict = local_verdict.make_verdict(TOPOLOGY, "/job:worker/task:0", 100, 17, "all_reduce(sum)", report)
    assert (verdict.cause, verdict.origin, verdict.code) == (cause, origin, CODE_BY_CAUSE[cause])


def test_what_another_worker_adds_is_said_in_full_too() -> None:
    report = Report(7, 100, ReportKind.EXPIRED, 17, timeout_seconds=2, ranks=(FIRST,))
    verdict = local_verdict.make_verdict(TOPOLOGY, "/job:worker/task:0", 100, 17, "all_reduce(sum)", report)
    there = GroupTopology.from_peers(TOPOLOGY.group, TOPOLOGY.peers, 1, ())
    added = local_verdict.with_missing(there, "/job:worker/task:1", verdict, [2, 3])
    assert added.message == f"{verdict.message}; worker 1 adds: {RANK_2}, {RANK_3} have not come"
    assert [member.rank for member in added.missing] == [2, 3] and added.decided_by == "/job:worker/task:1"


def test_a_rank_that_is_missing_is_told_of_with_where_its_threads_are() -> None:
    report = Report(7, 100, ReportKind.EXPIRED, 17, timeout_seconds=2, ranks=(FIRST, ASLEEP))
    verdict = local_verdict.make_verdict(TOPOLOGY, "/job:worker/task:0", 100, 17, "all_reduce(sum)", report)
    assert "at train.py:70; now: data.py:88 in load; rank 0" in verdict.message
    assert [member.stack for member in verdict.missing] == [ASLEEP.stack]
