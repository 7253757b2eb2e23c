"""The status of this worker.

Running group loops are read without locks: numbers may be of slightly different moments.
"""

from __future__ import annotations

import asyncio
import os
import resource
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from collectived_proto.codec import member_to_proto, tiers_to_proto, versions_to_proto
from collectived_proto.types import GroupInfo
from collectived_proto.v1 import status_pb2 as pb
from collectived_proto.version import OUR_VERSIONS, VersionRange
from collectived_runtime.engine.loop.execution import Execution
from collectived_runtime.engine.loop.group_loop import GroupLoop
from collectived_runtime.engine.submit.tracker import Instance, InstanceTracker
from collectived_runtime.limits.rejections import RejectionCounters
from collectived_runtime.worker.observe.looks import look

SLICE_SECONDS = 0.0005  # of Python at a stretch, as far as one group loop does not take longer


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The part of a status that does not change while a worker lives."""

    task: int
    host: str
    incarnation: str
    devices: tuple[str, ...]
    address: str
    link_address: str
    gpus_missing: str = ""  # why GPUs that are there are not offered
    nccl_description: str = ""
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """The part that does change, beside its group loops. `client_versions`: the versions that its clients speak."""

    connected: bool
    sessions: int
    client_versions: Sequence[VersionRange]
    arena_bytes: int
    arena_limit: int
    retained_bytes: int = 0
    draining: bool = False
    rejections: RejectionCounters = field(default_factory=RejectionCounters)
    insecure: bool = False


async def worker_status(
    identity: WorkerIdentity, group_loops: Collection[GroupLoop], standing: WorkerCounts
) -> pb.WorkerStatus:
    """Build the status in slices, so that neither group loops nor other calls wait for many groups."""
    await look(group_loops, stacks=True)
    status = pb.WorkerStatus(
        task=identity.task,
        host=identity.host,
        pid=os.getpid(),
        incarnation=identity.incarnation,
        release=OUR_VERSIONS.release,
        protocol=versions_to_proto(OUR_VERSIONS),
        uptime_seconds=time.monotonic() - identity.started,
        devices=identity.devices,
        gpus_missing=identity.gpus_missing,
        address=identity.address,
        link_address=identity.link_address,
        nccl=identity.nccl_description,
        connected=standing.connected,
        sessions=standing.sessions,
        arena_bytes=standing.arena_bytes,
        retained_bytes=standing.retained_bytes,
        arena_limit_bytes=standing.arena_limit,
        client_releases=sorted({client.release for client in standing.client_versions} - {""}),
        clients=map(versions_to_proto, standing.client_versions),
        draining=standing.draining,
        limits_met=limits_met(standing.rejections, time.monotonic()),
        insecure=standing.insecure,
        resident_bytes=resident_bytes(),
        threads=threading.active_count(),
        descriptors=len(os.listdir("/proc/self/fd")),
    )
    begun = time.monotonic()
    for group_loop in group_loops:
        if time.monotonic() - begun > SLICE_SECONDS:
            await asyncio.sleep(0)
            begun = time.monotonic()
        status.lanes.append(make_loop_status(group_loop))
    return status


def limits_met(refusals: RejectionCounters, now: float) -> list[pb.LimitMet]:
    """Return what limits have refused here, the latest first."""
    latest = sorted(list(refusals.last_limited.items()), key=lambda met: -met[1])
    return [
        pb.LimitMet(limit=limit, refused=refusals.limit_counts[limit], last_seconds=max(0.0, now - at))
        for limit, at in latest
    ]


def resident_bytes() -> int:
    """Memory of this process that is not shared: what it costs beyond the arenas."""
    _, resident, shared = Path("/proc/self/statm").read_text().split()[:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


def make_loop_status(group_loop: GroupLoop) -> pb.LaneStatus:
    now = time.monotonic()
    group, tracker, counters = group_loop.group, group_loop.tracker, group_loop.counters
    running = group_loop.execution
    open_instances = list(tracker.list_open())
    in_flight = [_in_flight(instance, tracker, running, now) for instance in open_instances]
    members, awaited = [], tracker.awaited_ranks()
    for rank, standing in list(tracker.progress.items()):
        member = member_to_proto(group.members[rank])
        member.last_instance = standing.finished
        member.last_op, member.last_site = standing.op, standing.site
        member.idle_seconds = now - standing.active_at
        member.stack = standing.current_stack if rank in awaited else ""
        members.append(member)
    posts = [
        pb.PostInFlight(
            rank=post.rank,
            peer=post.peer,
            tag=post.tag,
            op=post.prepared.op,
            site=post.prepared.collective.site,
            seconds=max(0.0, now - post.submitted_at),  # it may have come since `now`
            bytes=sum(leaf.nbytes for leaf in post.prepared.collective.leaves),
        )
        for post in group_loop.pending_ops
    ]
    sent, received = group_loop.traffic()
    return pb.LaneStatus(
        group=group.name,
        key=group.key,
        generation=group.generation,
        ranks=group_loop.topology.own_ranks,
        collectives_done=counters.done,
        collectives_failed=counters.failed,
        bytes_reduced=counters.result_bytes,
        bytes_sent=sent,
        bytes_received=received,
        in_flight=in_flight,
        members=members,
        table=tiers_to_proto(group_loop.topology.tuning_table),
        posts=posts,
        notes=group_loop.notes,
        idle=group_loop.topology.idle,
        rates=group_loop.rate_window.rates(now, _find_pending(open_instances, tracker)),
    )


def _find_pending(open_instances: Sequence[Instance], tracker: InstanceTracker) -> tuple[str, float] | None:
    """The first collective that waits for ranks, and since when; for those of other workers, once it has for long."""
    for instance in open_instances:
        if tracker.missing_ranks(instance) or instance.stalled:
            return str(instance.collective.operation).partition("(")[0], instance.first_arrival.arrived_at
    return None


def _in_flight(instance: Instance, tracker: InstanceTracker, running: Execution | None, now: float) -> pb.InFlight:
    missing = tracker.missing_ranks(instance)
    here = running if running is not None and running.instance is instance else None
    flight = pb.InFlight(
        instance=instance.number,
        op=str(instance.collective.operation),
        site=instance.collective.site,
        seconds=max(0.0, now - instance.first_arrival.arrived_at),  # the same
        arrived=sorted(instance.ready_arrivals),
        missing=missing,
        bytes=sum(pack.count * pack.dtype.itemsize for pack in instance.first_arrival.prepared.layout.packs),
        state="running" if here else "arriving" if missing or instance.is_barred else "queued",
    )
    if here is not None and not here.is_prelude:
        program = here.program
        flight.bytes = program.summary.nbytes
        flight.algorithm = ", ".join(program.reasons)
        flight.why = "; ".join(dict.fromkeys(program.reasons.values()))
        flight.packs, flight.shards = len(program.tasks_per_pack), program.max_shards
        flight.packs_done = flight.packs - here.packs_left
    return flight


def make_partial_group_status(group_loop: pb.LaneStatus, group: GroupInfo) -> pb.GroupStatus:
    """A group as far as one worker knows it, for answers without a coordinator: of other workers' ranks only where
    they are."""
    known = {member.rank: member for member in group_loop.members}
    return pb.GroupStatus(
        name=group.name,
        key=group.key,
        generation=group_loop.generation,
        state="partial",
        size=group.size,
        members=[known.get(member.rank) or member_to_proto(member) for member in group.members],
        collectives_done=group_loop.collectives_done,
        collectives_failed=group_loop.collectives_failed,
        bytes_reduced=group_loop.bytes_reduced,
        in_flight=group_loop.in_flight,
        table=group_loop.table,
        posts=group_loop.posts,
        notes=group_loop.notes,
        idle=group_loop.idle,
        rates=group_loop.rates,
    )
