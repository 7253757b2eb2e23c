"""The metrics of the coordinator, read at each request; see `metrics.catalogue` for their meaning.

A census: the counts of the coordinator, for metrics. It is cheaper than a snapshot, and has nothing of clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from collectived_proto.errors import Code
from collectived_proto.types import unscoped_name
from collectived_runtime.auth.credentials import RejectReason, Surface
from collectived_runtime.coordinator.core import stragglers
from collectived_runtime.coordinator.core.registry import Counts, GenerationRecord, Registry
from collectived_runtime.coordinator.core.stragglers import Straggler
from collectived_runtime.limits.rejections import COORDINATOR_LIMITS, Limit, MessageSource, RejectionCounters
from collectived_runtime.metrics import labels
from collectived_runtime.metrics.catalogue import COORDINATOR_METRICS
from collectived_runtime.metrics.page import (
    PAUSE,
    Reading,
    make_reading,
    read_auth_rejections,
    read_build_info,
    read_limit_refusals,
    read_malformed,
    read_process,
)


class CoordinatorMetrics:
    """A `MetricsSource`.

    `census` takes one of now, with pauses; `refused` are callers, as `TokenAuthenticator` counts them.
    """

    def __init__(
        self,
        census: Callable[[], Iterator[MetricsSnapshot | None]],
        refused: Mapping[tuple[Surface, RejectReason], int] = {},
        refusals: RejectionCounters | None = None,
    ) -> None:
        self._rejections = refusals or RejectionCounters()
        self._collect = census
        self._rejected_callers = refused

    def read(self) -> Iterator[Reading | None]:
        census: MetricsSnapshot | None = None
        for found in self._collect():
            census = found
            yield PAUSE
        assert census is not None
        yield read_build_info("coordinator")
        yield read_auth_rejections("coordinator", self._rejected_callers)
        limited: dict[Limit, int] = {**self._rejections.limit_counts, **census.counts.limited}
        yield read_limit_refusals("coordinator", limited, COORDINATOR_LIMITS)
        yield read_malformed("coordinator", self._rejections.malformed_counts, (MessageSource.GRPC,))
        yield from _workers(census)
        yield from _counts(census)
        yield from _groups(census)
        yield from read_process()


def _workers(census: MetricsSnapshot) -> Iterator[Reading]:
    workers = census.workers
    yield make_reading(
        COORDINATOR_METRICS["collectived_worker_connected"],
        (((str(worker.task),), float(worker.connected)) for worker in workers),
    )
    yield make_reading(
        COORDINATOR_METRICS["collectived_worker_silent_seconds"],
        (((str(worker.task),), worker.silent_seconds) for worker in workers),
    )


def _counts(census: MetricsSnapshot) -> Iterator[Reading]:
    counts = census.counts
    yield _one("collectived_coordinator_worker_attached_total", counts.attached)
    yield _one("collectived_coordinator_worker_lost_total", counts.lost)
    yield _one("collectived_coordinator_heartbeats_total", counts.heartbeats)
    joins = (("granted", counts.granted), ("refused", counts.refused), ("withdrawn", counts.withdrawn))
    yield make_reading(
        COORDINATOR_METRICS["collectived_coordinator_joins_total"],
        (((outcome,), float(count)) for outcome, count in joins),
    )
    verdicts = counts.verdicts.items()
    yield make_reading(
        COORDINATOR_METRICS["collectived_coordinator_verdicts_total"],
        (((Code(code).name.lower(),), float(count)) for code, count in verdicts),
    )


def _groups(census: MetricsSnapshot) -> Iterator[Reading]:
    states = (("forming", census.forming_groups), ("running", len(census.groups)))
    yield make_reading(
        COORDINATOR_METRICS["collectived_coordinator_groups"], (((state,), float(count)) for state, count in states)
    )
    yield _one("collectived_coordinator_joining_ranks", census.joining_ranks)
    label = labels.assign_labels([group.name for group in census.groups])
    merged: dict[str, GroupSample] = {}
    for group in census.groups:
        name = label[group.name]
        known = merged.get(name, GroupSample(name, 0, 0, 0.0))
        merged[name] = GroupSample(
            name,
            known.waiting + group.waiting,
            known.missing + group.missing,
            max(known.seconds, group.seconds),
        )
    for metric, values in (
        ("collectived_group_waiting", {name: float(group.waiting) for name, group in merged.items()}),
        ("collectived_group_waiting_seconds", {name: group.seconds for name, group in merged.items()}),
        ("collectived_group_missing_ranks", {name: float(group.missing) for name, group in merged.items()}),
    ):
        yield make_reading(COORDINATOR_METRICS[metric], (((name,), value) for name, value in values.items()))
    # Ranks of groups that share a label would be one series: the latest of them is shown.
    late: dict[tuple[str, str, str], float] = {}
    for one in census.stragglers:
        key = (label.get(one.group, labels.OTHER), str(one.rank), str(one.worker))
        late[key] = max(one.seconds, late.get(key, 0.0))
    yield make_reading(COORDINATOR_METRICS["collectived_rank_lateness_seconds"], late.items())


def _one(name: str, value: float) -> Reading:
    return make_reading(COORDINATOR_METRICS[name], [((), float(value))])


@dataclass(frozen=True, slots=True)
class WorkerSample:
    task: int
    connected: bool
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class GroupSample:
    """A group that runs: how many of its instances group loops have reported as waiting, for how many ranks the first
    one waits, and for how many seconds it has. None of a group in which waiting is normal."""

    name: str
    waiting: int
    missing: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """`joining_ranks` wait in `forming_groups`; `counts` go on growing."""

    workers: tuple[WorkerSample, ...]
    groups: tuple[GroupSample, ...]  # the oldest first
    forming_groups: int
    joining_ranks: int
    stragglers: tuple[Straggler, ...]
    counts: Counts


def collect_metrics(registry: Registry, now: float) -> Iterator[MetricsSnapshot | None]:
    """Take a census: None after each thing that needs some thinking, where others may go first; at last the census."""
    workers = tuple(
        WorkerSample(task, worker.connected, max(0.0, now - worker.last_seen_at))
        for task, worker in sorted(registry.workers.items())
    )
    yield None
    groups: list[GroupSample] = []
    late: list[Straggler] = []
    for _, generation in sorted(registry.generations.items()):
        if not generation.is_over and generation.info.generation not in registry.measurements:
            groups.append(_group(registry, generation, now))
            late = stragglers.select_worst([*late, *stragglers.find_stragglers(registry, generation, now)])
            yield None
    forming = len(registry.forming) + len(registry.measurements)
    joining = sum(len(forming.pending_joins) for forming in registry.forming.values())
    yield MetricsSnapshot(workers, tuple(groups), forming, joining, tuple(late), registry.counts)


def _group(registry: Registry, generation: GenerationRecord, now: float) -> GroupSample:
    name = unscoped_name(generation.info.name)
    if generation.idle or not generation.evidence:
        return GroupSample(name, 0, 0, 0.0)
    first = min(generation.evidence)
    waited = registry.stall_seconds + max(0.0, now - generation.evidence[first].since)
    return GroupSample(name, len(generation.evidence), len(generation.missing_ranks(first)), waited)
