"""The metrics of a worker, read when somebody asks; see `metrics.catalogue` for what each means."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from collectived_proto.errors import Code
from collectived_runtime.credentials import Door, Why
from collectived_runtime.engine.counters import BOUNDS
from collectived_runtime.engine.results import Budget
from collectived_runtime.limits.refusals import WORKER_LIMITS, Refusals
from collectived_runtime.metrics.catalogue import WORKER
from collectived_runtime.metrics.page import (
    PAUSE,
    Reading,
    build,
    excesses,
    histograms,
    malformed,
    numbers,
    process,
    refusals,
)
from collectived_runtime.worker.account import Account, Sum
from collectived_runtime.worker.membership import Membership
from collectived_runtime.worker.sessions import Sessions


class WorkerMetrics:
    """A `metrics.page.Source`.

    Args:
        task: of this worker.
        joins: that ended, by outcome.
        refused: callers that were turned away, as `Gate` counts them.
        refusals: what limits have refused, and what was malformed.
        links: that were opened, by how they came about.
    """

    def __init__(
        self,
        task: int,
        account: Account,
        joins: Mapping[str, int],
        sessions: Sessions,
        budget: Budget,
        membership: Membership,
        clock: Callable[[], float] = time.monotonic,
        refused: Mapping[tuple[Door, Why], int] = {},
        refusals: Refusals | None = None,
        links: Mapping[str, int] = {},
    ) -> None:
        self._links = links
        self._refusals = refusals or Refusals()
        self._me = str(task)
        self._account = account
        self._joins = joins
        self._sessions = sessions
        self._budget = budget
        self._membership = membership
        self._clock = clock
        self._refused = refused

    def read(self) -> Iterator[Reading | None]:
        total = Sum()
        for so_far in self._account.sums(self._clock()):
            total = so_far
            yield PAUSE
        yield build("worker")
        yield refusals("worker", self._refused)
        yield excesses("worker", self._refusals.limited, WORKER_LIMITS)
        yield malformed("worker", self._refusals.malformed)
        yield from self._collectives(total)
        yield from self._groups(total)
        yield from self._worker(total)
        yield from process()

    def _collectives(self, total: Sum) -> Iterator[Reading]:
        me, counters = self._me, total.counters
        done = (((me, *key, "ok"), float(sum(tally.lasted.counts))) for key, tally in counters.tallies.items())
        failed = (
            ((me, operation, algorithm, outcome(code)), float(count))
            for (operation, algorithm, code), count in counters.failures.items()
        )
        yield numbers(WORKER["collectived_collectives_total"], chain(done, failed))
        yield histograms(
            WORKER["collectived_collective_duration_seconds"],
            BOUNDS,
            (((me, *key), tally.lasted) for key, tally in counters.tallies.items()),
        )
        yield histograms(
            WORKER["collectived_collective_wait_seconds"],
            BOUNDS,
            (((me, operation), waits) for operation, waits in counters.waits.items()),
        )
        yield numbers(
            WORKER["collectived_payload_bytes_total"],
            (((me, *key), tally.nbytes) for key, tally in counters.tallies.items()),
        )
        yield self._one("collectived_folded_bytes_total", counters.folded_bytes)
        yield self._one("collectived_copied_bytes_total", counters.copied_bytes)

    def _groups(self, total: Sum) -> Iterator[Reading]:
        me, groups, flights = self._me, total.groups, total.flights
        done = (((me, label, "ok"), float(group.done)) for label, group in groups.items())
        failed = (((me, label, "failed"), float(group.failed)) for label, group in groups.items())
        yield numbers(WORKER["collectived_group_collectives_total"], chain(done, failed))
        yield self._by_group("collectived_group_in_flight", flights, "open")
        yield self._by_group("collectived_group_stalled", flights, "stalled")
        yield self._by_group("collectived_group_oldest_seconds", flights, "oldest")
        yield self._by_group("collectived_group_stalls_total", groups, "stalls")
        yield self._by_group("collectived_ranks", flights, "ranks")
        yield self._by_group("collectived_link_sent_bytes_total", groups, "sent")
        yield self._by_group("collectived_link_received_bytes_total", groups, "received")

    def _by_group(self, name: str, of: Mapping[str, object], field: str) -> Reading:
        return numbers(WORKER[name], (((self._me, label), float(getattr(one, field))) for label, one in of.items()))

    def _worker(self, total: Sum) -> Iterator[Reading]:
        me, membership = self._me, self._membership
        yield self._one("collectived_lanes", total.lanes)
        opened = (((me, how), float(count)) for how, count in self._links.items())
        yield numbers(WORKER["collectived_links_opened_total"], opened)
        verdicts = total.counters.verdicts.items()
        yield numbers(
            WORKER["collectived_verdicts_total"], (((me, outcome(code)), float(count)) for code, count in verdicts)
        )
        yield self._one("collectived_sessions", len(self._sessions))
        yield self._one("collectived_sessions_opened_total", self._sessions.opened)
        yield numbers(
            WORKER["collectived_joins_total"], (((me, how), float(count)) for how, count in self._joins.items())
        )
        yield self._one("collectived_arena_bytes", self._budget.used)
        yield self._one("collectived_arena_limit_bytes", self._budget.limit)
        yield self._one("collectived_coordinator_connected", membership.connected.is_set())
        yield self._one("collectived_coordinator_connections_total", membership.welcomes)
        yield self._one("collectived_heartbeats_total", membership.beats)

    def _one(self, name: str, value: float) -> Reading:
        return numbers(WORKER[name], [((self._me,), float(value))])


def outcome(code: int) -> str:
    """A code as a label: `deadline_exceeded`; one that is not known to this release is `unknown`."""
    try:
        return Code(code).name.lower()
    except ValueError:
        return "unknown"
