"""The catalogue: every metric that a daemon shows, with its type, labels and meaning.

Names and units follow Prometheus: `_total` for what only grows, seconds and bytes without prefixes. Labels have few
values, whatever jobs do: operations, algorithms, outcomes and codes are finite sets, `worker` is a task number, `group`
one of at most `MAX_GROUP_LABELS` names or `other`, `rank` one of the `MAX_STRAGGLERS` latest. Never a generation, an
instance or a process. `make docs` makes the tables of docs/operate/metrics.md of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricType = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: MetricType
    labels: tuple[str, ...]
    help: str

    @property
    def family(self) -> str:
        """The name of its family, which for a counter has no `_total`."""
        return self.name.removesuffix("_total")


def _index_by_name(*metrics: Metric) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


BUILD = Metric(
    "collectived_build_info",
    "gauge",
    ("component", "version", "python"),
    "Always 1; the labels say which release runs.",
)
REFUSED = Metric(
    "collectived_refused_total",
    "counter",
    ("component", "protocol", "reason"),
    "Requests over grpc or http that were refused: without a credential, with a wrong one, or with a token that does "
    "not allow the call.",
)
LIMITED = Metric(
    "collectived_limit_refusals_total",
    "counter",
    ("component", "limit"),
    "Requests that were refused because a limit was reached, by limit.",
)
MALFORMED = Metric(
    "collectived_malformed_total",
    "counter",
    ("component", "where"),
    "Malformed messages and failed proofs, which were refused; by place.",
)
COMMON_METRICS = (BUILD, REFUSED, LIMITED, MALFORMED)

_GROUP_LABELS = ("worker", "group")

WORKER_METRICS = _index_by_name(
    *COMMON_METRICS,
    Metric(
        "collectived_collectives_total",
        "counter",
        ("worker", "operation", "algorithm", "outcome"),
        "Collectives, sends and receives that ended, by outcome: ok, or the code of the verdict.",
    ),
    Metric(
        "collectived_collective_duration_seconds",
        "histogram",
        ("worker", "operation", "algorithm"),
        "From the submission by the first rank of this worker to the result; successful collectives only. Algorithm "
        "segment: of the lowest rank; between two looks of the worker each counts as their mean.",
    ),
    Metric(
        "collectived_collective_wait_seconds",
        "histogram",
        ("worker", "operation"),
        "How long the first rank of this worker waited for the last one of this worker.",
    ),
    Metric(
        "collectived_payload_bytes_total",
        "counter",
        ("worker", "operation", "algorithm"),
        "Bytes of the values of successful collectives, each counted once on this worker.",
    ),
    Metric("collectived_folded_bytes_total", "counter", ("worker",), "Bytes read by folds of local ranks."),
    Metric(
        "collectived_copied_bytes_total",
        "counter",
        ("worker",),
        "Bytes of local ranks that were copied although they could be read in place.",
    ),
    Metric(
        "collectived_group_collectives_total",
        "counter",
        ("worker", "group", "outcome"),
        "Collectives of a group that ended, by outcome: ok or failed; without sends and receives.",
    ),
    Metric(
        "collectived_group_in_flight",
        "gauge",
        _GROUP_LABELS,
        "Collectives, sends and receives in flight.",
    ),
    Metric(
        "collectived_group_stalled",
        "gauge",
        _GROUP_LABELS,
        "Those in flight that have waited for longer than --stall-after; not in groups joined with idle=True.",
    ),
    Metric(
        "collectived_group_oldest_seconds",
        "gauge",
        _GROUP_LABELS,
        "Age of the oldest one in flight; 0 without any, and for groups joined with idle=True.",
    ),
    Metric(
        "collectived_group_stalls_total",
        "counter",
        _GROUP_LABELS,
        "Collectives, sends and receives that have waited for longer than --stall-after, each counted once.",
    ),
    Metric(
        "collectived_link_sent_bytes_total",
        "counter",
        _GROUP_LABELS,
        "Bytes sent to other workers, headers included; not those that ranks send to each other themselves.",
    ),
    Metric(
        "collectived_link_received_bytes_total",
        "counter",
        _GROUP_LABELS,
        "Bytes received from other workers, headers included; not those that ranks send to each other themselves.",
    ),
    Metric(
        "collectived_links_opened_total",
        "counter",
        ("worker", "how"),
        "Links with other workers: dialled, accepted, or kept from an earlier generation.",
    ),
    Metric("collectived_ranks", "gauge", _GROUP_LABELS, "Local ranks that have not left."),
    Metric("collectived_groups", "gauge", ("worker",), "Groups with a rank here; one thread each."),
    Metric(
        "collectived_verdicts_total",
        "counter",
        ("worker", "code"),
        "Verdicts about groups of this worker, by code; ranks that left in order are not counted.",
    ),
    Metric("collectived_sessions", "gauge", ("worker",), "Connected clients."),
    Metric("collectived_sessions_opened_total", "counter", ("worker",), "Clients that have connected since the start."),
    Metric(
        "collectived_joins_total",
        "counter",
        ("worker", "outcome"),
        "Joins of local clients that ended: granted, refused or withdrawn.",
    ),
    Metric(
        "collectived_arena_bytes", "gauge", ("worker",), "Shared memory in use, for inputs of clients and for results."
    ),
    Metric(
        "collectived_arena_limit_bytes",
        "gauge",
        ("worker",),
        "Limit of the shared memory (--memory-limit).",
    ),
    Metric(
        "collectived_coordinator_connected", "gauge", ("worker",), "1 while the coordinator can be reached, else 0."
    ),
    Metric(
        "collectived_coordinator_connections_total",
        "counter",
        ("worker",),
        "Connections to the coordinator; 1 if the connection was never lost.",
    ),
    Metric("collectived_heartbeats_total", "counter", ("worker",), "Heartbeats sent to the coordinator."),
)

COORDINATOR_METRICS = _index_by_name(
    *COMMON_METRICS,
    Metric(
        "collectived_worker_connected",
        "gauge",
        ("worker",),
        "1 while the worker's stream is connected, 0 while it is broken; removed when the worker is given up.",
    ),
    Metric("collectived_worker_silent_seconds", "gauge", ("worker",), "Seconds since the last message of the worker."),
    Metric(
        "collectived_coordinator_worker_attached_total",
        "counter",
        (),
        "Workers that attached, for the first time or again.",
    ),
    Metric(
        "collectived_coordinator_worker_lost_total",
        "counter",
        (),
        "Workers that were given up: killed, silent or unreachable for two heartbeat intervals; not those that ended "
        "in order.",
    ),
    Metric("collectived_coordinator_heartbeats_total", "counter", (), "Heartbeats of all workers."),
    Metric(
        "collectived_coordinator_groups",
        "gauge",
        ("state",),
        "Groups: forming (ranks are missing, or links are measured) or running.",
    ),
    Metric("collectived_coordinator_joining_ranks", "gauge", (), "Ranks that wait in forming groups."),
    Metric(
        "collectived_coordinator_joins_total",
        "counter",
        ("outcome",),
        "Joins that ended: granted, refused or withdrawn.",
    ),
    Metric(
        "collectived_coordinator_verdicts_total",
        "counter",
        ("code",),
        "Groups that failed, by the code of the verdict; each generation is counted once.",
    ),
    Metric(
        "collectived_group_waiting",
        "gauge",
        ("group",),
        "Collectives that workers have reported as waiting for longer than --stall-after; not in groups joined with "
        "idle=True.",
    ),
    Metric("collectived_group_waiting_seconds", "gauge", ("group",), "How long the first of these has waited."),
    Metric(
        "collectived_group_missing_ranks", "gauge", ("group",), "Number of ranks for which the first of these waits."
    ),
    Metric(
        "collectived_rank_lateness_seconds",
        "gauge",
        ("group", "rank", "worker"),
        "How much later a rank arrives than the earliest of its group, on average per collective between its last two "
        "heartbeats, or how long others have been waiting for it now; of the 32 latest ranks.",
    ),
)

# Metrics of the Prometheus client library about any process; on Linux alone, as all of this.
PROCESS_METRICS = _index_by_name(
    Metric("process_cpu_seconds_total", "counter", (), "Processor time, user and system."),
    Metric("process_resident_memory_bytes", "gauge", (), "Memory in use, including touched shared memory."),
    Metric("process_virtual_memory_bytes", "gauge", (), "Address space."),
    Metric("process_start_time_seconds", "gauge", (), "Start time of the process, since 1970."),
    Metric("process_open_fds", "gauge", (), "Open descriptors."),
    Metric("process_max_fds", "gauge", (), "Limit of open descriptors."),
)
