"""The metrics of a worker, read at each request; see `metrics.catalogue` for their meaning."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from collectived_proto.errors import Code
from collectived_runtime.auth.credentials import RejectReason, Surface
from collectived_runtime.engine.base.memory_budget import MemoryBudget
from collectived_runtime.engine.record.counters import BOUNDS
from collectived_runtime.limits.rejections import WORKER_LIMITS, RejectionCounters
from collectived_runtime.metrics.catalogue import WORKER_METRICS
from collectived_runtime.metrics.page import (
    PAUSE,
    Reading,
    make_histogram_reading,
    make_reading,
    read_auth_rejections,
    read_build_info,
    read_limit_refusals,
    read_malformed,
    read_process,
)
from collectived_runtime.worker.coordinator_client import CoordinatorClient
from collectived_runtime.worker.observe.looks import PAUSE_SECONDS, LookRequest
from collectived_runtime.worker.observe.totals import LoopTotals, WorkerTotals
from collectived_runtime.worker.sessions import Sessions


@dataclass(frozen=True, slots=True)
class NetworkCounts:
    """The counts of connections and callers.

    Attributes:
        auth_rejections: callers that were turned away.
        rejections: what limits have refused, and what was malformed.
        opened_links: links of workers, by how they came about.
    """

    auth_rejections: Mapping[tuple[Surface, RejectReason], int] = field(default_factory=dict)
    rejections: RejectionCounters = field(default_factory=RejectionCounters)
    opened_links: Mapping[str, int] = field(default_factory=dict)


class WorkerMetrics:
    """The metrics of a worker, a `MetricsSource`.

    Args:
        task: of this worker.
        join_outcomes: joins that ended, by outcome.
    """

    def __init__(
        self,
        task: int,
        totals: LoopTotals,
        join_outcomes: Mapping[str, int],
        sessions: Sessions,
        budget: MemoryBudget,
        coordinator_client: CoordinatorClient,
        network: NetworkCounts,
    ) -> None:
        self._network = network
        self._task_label = str(task)
        self._totals = totals
        self._join_outcomes = join_outcomes
        self._sessions = sessions
        self._budget = budget
        self._coordinator_client = coordinator_client

    def read(self) -> Iterator[Reading | None]:
        request = LookRequest(self._totals.group_loops)
        while not request.is_over:
            time.sleep(PAUSE_SECONDS)  # so that the threads of group loops come to it
            yield PAUSE
        total = WorkerTotals()
        for so_far in self._totals.iterate_totals(time.monotonic()):
            total = so_far
            yield PAUSE
        yield read_build_info("worker")
        yield read_auth_rejections("worker", self._network.auth_rejections)
        yield read_limit_refusals("worker", self._network.rejections.limit_counts, WORKER_LIMITS)
        yield read_malformed("worker", self._network.rejections.malformed_counts)
        yield from self._read_collectives(total)
        yield from self._read_groups(total)
        yield from self._read_worker(total)
        yield from read_process()

    def _read_collectives(self, total: WorkerTotals) -> Iterator[Reading]:
        me, counters = self._task_label, total.counters
        done = (((me, *key, "ok"), float(sum(tally.durations.counts))) for key, tally in counters.totals.items())
        failed = (
            ((me, operation, algorithm, outcome_label(code)), float(count))
            for (operation, algorithm, code), count in counters.failures.items()
        )
        yield make_reading(WORKER_METRICS["collectived_collectives_total"], chain(done, failed))
        yield make_histogram_reading(
            WORKER_METRICS["collectived_collective_duration_seconds"],
            BOUNDS,
            (((me, *key), tally.durations) for key, tally in counters.totals.items()),
        )
        yield make_histogram_reading(
            WORKER_METRICS["collectived_collective_wait_seconds"],
            BOUNDS,
            (((me, operation), waits) for operation, waits in counters.waits.items()),
        )
        yield make_reading(
            WORKER_METRICS["collectived_payload_bytes_total"],
            (((me, *key), tally.nbytes) for key, tally in counters.totals.items()),
        )
        yield self._make_single_reading("collectived_folded_bytes_total", counters.folded_bytes)
        yield self._make_single_reading("collectived_copied_bytes_total", counters.copied_bytes)

    def _read_groups(self, total: WorkerTotals) -> Iterator[Reading]:
        me, groups, flights = self._task_label, total.groups, total.in_flight
        done = (((me, label, "ok"), float(group.done)) for label, group in groups.items())
        failed = (((me, label, "failed"), float(group.failed)) for label, group in groups.items())
        yield make_reading(WORKER_METRICS["collectived_group_collectives_total"], chain(done, failed))
        yield self._make_group_reading("collectived_group_in_flight", flights, "open")
        yield self._make_group_reading("collectived_group_stalled", flights, "stalled")
        yield self._make_group_reading("collectived_group_oldest_seconds", flights, "oldest")
        yield self._make_group_reading("collectived_group_stalls_total", groups, "stalls")
        yield self._make_group_reading("collectived_ranks", flights, "ranks")
        yield self._make_group_reading("collectived_link_sent_bytes_total", groups, "sent")
        yield self._make_group_reading("collectived_link_received_bytes_total", groups, "received")

    def _make_group_reading(self, name: str, of: Mapping[str, object], field: str) -> Reading:
        return make_reading(
            WORKER_METRICS[name], (((self._task_label, label), float(getattr(one, field))) for label, one in of.items())
        )

    def _read_worker(self, total: WorkerTotals) -> Iterator[Reading]:
        me, membership = self._task_label, self._coordinator_client
        yield self._make_single_reading("collectived_groups", total.group_loops)
        opened = (((me, how), float(count)) for how, count in self._network.opened_links.items())
        yield make_reading(WORKER_METRICS["collectived_links_opened_total"], opened)
        verdicts = total.counters.verdicts.items()
        yield make_reading(
            WORKER_METRICS["collectived_verdicts_total"],
            (((me, outcome_label(code)), float(count)) for code, count in verdicts),
        )
        yield self._make_single_reading("collectived_sessions", len(self._sessions))
        yield self._make_single_reading("collectived_sessions_opened_total", self._sessions.opened_count)
        yield make_reading(
            WORKER_METRICS["collectived_joins_total"],
            (((me, how), float(count)) for how, count in self._join_outcomes.items()),
        )
        self._budget.lent.settle()
        yield self._make_single_reading("collectived_arena_bytes", self._budget.used)
        yield self._make_single_reading("collectived_arena_limit_bytes", self._budget.limit)
        yield self._make_single_reading("collectived_coordinator_connected", membership.connected.is_set())
        yield self._make_single_reading("collectived_coordinator_connections_total", membership.welcome_count)
        yield self._make_single_reading("collectived_heartbeats_total", membership.heartbeat_count)

    def _make_single_reading(self, name: str, value: float) -> Reading:
        return make_reading(WORKER_METRICS[name], [((self._task_label,), float(value))])


def outcome_label(code: int) -> str:
    """A code as a label: "deadline_exceeded"; one that is not known to this release is `unknown`."""
    try:
        return Code(code).name.lower()
    except ValueError:
        return "unknown"
