"""The metrics of a worker and a coordinator: all that the catalogue lists, and how many series there may be.

The group loops here are stand-ins with real counters, as full as counters can become.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client.exposition import choose_encoder

from collectived_proto.errors import Code
from collectived_proto.types import GroupInfo, Member, RankPosition
from collectived_runtime.coordinator.core import stragglers
from collectived_runtime.coordinator.core.events import WorkerHello
from collectived_runtime.coordinator.core.registry import GenerationRecord, Registry, WorkerRecord
from collectived_runtime.coordinator.metrics import CoordinatorMetrics, collect_metrics
from collectived_runtime.engine.base.memory_budget import MemoryBudget
from collectived_runtime.engine.record.counters import (
    NOT_STARTED,
    OPERATIONS,
    POINT_TO_POINT,
    Counters,
    Histogram,
    OperationTotals,
)
from collectived_runtime.metrics import labels
from collectived_runtime.metrics.catalogue import COORDINATOR_METRICS, PROCESS_METRICS, WORKER_METRICS
from collectived_runtime.metrics.page import PAUSE, MetricsSource, render_chunks
from collectived_runtime.plan.catalog import ACROSS_ALGORITHMS
from collectived_runtime.worker.observe.metrics import NetworkCounts, WorkerMetrics
from collectived_runtime.worker.observe.totals import LoopTotals
from collectived_runtime.worker.sessions import Sessions

WORKERS, GROUPS = 200, 50
FAILURES = tuple(code for code in Code if code)
ALGORITHMS = (*ACROSS_ALGORITHMS, "local", "direct", POINT_TO_POINT)
MOST_OF_A_WORKER = 8_000  # whatever its jobs do
USUAL_OF_A_WORKER = 970  # with 50 groups: five operations by three algorithms, and three ways to fail


class FakeGroupLoop:
    """As the totals read it."""

    def __init__(self, name: str, counters: Counters) -> None:
        self.counters = counters
        self.topology = SimpleNamespace(group=SimpleNamespace(name=name), idle=False)
        self.tracker = SimpleNamespace(list_open=list, progress={0: SimpleNamespace(has_departed=False)})
        self.pending_ops: list[Any] = []
        self.stall_after = 1.0

    def request_look(self, looked: Callable[[], None], stacks: bool) -> bool:
        return False  # its ranks do not meet in a segment

    def traffic(self) -> tuple[int, int]:
        return 1, 1


def counters(operations: int, algorithms: int, codes: int) -> Counters:
    made = Counters(done=1)
    for operation in list(OPERATIONS.values())[:operations]:
        made.waits[operation] = Histogram()
        for algorithm in ALGORITHMS[:algorithms]:
            made.totals[operation, algorithm] = OperationTotals()
            for code in FAILURES[:codes]:
                made.failures[operation, algorithm, code] = 1
    made.verdicts = {code: 1 for code in FAILURES[:codes]}
    return made


def worker(groups: int, one: Counters) -> WorkerMetrics:
    account = LoopTotals()
    for number in range(groups):
        account.add_loop(cast(Any, FakeGroupLoop(f"job/g{number}", one if number < GROUPS else Counters())))
    joins = Counter(granted=1, refused=1, withdrawn=1)
    membership = cast(
        Any, SimpleNamespace(connected=SimpleNamespace(is_set=lambda: True), welcome_count=1, heartbeat_count=2)
    )
    return WorkerMetrics(
        3,
        account,
        joins,
        Sessions(MemoryBudget(1)),
        MemoryBudget(1 << 20),
        membership,
        NetworkCounts(opened_links={"kept": 1}),
    )


def coordinator(workers: int, groups: int) -> CoordinatorMetrics:
    book = Registry(1, 5.0, 1.0)
    for task in range(workers):
        book.workers[task] = WorkerRecord(WorkerHello(task, "i", "host", 1), 0.0)
    members = tuple(Member(rank, "CPU:0", rank, "host", 1) for rank in range(workers))
    for number in range(groups):
        made = book.generations[number] = GenerationRecord(GroupInfo(f"job/g{number}", 7, number, members))
        for rank in range(workers):
            stragglers.update_wait_stats(made, rank, [RankPosition(rank, waits=1, waited_seconds=float(rank + 1))], 0.0)
    book.counts.verdicts = dict.fromkeys(map(int, FAILURES), 1)
    return CoordinatorMetrics(lambda: collect_metrics(book, 1.0))


def series(source: MetricsSource) -> Counter[str]:
    """How many there are of each metric; every one is listed with just these labels."""
    listed = WORKER_METRICS | COORDINATOR_METRICS | PROCESS_METRICS
    found: Counter[str] = Counter()
    seen = set()
    for reading in source.read():
        if reading is PAUSE:
            continue
        metric, samples = reading
        assert listed[metric.name] == metric
        for sample in samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in seen, "a series is told once"
            seen.add(key)
            found[metric.name] += 1
    return found


def test_series_of_200_workers_with_50_groups() -> None:
    one = series(worker(GROUPS, counters(5, 3, 3)))
    central = series(coordinator(WORKERS, GROUPS))
    assert one.total() <= USUAL_OF_A_WORKER + len(PROCESS_METRICS), one
    assert central["collectived_rank_lateness_seconds"] == stragglers.MAX_STRAGGLERS
    assert central.total() <= 2 * WORKERS + 3 * GROUPS + stragglers.MAX_STRAGGLERS + 50
    assert WORKERS * one.total() + central.total() <= 200_000
    assert (
        one.keys() <= (WORKER_METRICS | PROCESS_METRICS).keys()
        and central.keys() <= (COORDINATOR_METRICS | PROCESS_METRICS).keys()
    )


def test_every_metric_of_the_catalogue_is_told() -> None:
    assert series(worker(1, counters(1, 1, 1))).keys() == (WORKER_METRICS | PROCESS_METRICS).keys()
    assert series(coordinator(2, 1)).keys() == (COORDINATOR_METRICS | PROCESS_METRICS).keys()


def test_the_most_series_that_a_worker_may_tell_whatever_its_jobs_do() -> None:
    full = counters(len(OPERATIONS), len(ALGORITHMS), len(FAILURES))
    for operation, code in itertools.product(OPERATIONS.values(), FAILURES):
        full.failures[operation, NOT_STARTED, code] = 1
    many = series(worker(10 * labels.MAX_GROUP_LABELS, full))
    assert many.total() <= MOST_OF_A_WORKER, many
    assert many["collectived_ranks"] == labels.MAX_GROUP_LABELS + 1


def test_a_page_is_made_in_many_stretches() -> None:
    """How long one takes is measured by `benchmarks.scrape`; here: no group loop and no piece goes without a pause."""
    encode, _ = choose_encoder("")
    found = list(render_chunks(worker(GROUPS, counters(5, 3, 3)), encode))
    assert found[: GROUPS + 1] == [b""] * (GROUPS + 1), "one after each group loop"
    assert len(found) > GROUPS + len(WORKER_METRICS)
