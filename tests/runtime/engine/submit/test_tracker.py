"""The tracker: what a rank that goes leaves behind, and when waiting is told again."""

from __future__ import annotations

import pytest

from collectived_proto.codec import report_from_proto, report_to_proto
from collectived_proto.types import (
    AllReduce,
    Broadcast,
    Collective,
    DType,
    Gather,
    Layout,
    Leaf,
    Operation,
    Reduce,
    ReduceOp,
    Report,
    ReportKind,
    Scatter,
)
from collectived_runtime.engine.submit.contracts import PreparedCollective
from collectived_runtime.engine.submit.tracker import (
    MAX_DESCRIBED_LEAVES,
    MAX_LAST_SUBMISSIONS,
    Arrival,
    InstanceTracker,
)

SUM = AllReduce(ReduceOp.SUM)
EMPTY = Layout((), (), 0, 0)


def submit(tracker: InstanceTracker, rank: int, operation: Operation, leaves: int = 1, now: float = 0.0) -> int:
    """The number of the instance."""
    number = tracker.progress[rank].submitted + 1
    described = tuple(Leaf(f"[{index}]", DType.FLOAT32, (4,)) for index in range(leaves))
    collective = Collective(operation, "*", described, site=f"train.py:{number}")
    prepared = PreparedCollective(collective, collective.contract().encode(), EMPTY, str(operation))
    tracker.record_arrival(rank, number, Arrival(prepared, None, now), 0.0)
    return number


def carry_out(tracker: InstanceTracker, operation: Operation, leaves: int = 1) -> None:
    number = -1
    for rank in tracker.progress:
        number = submit(tracker, rank, operation, leaves)
    tracker.finish(tracker.instances[number], 1.0)


def left(tracker: InstanceTracker, rank: int) -> list[int]:
    """Which instances its departure tells of."""
    return [one.instance for one in tracker.last_submissions(rank)]


@pytest.mark.parametrize(
    "operation", [Broadcast(0), Broadcast(1), Scatter(0), Reduce(ReduceOp.SUM, 1), Gather(1)], ids=str
)
def test_what_a_rank_has_done_without_hearing_everybody_is_told_when_it_goes(operation: Operation) -> None:
    tracker = InstanceTracker(7, 100, [0], 1.0, 0.0)
    for _ in range(3):
        carry_out(tracker, operation)
    last = tracker.last_submissions(0)
    assert [(one.instance, one.op, one.site) for one in last] == [
        (number, str(operation), f"train.py:{number}") for number in range(3)
    ]
    assert all(one.collective and one.contract == one.collective.contract().encode() for one in last)


@pytest.mark.parametrize("operation", [SUM, Reduce(ReduceOp.SUM, 0), Gather(0)], ids=str)
def test_who_has_heard_everybody_knows_that_all_agreed_until_then(operation: Operation) -> None:
    tracker = InstanceTracker(7, 100, [0], 1.0, 0.0)
    for one in (Broadcast(0), Broadcast(0), operation, Broadcast(0), Broadcast(0)):
        carry_out(tracker, one)
    assert left(tracker, 0) == [3, 4]
    carry_out(tracker, operation)
    assert left(tracker, 0) == []


def test_what_has_not_finished_is_told_whatever_it_is() -> None:
    tracker = InstanceTracker(7, 100, [0, 1], 1.0, 0.0)
    carry_out(tracker, SUM)
    submit(tracker, 0, SUM)
    submit(tracker, 0, SUM)
    assert (left(tracker, 0), left(tracker, 1)) == ([1, 2], [])


def test_only_the_latest_are_told_and_very_many_leaves_are_not_described() -> None:
    tracker = InstanceTracker(7, 100, [0], 1.0, 0.0)
    for _ in range(3 * MAX_LAST_SUBMISSIONS):
        carry_out(tracker, Broadcast(0), MAX_DESCRIBED_LEAVES // 2)
    last = tracker.last_submissions(0)
    assert [one.instance for one in last] == list(range(2 * MAX_LAST_SUBMISSIONS, 3 * MAX_LAST_SUBMISSIONS))
    assert [one.collective is not None for one in last] == [False] * (MAX_LAST_SUBMISSIONS - 2) + [True] * 2
    assert all(one.op and one.site and one.contract for one in last)


def test_a_departure_survives_the_trip_through_protobuf() -> None:
    tracker = InstanceTracker(7, 100, [0], 1.0, 0.0)
    for _ in range(3):
        carry_out(tracker, Broadcast(0), MAX_DESCRIBED_LEAVES // 2)
    report = Report(7, 100, ReportKind.LEFT, 2, 0, last=tracker.last_submissions(0))
    assert report_from_proto(report_to_proto(report)) == report


def test_what_waits_is_told_after_a_while_and_again_after_twice_the_time() -> None:
    tracker = InstanceTracker(7, 100, [0, 1], 1.0, 0.0)
    submit(tracker, 0, SUM, now=10.0)
    told = []
    for kind in [ReportKind.NEAR, ReportKind.PENDING] * 5:
        now = tracker.next_deadline()
        assert [report.kind for report in tracker.collect_due_reports(now)] == [kind]
        assert tracker.collect_due_reports(now) == []
        told.append(now - 10.0)
    assert told[1::2] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert told[::2] == [at - 0.25 for at in told[1::2]]


def ring(
    tracker: InstanceTracker, rank: int, number: int, *, ready: bool, contract: bytes = b"same", now: float = 0.0
) -> bool:
    """Whether it agrees with those before it."""
    prepared = PreparedCollective(Collective(SUM, "*", (), site=f"train.py:{number}"), contract, EMPTY, "sum")
    return tracker.record_arrival(rank, number, Arrival(prepared, None, now, ready), 5.0)


def test_a_rank_whose_value_is_being_written_is_known_and_has_not_arrived() -> None:
    tracker = InstanceTracker(7, 100, [0, 1], 1.0, 0.0)
    assert ring(tracker, 0, 0, ready=False) and ring(tracker, 1, 0, ready=True, now=1.0)
    assert tracker.find_startable() is None and tracker.missing_ranks(tracker.instances[0]) == [0]
    waiting, there = tracker.positions(0, 2.0)
    assert (waiting.arrived, waiting.submitted, waiting.contract) == (False, -1, b"same")
    assert (there.arrived, there.submitted, there.contract) == (True, 0, b"same")
    assert tracker.next_deadline() == 0.75, "it may stall"
    tracker.mark_ready(0, 0, 3.0)
    instance = tracker.find_startable()
    assert instance is not None and (instance.first_arrival.arrived_at, instance.last_arrival.arrived_at) == (1.0, 3.0)
    assert tracker.positions(0, 3.0)[0].arrived


def test_a_rank_has_arrived_at_what_follows_when_all_before_it_is_there() -> None:
    tracker = InstanceTracker(7, 100, [0], 1.0, 0.0)
    for number, ready in enumerate((True, False, True, False, True)):
        ring(tracker, 0, number, ready=ready)
    standing = tracker.progress[0]
    assert (standing.received, standing.submitted, standing.site) == (4, 0, "train.py:0")
    tracker.mark_ready(0, 3, 1.0)
    assert standing.submitted == 0
    tracker.mark_ready(0, 1, 1.0)
    assert (standing.submitted, standing.site) == (4, "train.py:4")


def test_who_differs_is_found_while_its_value_is_being_written() -> None:
    tracker = InstanceTracker(7, 100, [0, 1], 1.0, 0.0)
    assert ring(tracker, 0, 0, ready=True)
    assert not ring(tracker, 1, 0, ready=False, contract=b"other")


def waiting(timeout: float) -> InstanceTracker:
    """Rank 0 waits in the first instance for ranks 1 and 2, of which 2 has left."""
    tracker = InstanceTracker(7, 100, [0, 1, 2], 100.0, 0.0)
    collective = Collective(SUM, "*", (), site="train.py:1")
    prepared = PreparedCollective(collective, b"", EMPTY, str(SUM))
    tracker.record_arrival(0, 0, Arrival(prepared, None, 0.0), timeout)
    tracker.progress[2].has_departed = True
    return tracker


@pytest.mark.parametrize(("timeout", "near"), [(10.0, 9.0), (0.5, 0.25)])
def test_that_a_deadline_is_near_is_reported_once_and_early_enough(timeout: float, near: float) -> None:
    tracker = waiting(timeout)
    assert tracker.next_deadline() == near
    assert [report.kind for report in tracker.collect_due_reports(near)] == [ReportKind.NEAR]
    assert tracker.next_deadline() == timeout
    assert tracker.collect_due_reports(near) == []
    assert [report.kind for report in tracker.collect_due_reports(timeout)] == [ReportKind.EXPIRED]
    assert tracker.next_deadline() == 100.0
    assert tracker.collect_due_reports(timeout + 1) == []


def test_a_deadline_that_was_overslept_is_not_reported_as_near() -> None:
    tracker = waiting(10.0)
    assert [report.kind for report in tracker.collect_due_reports(11.0)] == [ReportKind.EXPIRED]
    assert tracker.collect_due_reports(11.0) == []


def test_where_the_threads_of_an_absent_rank_are_is_told_until_it_does_something() -> None:
    tracker = waiting(10.0)
    for rank in (0, 1):
        tracker.record_stack(rank, "data.py:88 in load", 5.0)
    assert [position.stack for position in tracker.positions(0, 6.0)] == ["", "data.py:88 in load", ""]
    report = report_from_proto(report_to_proto(tracker.make_report(ReportKind.EXPIRED, 0)))
    assert [position.stack for position in report.ranks] == ["", "data.py:88 in load", ""]
    submit(tracker, 1, SUM, now=7.0)
    assert tracker.positions(1, 8.0)[1].stack == ""


def test_ranks_that_others_wait_for_are_known_here_or_asked_for_from_elsewhere() -> None:
    tracker = waiting(0.0)
    assert tracker.awaited_ranks() == [1]
    submit(tracker, 1, SUM)
    assert tracker.awaited_ranks() == []
    assert tracker.seek(1) == [0, 1]
    assert tracker.awaited_ranks() == [0, 1]


def test_of_a_crowd_that_is_waited_for_the_first_few_are_asked() -> None:
    tracker = InstanceTracker(7, 100, range(100), 1.0, 0.0)
    assert tracker.seek(0) == [0, 1, 2, 3]


def test_a_rank_that_moves_its_value_itself_is_not_through_before_the_instance_ends() -> None:
    """It is gone before it if it goes; it is missing if it does not go on."""
    tracker = InstanceTracker(7, 100, [0], 1.0, 0.0)
    prepared = PreparedCollective(Collective(SUM, "*", (), site="train.py:1"), b"same", EMPTY, "sum")
    for number, is_lent in enumerate((False, True, False)):
        assert tracker.record_arrival(0, number, Arrival(prepared, None, 0.0, is_lent=is_lent), 0.0)
    assert tracker.progress[0].submitted == 2 and tracker.find_last_submitted(0) == 0
    [position] = tracker.positions(1, 1.0)
    assert (position.submitted, position.arrived) == (0, True)
    assert tracker.seek(1) == []
    tracker.progress[0].is_stuck = True
    assert not tracker.positions(1, 1.0)[0].arrived and tracker.positions(0, 1.0)[0].arrived
    assert tracker.seek(1) == [0]
    tracker.instances[1].arrivals[0].is_lent = False  # its worker has the value now
    assert tracker.find_last_submitted(0) == 2 and tracker.has_come(0, 2)
