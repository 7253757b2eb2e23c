"""What a group loop has done in the last minute: what is counted, what is forgotten, and as how much it counts."""

from __future__ import annotations

import pytest

from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    DType,
    Gather,
    Leaf,
    Operation,
    ReduceOp,
    ReduceScatter,
)
from collectived_proto.v1 import status_pb2 as pb
from collectived_runtime.engine.record.rates import SLICES, OperationLoad, RateWindow, compute_load

SUMS = OperationLoad("all_reduce", 100, 150.0)


def sums(minute: RateWindow, now: float) -> pb.Rate:
    (rate,) = minute.rates(now)
    return rate


def test_what_ended_is_added_up_by_operation() -> None:
    minute = RateWindow(begun=1000.0)
    minute.add(SUMS, 1000.0, 1001.0, 1001.5)
    minute.add(SUMS, 1002.0, 1002.0, 1002.5)
    minute.add(OperationLoad("barrier"), 1003.0, 1003.0, 1003.1)
    rate, barrier = minute.rates(1010.0)
    assert rate == pb.Rate(
        op="all_reduce",
        seconds=10.0,
        collectives=2,
        bytes=200,
        bus_bytes=300,
        busy_seconds=1.0,
        waiting_seconds=1.0,
        algorithm_bandwidth=200.0,
        bus_bandwidth=300.0,
    )
    assert (barrier.op, barrier.collectives, barrier.bus_bandwidth) == ("barrier", 1, 0.0)


def test_what_waits_for_ranks_now_counts_as_waiting() -> None:
    minute = RateWindow(begun=1000.0)
    minute.add(SUMS, 1000.0, 1001.0, 1001.5)
    (rate,) = minute.rates(1010.0, ("all_reduce", 1002.0))
    assert (rate.collectives, rate.waiting_seconds) == (1, 9.0)
    _, rate = minute.rates(1010.0, ("barrier", 1005.0))
    assert (rate.op, rate.collectives, rate.seconds, rate.waiting_seconds) == ("barrier", 0, 10.0, 5.0)
    rate = minute.rates(1200.0, ("barrier", 1005.0))[0]
    assert rate.waiting_seconds == rate.seconds == 55.0  # all of the time that counts


def test_what_is_older_than_a_minute_is_forgotten() -> None:
    minute = RateWindow(begun=0.0)
    for second in range(200):
        minute.add(SUMS, second, second, second + 0.5)
    assert sums(minute, 199.9).collectives == 60
    assert sums(minute, 199.9).seconds == pytest.approx(59.9)
    assert sums(minute, 230.0).collectives == 25  # what ended since 175
    assert minute.rates(300.0) == []


def test_it_holds_no_more_however_long_it_runs() -> None:
    minute = RateWindow(begun=0.0)
    for second in range(1000):
        minute.add(SUMS, second, second, second)
    assert [len(slices) for slices in minute._slices.values()] == [SLICES]


def value(operation: Operation, *shapes: tuple[int, ...]) -> Collective:
    return Collective(operation, "*", tuple(Leaf("", DType.FLOAT32, shape) for shape in shapes))


@pytest.mark.parametrize(
    ("collective", "rows", "op", "size", "bus"),
    [
        (value(AllReduce(ReduceOp.SUM), (10,), (5, 2)), (), "all_reduce", 80, 120),
        (value(Broadcast(0), (10,)), (), "broadcast", 40, 40),
        (value(ReduceScatter(ReduceOp.SUM, 0, ()), (8,)), (), "reduce_scatter", 32, 24),
        (value(Barrier()), (), "barrier", 0, 0),
        # Of what joins, the size is that of the result: 1 + 2 + 3 + 4 rows, of two floats and of one.
        (value(AllGather(0), (1, 2), (1,)), ((1, 1), (2, 2), (3, 3), (4, 4)), "all_gather", 120, 90),
        (value(Gather(0, 0), (3,)), ((3,), (0,), (0,), (1,)), "gather", 16, 12),
        # Of what is exchanged, what a rank gives on the average: 16 rows of two floats, in all.
        (value(AllToAll(0, (1, 1, 1, 1)), (4, 2)), ((1,) * 4,) * 4, "all_to_all", 32, 24),
    ],
    ids=lambda case: str(case.operation) if isinstance(case, Collective) else "",
)
def test_sizes_are_those_of_nccl_tests(
    collective: Collective, rows: tuple[tuple[int, ...], ...], op: str, size: int, bus: int
) -> None:
    assert compute_load(collective, 4, rows) == OperationLoad(op, size, bus)
