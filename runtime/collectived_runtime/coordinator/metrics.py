"""The metrics of the coordinator, read when somebody asks; see `metrics.catalogue` for what each means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from collectived_proto.errors import Code
from collectived_runtime.coordinator.census import Census, GroupCount
from collectived_runtime.credentials import Door, Why
from collectived_runtime.limits.refusals import COORDINATOR_LIMITS, Limit, Refusals, Where
from collectived_runtime.metrics import labels
from collectived_runtime.metrics.catalogue import COORDINATOR
from collectived_runtime.metrics.page import PAUSE, Reading, build, excesses, malformed, numbers, process, refusals


class CoordinatorMetrics:
    """A `metrics.page.Source`. `census` takes one of now, with pauses; `refused` are callers, as `Gate` counts them."""

    def __init__(
        self,
        census: Callable[[], Iterator[Census | None]],
        refused: Mapping[tuple[Door, Why], int] = {},
        refusals: Refusals | None = None,
    ) -> None:
        self._refusals = refusals or Refusals()
        self._census = census
        self._refused = refused

    def read(self) -> Iterator[Reading | None]:
        census: Census | None = None
        for found in self._census():
            census = found
            yield PAUSE
        assert census is not None
        yield build("coordinator")
        yield refusals("coordinator", self._refused)
        limited: dict[Limit, int] = {**self._refusals.limited, **census.counts.limited}
        yield excesses("coordinator", limited, COORDINATOR_LIMITS)
        yield malformed("coordinator", self._refusals.malformed, (Where.GRPC,))
        yield from _workers(census)
        yield from _counts(census)
        yield from _groups(census)
        yield from process()


def _workers(census: Census) -> Iterator[Reading]:
    workers = census.workers
    yield numbers(
        COORDINATOR["collectived_worker_connected"],
        (((str(worker.task),), float(worker.connected)) for worker in workers),
    )
    yield numbers(
        COORDINATOR["collectived_worker_silent_seconds"],
        (((str(worker.task),), worker.silent_seconds) for worker in workers),
    )


def _counts(census: Census) -> Iterator[Reading]:
    counts = census.counts
    yield _one("collectived_coordinator_worker_attached_total", counts.attached)
    yield _one("collectived_coordinator_worker_lost_total", counts.lost)
    yield _one("collectived_coordinator_heartbeats_total", counts.heartbeats)
    joins = (("granted", counts.granted), ("refused", counts.refused), ("withdrawn", counts.withdrawn))
    yield numbers(
        COORDINATOR["collectived_coordinator_joins_total"], (((outcome,), float(count)) for outcome, count in joins)
    )
    verdicts = counts.verdicts.items()
    yield numbers(
        COORDINATOR["collectived_coordinator_verdicts_total"],
        (((Code(code).name.lower(),), float(count)) for code, count in verdicts),
    )


def _groups(census: Census) -> Iterator[Reading]:
    states = (("forming", census.forming), ("running", len(census.groups)))
    yield numbers(COORDINATOR["collectived_coordinator_groups"], (((state,), float(count)) for state, count in states))
    yield _one("collectived_coordinator_joining_ranks", census.joining)
    label = labels.first([group.name for group in census.groups])
    merged: dict[str, GroupCount] = {}
    for group in census.groups:
        name = label[group.name]
        known = merged.get(name, GroupCount(name, 0, 0, 0.0))
        merged[name] = GroupCount(
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
        yield numbers(COORDINATOR[metric], (((name,), value) for name, value in values.items()))
    # Ranks of groups that share a label would be one series: the latest of them is told.
    late: dict[tuple[str, str, str], float] = {}
    for one in census.late:
        key = (label.get(one.group, labels.OTHER), str(one.rank), str(one.worker))
        late[key] = max(one.seconds, late.get(key, 0.0))
    yield numbers(COORDINATOR["collectived_rank_lateness_seconds"], late.items())


def _one(name: str, value: float) -> Reading:
    return numbers(COORDINATOR[name], [((), float(value))])
