"""Ranks of `collectived bench` on real daemons: every operation runs, and its results are right, or counted."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import Cluster

import collectived as cd
from collectived.bench.config import BenchConfig
from collectived.bench.measure import Row, measure, plan_extents
from collectived.bench.operation_kinds import KINDS, Extent

small = partial(BenchConfig, max_bytes=4 << 10, factor=32, iterations=3, warmup=1)


def rows(
    order: BenchConfig, session: cd.Session, group: Any, told: list[tuple[Extent, int]] | None = None
) -> list[Row]:
    def begins(extent: Extent, iterations: int) -> None:
        if told is not None:
            told.append((extent, iterations))

    found = [measure(order, group, session, extent, begins) for extent in plan_extents(order, group.size)]
    return [row for row in found if row is not None]


@pytest.mark.parametrize("workers", ["one_worker", "two_workers"])
def test_every_operation_is_measured_and_right(workers: str, request: pytest.FixtureRequest) -> None:
    orders = [
        small(operation, root=1, memory=memory, in_flight=in_flight)
        for operation in KINDS
        for memory, in_flight in (("worker", 0), ("own", 4))
    ]
    orders += [small("all_reduce", dtype="bfloat16"), small("reduce", dtype="int8", reduce_op="mean")]
    cluster: Cluster = request.getfixturevalue(workers)
    first, second = cluster.run_sessions(2, lambda session, group: [rows(order, session, group) for order in orders])
    assert all(not measured for measured in second), "rank 0 alone gets the rows"
    for order, measured in zip(orders, first, strict=True):
        assert [row.extent for row in measured] == plan_extents(order, 2)
        for row in measured:
            assert row.errors == (None if order.operation == "barrier" else 0), (order, row)
            assert row.figures.iterations == 3 and 0 < row.figures.p50 <= row.figures.p99
            assert (row.figures.bus_bandwidth or 0) > 0 or order.operation == "barrier"


def test_iterations_are_the_same_on_all_ranks_where_nobody_says_how_many(one_worker: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> list[tuple[Extent, int]]:
        told: list[tuple[Extent, int]] = []
        rows(BenchConfig("all_reduce", max_bytes=4), session, group, told)
        return told

    first, second = one_worker.run_sessions(2, body)
    assert first == second and first[0][1] >= 20


class Lying:
    """A group whose `reduce_scatter` is wrong in one element on rank 1, and whose `scatter` is too short everywhere."""

    def __init__(self, group: cd.Group) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def reduce_scatter(self, *arguments: Any) -> Any:
        result = np.array(self._group.reduce_scatter(*arguments))
        result[1] += self.rank
        return result

    def scatter(self, value: Any, root: int) -> Any:
        return self._group.scatter(value, root)[:-1]


def test_wrong_elements_are_counted_on_all_ranks_together(one_worker: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> Any:
        lying = Lying(group)
        wish = partial(BenchConfig, min_bytes=80, max_bytes=80, iterations=2, warmup=0)
        return [
            [row.errors for row in rows(wish(operation, check=check), session, lying)]
            for operation, check in (("reduce_scatter", True), ("scatter", True), ("scatter", False))
        ]

    first, second = one_worker.run_sessions(2, body)
    assert first == [[1], [20], [None]] and second == [[], [], []]
