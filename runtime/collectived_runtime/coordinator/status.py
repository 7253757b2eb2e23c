"""A snapshot: the coordinator's knowledge as values for readers; nothing in it changes afterwards.

The answer to `Status`: the coordinator's knowledge, merged with the status of each worker.

A *group loop* is a group as one worker sees it; the group loops of a generation together are the group.

The last status of workers, for the time in which they do not answer: counts, and nothing in flight.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from collectived_proto import codec
from collectived_proto.report.labels import ENDED_STATES
from collectived_proto.report.merge import merge_in_flight, merge_rates
from collectived_proto.types import Member, Tier, Verdict
from collectived_proto.v1 import status_pb2
from collectived_proto.v1 import status_pb2 as pb
from collectived_proto.version import OUR_VERSIONS
from collectived_runtime.coordinator.core import rendezvous, verdicts
from collectived_runtime.coordinator.core.events import WorkerHello
from collectived_runtime.coordinator.core.registry import Departure, FormingGroup, GenerationRecord, Registry

MAX_FINISHED_SHOWN = 16  # so many of the generations that are over


@dataclass(frozen=True, slots=True)
class WorkerView:
    hello: WorkerHello
    connected: bool
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class PendingView:
    """An instance that group loops have reported as waiting."""

    instance: int
    op: str
    site: str
    seconds: float
    arrived: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupView:
    name: str
    key: int
    generation: int
    state: str  # forming | ready | draining | failed | ended
    size: int
    members: tuple[Member, ...] = ()
    left: tuple[Member, ...] = ()
    pending: tuple[PendingView, ...] = ()
    waiting_for: str = ""
    table: tuple[Tier, ...] = ()
    idle: bool = False
    forming_seconds: float = 0.0
    min_size: int = 0  # while an elastic one forms


@dataclass(frozen=True, slots=True)
class FailureView:
    seconds_ago: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Snapshot:
    epoch: int
    workers: tuple[WorkerView, ...]
    groups: tuple[GroupView, ...]
    failures: tuple[FailureView, ...]  # latest first


def take_snapshot(registry: Registry, now: float) -> Snapshot:
    return Snapshot(
        registry.epoch,
        tuple(
            WorkerView(worker.hello, worker.connected, max(0.0, now - worker.last_seen_at))
            for _, worker in sorted(registry.workers.items())
        ),
        tuple(_groups(registry, now)),
        tuple(FailureView(now - failure.at, failure.verdict) for failure in registry.failures),
    )


def _groups(registry: Registry, now: float) -> Iterator[GroupView]:
    for forming in registry.forming.values():
        yield _forming_view(registry, forming, now)
    for generation in registry.generations.values():
        if not generation.is_over:
            yield _run_view(registry, generation, now)
    # Of what is over only the latest generation of each name, and of those the most recent.
    latest = (
        number for number in reversed(registry.finished_generations) if number in registry.latest_generations.values()
    )
    for number in islice(latest, MAX_FINISHED_SHOWN):
        yield _run_view(registry, registry.generations[number], now)


def _forming_view(registry: Registry, forming: FormingGroup, now: float) -> GroupView:
    # Ranks are given when all are here; until then those who named none are shown in the gaps.
    free = (rank for rank in range(forming.max_size) if rank not in forming.joins_by_rank)
    members = tuple(
        Member(next(free) if ask.rank is None else ask.rank, ask.device, task, ask.host, ask.pid, ask.label)
        for task, ask in ((waiting.task, waiting.ask) for waiting in forming.pending_joins.values())
    )
    text = rendezvous.describe_progress(registry, forming)
    return GroupView(
        forming.name,
        registry.keys.get(forming.name, 0),
        0,
        "forming",
        forming.max_size,
        members,
        waiting_for=text,
        forming_seconds=max(0.0, now - forming.since),
        min_size=forming.min_size if forming.min_size < forming.max_size else 0,
    )


def _run_view(registry: Registry, generation: GenerationRecord, now: float) -> GroupView:
    info = generation.info
    measuring = info.generation in registry.measurements
    state = "ended" if generation.has_ended else "failed" if generation.failed else "forming" if measuring else "ready"
    state = "draining" if state == "ready" and generation.drained_from is not None else state
    left = [rank for rank, how in sorted(generation.departed.items()) if how is not Departure.MOVED]
    pending = tuple(
        _pending_view(generation, instance, registry.stall_seconds, now) for instance in sorted(generation.evidence)
    )
    return GroupView(
        info.name,
        info.key,
        info.generation,
        state,
        info.size,
        generation.members(now),
        generation.members(now, left),
        pending,
        rendezvous.measuring_text(generation) if measuring else "",
        generation.table,
        generation.idle,
    )


def _pending_view(generation: GenerationRecord, instance: int, stall_seconds: float, now: float) -> PendingView:
    evidence = generation.evidence[instance]
    ranks = range(generation.info.size)
    arrived = tuple(rank for rank in ranks if generation.has_submitted(rank, instance))
    sites = (position.site for position in evidence.positions.values() if position.site)
    return PendingView(
        instance,
        verdicts.describe_operation(generation, instance),
        next(sites, ""),
        stall_seconds + max(0.0, now - evidence.since),
        arrived,
        tuple(rank for rank in ranks if rank not in arrived),
    )


def status_reply(
    view: Snapshot,
    told: Mapping[int, status_pb2.WorkerStatus],
    unix_time: float,
    warnings: Iterable[str],
    silent: Container[int] = (),
) -> status_pb2.StatusReply:
    """Everything but `coordinator`, which describes the process.

    Args:
        told: by task, the status of workers. silent: those that were asked and have not answered.
    """
    group_loops: dict[int, list[status_pb2.LaneStatus]] = {}
    for task in sorted(told):
        for group_loop in told[task].lanes:
            group_loops.setdefault(group_loop.generation, []).append(group_loop)
    return status_pb2.StatusReply(
        unix_time=unix_time,
        workers=[
            worker_status(worker, told.get(worker.hello.task), worker.hello.task in silent) for worker in view.workers
        ],
        groups=[group_status(group, group_loops.get(group.generation, [])) for group in view.groups],
        failures=[
            status_pb2.Failure(
                unix_time=unix_time - failure.seconds_ago,
                verdict=codec.verdict_to_proto(failure.verdict),
            )
            for failure in view.failures
        ],
        warnings=warnings,
        answered_by="coordinator",
    )


def is_every_worker_attached(view: Snapshot) -> bool:
    """Whether every worker of a group that is not over is attached; after a restart that takes a moment."""
    here = {worker.hello.task for worker in view.workers if worker.connected}
    needed = {member.worker for group in view.groups if group.state not in ENDED_STATES for member in group.members}
    return bool(here) and needed <= here


def coordinator_status(
    address: str, epoch: int, pid: int, uptime_seconds: float, job: str, insecure: bool
) -> status_pb2.CoordinatorStatus:
    return status_pb2.CoordinatorStatus(
        address=address,
        epoch=epoch,
        pid=pid,
        uptime_seconds=uptime_seconds,
        release=OUR_VERSIONS.release,
        job=job,
        protocol=codec.versions_to_proto(OUR_VERSIONS),
        insecure=insecure,
    )


def worker_status(
    worker: WorkerView, told: status_pb2.WorkerStatus | None, silent: bool = False
) -> status_pb2.WorkerStatus:
    """A worker by its own account, or by its hello where it gave none."""
    status = status_pb2.WorkerStatus()
    if told is not None:
        status.CopyFrom(told)
    hello = worker.hello
    status.task, status.incarnation = hello.task, hello.incarnation
    status.host, status.pid = status.host or hello.host, status.pid or hello.pid
    status.address, status.link_address = status.address or hello.address, status.link_address or hello.link_address
    if not status.devices:
        status.devices.extend(hello.devices)
    if not status.HasField("protocol"):
        status.protocol.CopyFrom(codec.versions_to_proto(hello.versions))
    status.connected, status.last_heartbeat_seconds = worker.connected, worker.silent_seconds
    status.silent = silent
    return status


def group_status(group: GroupView, group_loops: list[status_pb2.LaneStatus]) -> status_pb2.GroupStatus:
    """A group, with the counts and the members' last actions from its group loops."""
    members = [codec.member_to_proto(member) for member in group.members]
    if group.generation:
        for member in (member for group_loop in group_loops for member in group_loop.members):
            if member.rank < len(members):
                entry = members[member.rank]
                entry.last_instance, entry.idle_seconds = member.last_instance, member.idle_seconds
                entry.last_op, entry.last_site = member.last_op, member.last_site
                entry.stack = member.stack
    # After a restart the coordinator does not know a table; the group loops do.
    table = codec.tiers_to_proto(group.table) or next((list(group_loop.table) for group_loop in group_loops), [])
    return status_pb2.GroupStatus(
        name=group.name,
        key=group.key,
        generation=group.generation,
        state=group.state,
        size=group.size,
        members=members,
        left=[codec.member_to_proto(member) for member in group.left],
        collectives_done=max((group_loop.collectives_done for group_loop in group_loops), default=0),
        collectives_failed=max((group_loop.collectives_failed for group_loop in group_loops), default=0),
        bytes_reduced=sum(group_loop.bytes_reduced for group_loop in group_loops),
        in_flight=merge_in_flight(group_loops, range(group.size), [_pending(one) for one in group.pending]),
        waiting_for=group.waiting_for,
        table=table,
        posts=[post for group_loop in group_loops for post in group_loop.posts],
        notes=dict.fromkeys(note for group_loop in group_loops for note in group_loop.notes),
        idle=group.idle,
        rates=merge_rates(group_loops),
        forming_seconds=group.forming_seconds,
        min_size=group.min_size,
    )


def _pending(pending: PendingView) -> status_pb2.InFlight:
    return status_pb2.InFlight(
        instance=pending.instance,
        op=pending.op,
        site=pending.site,
        seconds=pending.seconds,
        arrived=pending.arrived,
    )


T = TypeVar("T")


class LastStatus:
    """By worker its last account, by generation the largest counts that were reported."""

    def __init__(self) -> None:
        self._statuses: dict[int, pb.WorkerStatus] = {}
        self._groups: dict[int, pb.GroupStatus] = {}

    def record(self, task: int, account: pb.WorkerStatus) -> None:
        """Keep it without its group loops, which would be old at once."""
        shown = pb.WorkerStatus()
        shown.CopyFrom(account)
        del shown.lanes[:]
        # Made anew: a message keeps the memory of what has been taken out of it, here of thousands of group loops.
        self._statuses[task] = pb.WorkerStatus.FromString(shown.SerializeToString())

    def fill(self, reply: pb.StatusReply) -> None:
        """Put in what is missing; forget workers and generations that the reply does not have."""
        for worker in reply.workers:
            before = self._statuses.get(worker.task)
            if before is not None and not worker.release and before.incarnation == worker.incarnation:
                now = (worker.connected, worker.last_heartbeat_seconds, worker.silent)
                worker.MergeFrom(_without_devices(before))
                worker.connected, worker.last_heartbeat_seconds, worker.silent = now
        groups = {group.generation: group for group in reply.groups if group.generation}
        for generation, group in groups.items():
            counts = self._groups.setdefault(generation, pb.GroupStatus())
            for name in ("collectives_done", "collectives_failed", "bytes_reduced"):
                most = max(getattr(counts, name), getattr(group, name))
                setattr(counts, name, most)
                setattr(group, name, most)
        self._statuses = _retain(self._statuses, (worker.task for worker in reply.workers))
        self._groups = _retain(self._groups, groups)


def _without_devices(account: pb.WorkerStatus) -> pb.WorkerStatus:
    """Return the hello without its devices, which are known."""
    kept = pb.WorkerStatus()
    kept.CopyFrom(account)
    del kept.devices[:]
    return kept


def _retain(known: dict[int, T], keys: Iterable[int]) -> dict[int, T]:
    return {key: known[key] for key in keys if key in known}
