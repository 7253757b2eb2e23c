"""What a worker reports, and when it decides by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from collectived_proto.errors import Code
from collectived_proto.types import (
    AllReduce,
    Barrier,
    Broadcast,
    Collective,
    DType,
    Gather,
    GroupInfo,
    Layout,
    Leaf,
    Member,
    Operation,
    Peer,
    ReduceOp,
    Report,
    ReportKind,
    Verdict,
)
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.failure import reporter as reporter_module
from collectived_runtime.engine.failure.reporter import DECIDE_ALONE_SECONDS, CoordinatorAccess, FaultReporter
from collectived_runtime.engine.submit.contracts import PreparedCollective
from collectived_runtime.engine.submit.tracker import Arrival, InstanceTracker

MEMBERS = tuple(Member(rank, f"CPU:{rank}", rank, f"host{rank}", 70 + rank) for rank in range(2))
TOPOLOGY = GroupTopology.from_peers(
    GroupInfo("job/train", 7, 100, MEMBERS),
    (Peer(0, "i", "host0", "h:1", (0,)), Peer(1, "i", "host1", "h:2", (1,))),
    0,
    (),
)


@pytest.mark.parametrize(
    ("before", "unconfirmed"),
    [
        ([], []),
        ([Broadcast(0), Broadcast(1)], [0, 1]),
        ([Broadcast(0), AllReduce(ReduceOp.SUM), Broadcast(1), Gather(1)], [2, 3]),
        ([Broadcast(0), Gather(0)], []),
    ],
    ids=str,
)
def test_what_finished_before_without_hearing_from_all_is_compared_first(
    before: list[Operation], unconfirmed: list[int]
) -> None:
    reports: list[Report] = []
    tracker = InstanceTracker(7, 100, [0], 1.0, 0.0)
    reporter = FaultReporter(TOPOLOGY, tracker, "worker", CoordinatorAccess(reports.append), lambda verdict: None)
    for number, operation in enumerate([*before, Barrier()]):
        collective = Collective(operation, "*", (Leaf("", DType.FLOAT32, (4,)),))
        prepared = PreparedCollective(collective, collective.contract().encode(), Layout((), (), 0, 0), str(operation))
        tracker.record_arrival(0, number, Arrival(prepared, None, 0.0), 0.0)
        if number < len(before):
            tracker.finish(tracker.instances[number], 1.0)
    instance = tracker.instances[len(before)]
    reporter.report_mismatch(instance, 1)
    assert [(report.kind, report.instance) for report in reports] == [
        *((ReportKind.PENDING, number) for number in unconfirmed),
        (ReportKind.MISMATCH, instance.number),
    ]
    assert all(report.ranks[0].contract for report in reports) and instance.is_barred


class Clock:
    """In place of `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(reporter_module, "time", fake)
    return fake


LOST_AFTER = 10.0


def make_reporter(
    ranks_here: tuple[int, ...],
    decided: list[Verdict],
    is_connected: Callable[[], bool] = lambda: True,
    report: Callable[[Report], None] = lambda report: None,
) -> FaultReporter:
    members = tuple(Member(rank, f"CPU:{rank}", 0, "host0", 70 + rank) for rank in range(8))
    group = GroupInfo("job/train", 7, 100, members)
    elsewhere = tuple(rank for rank in range(8) if rank not in ranks_here)
    peers = (Peer(0, "i", "host0", "h:1", ranks_here), Peer(1, "i", "host1", "h:2", elsewhere))
    topology = GroupTopology.from_peers(group, peers, 0, ())
    tracker = InstanceTracker(7, 100, ranks_here, 1.0, 100.0)
    coordinator = CoordinatorAccess(report, LOST_AFTER, is_connected)
    return FaultReporter(topology, tracker, "worker 0", coordinator, decided.append)


def step(reporter: FaultReporter, clock: Clock) -> None:
    clock.now = reporter.next_deadline()
    reporter.on_timer()


def test_one_fault_after_another_does_not_put_off_what_is_decided_alone(clock: Clock) -> None:
    decided: list[Verdict] = []
    reporter = make_reporter(tuple(range(7)), decided)
    begin = clock.now
    for rank in range(7):
        reporter.report_fault(ReportKind.LOST, -1, rank=rank)
        clock.now += 0.015
        if clock.now >= reporter.next_deadline():
            reporter.on_timer()
    while not decided:
        step(reporter, clock)
    assert clock.now - begin <= 1.5 * DECIDE_ALONE_SECONDS


def test_ranks_that_left_with_their_worker_are_told_together(clock: Clock) -> None:
    decided: list[Verdict] = []
    reporter = make_reporter((0,), decided)
    reporter.report_worker_left(1, 0)
    while not decided:
        step(reporter, clock)
    assert [[member.rank for member in verdict.missing] for verdict in decided] == [list(range(1, 8))]


def test_of_a_departure_a_coordinator_that_is_there_is_waited_for_until_it_would_be_taken_for_lost(
    clock: Clock,
) -> None:
    decided: list[Verdict] = []
    reporter = make_reporter((0,), decided)
    begin = clock.now
    reporter.report_worker_left(1, 0)
    while not decided:
        step(reporter, clock)
    assert LOST_AFTER <= clock.now - begin <= LOST_AFTER + 2 * DECIDE_ALONE_SECONDS


def test_of_a_departure_a_worker_decides_alone_as_soon_as_it_knows_that_the_coordinator_has_gone(clock: Clock) -> None:
    decided: list[Verdict] = []
    gone_at = clock.now + 1.0
    reporter = make_reporter((0,), decided, lambda: clock.now < gone_at)
    reporter.report_worker_left(1, 0)
    while not decided:
        step(reporter, clock)
    assert gone_at <= clock.now <= gone_at + 2 * DECIDE_ALONE_SECONDS


def test_who_waits_for_a_rank_that_said_goodbye_asks_until_the_coordinator_knows_of_it(clock: Clock) -> None:
    decided: list[Verdict] = []
    reports: list[Report] = []
    reporter = make_reporter((0,), decided, report=reports.append)
    reporter.mark_worker_gone(1)
    reporter.report_if_departed(0, 1, "recv(source=1)")
    for _ in range(8):
        step(reporter, clock)
    assert not decided and len(reports) >= 3
    assert {(report.kind, report.rank, report.peer) for report in reports} == {(ReportKind.UNANSWERED, 0, 1)}


def test_at_its_deadline_an_instance_that_a_rank_has_left_names_that_rank(clock: Clock) -> None:
    decided: list[Verdict] = []
    reporter = make_reporter((0,), decided)
    reporter.report_worker_left(1, 3)
    reporter.report_late(3, 0, "barrier()", 0.5)
    begin = clock.now
    while not decided:
        step(reporter, clock)
    (verdict,) = decided
    assert clock.now - begin <= 2 * DECIDE_ALONE_SECONDS
    assert (verdict.code, verdict.from_instance, verdict.orderly) == (Code.ABORTED, 3, True)
    assert [member.rank for member in verdict.missing] == list(range(1, 8))
