"""What a worker reports when a frame shows that ranks differ, which may be in an earlier collective than that."""

from __future__ import annotations

import pytest

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
)
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.failure.reporter import CoordinatorAccess, FaultReporter
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
