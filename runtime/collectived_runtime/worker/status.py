"""What this worker tells of itself.

Running lanes are read without locks: numbers may be of slightly different moments.
"""

from __future__ import annotations

import asyncio
import os
import resource
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from collectived_proto.codec import member_to_proto, tiers_to_proto, versions_to_proto
from collectived_proto.protocol import OURS, Versions
from collectived_proto.types import GroupInfo
from collectived_proto.v1 import status_pb2 as pb
from collectived_runtime.engine.lane import Lane
from collectived_runtime.engine.ledger import Instance, Ledger
from collectived_runtime.engine.running import Running
from collectived_runtime.limits.refusals import Refusals

SLICE_SECONDS = 0.0005  # of Python at a stretch, as far as one lane does not take longer


@dataclass(frozen=True, slots=True)
class Identity:
    """What does not change while a worker lives."""

    task: int
    host: str
    incarnation: str
    devices: tuple[str, ...]
    address: str
    link_address: str
    gpus_missing: str = ""  # why GPUs that are there are not offered
    nccl: str = ""
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Standing:
    """What does change, beside its lanes. `clients` is what its clients speak."""

    connected: bool
    sessions: int
    clients: Sequence[Versions]
    arena_bytes: int
    arena_limit: int
    draining: bool = False
    refusals: Refusals = field(default_factory=Refusals)
    insecure: bool = False


async def worker_status(identity: Identity, lanes: Iterable[Lane], standing: Standing) -> pb.WorkerStatus:
    """In slices, so that neither lanes nor other calls wait for a worker of many groups to tell of all of them."""
    status = pb.WorkerStatus(
        task=identity.task,
        host=identity.host,
        pid=os.getpid(),
        incarnation=identity.incarnation,
        release=OURS.release,
        protocol=versions_to_proto(OURS),
        uptime_seconds=time.monotonic() - identity.started,
        devices=identity.devices,
        gpus_missing=identity.gpus_missing,
        address=identity.address,
        link_address=identity.link_address,
        nccl=identity.nccl,
        connected=standing.connected,
        sessions=standing.sessions,
        arena_bytes=standing.arena_bytes,
        arena_limit_bytes=standing.arena_limit,
        client_releases=sorted({client.release for client in standing.clients} - {""}),
        clients=map(versions_to_proto, standing.clients),
        draining=standing.draining,
        limits_met=limits_met(standing.refusals, time.monotonic()),
        insecure=standing.insecure,
        resident_bytes=resident_bytes(),
        threads=threading.active_count(),
        descriptors=len(os.listdir("/proc/self/fd")),
    )
    begun = time.monotonic()
    for lane in lanes:
        if time.monotonic() - begun > SLICE_SECONDS:
            await asyncio.sleep(0)
            begun = time.monotonic()
        status.lanes.append(lane_status(lane))
    return status


def limits_met(refusals: Refusals, now: float) -> list[pb.LimitMet]:
    """What limits have refused here, the latest first."""
    latest = sorted(list(refusals.latest.items()), key=lambda met: -met[1])
    return [
        pb.LimitMet(limit=limit, refused=refusals.limited[limit], last_seconds=max(0.0, now - at))
        for limit, at in latest
    ]


def resident_bytes() -> int:
    """Memory of this process that is not shared: what it costs beyond the arenas."""
    _, resident, shared = Path("/proc/self/statm").read_text().split()[:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


def lane_status(lane: Lane) -> pb.LaneStatus:
    now = time.monotonic()
    group, ledger, counters = lane.group, lane.ledger, lane.counters
    running = lane.running
    in_flight = [_in_flight(instance, ledger, running, now) for instance in list(ledger.open())]
    members = []
    for rank, standing in list(ledger.standings.items()):
        member = member_to_proto(group.members[rank])
        member.last_instance = standing.finished
        member.last_op, member.last_site = standing.op, standing.site
        member.idle_seconds = now - standing.active_at
        members.append(member)
    posts = [
        pb.PostInFlight(
            rank=post.rank,
            peer=post.other,
            tag=post.tag,
            op=post.prepared.op,
            site=post.prepared.collective.site,
            seconds=now - post.since,
            bytes=sum(leaf.nbytes for leaf in post.prepared.collective.leaves),
        )
        for post in lane.posts
    ]
    sent, received = lane.traffic()
    return pb.LaneStatus(
        group=group.name,
        key=group.key,
        generation=group.generation,
        ranks=lane.topology.ranks,
        collectives_done=counters.done,
        collectives_failed=counters.failed,
        bytes_reduced=counters.result_bytes,
        bytes_sent=sent,
        bytes_received=received,
        in_flight=in_flight,
        members=members,
        table=tiers_to_proto(lane.topology.table),
        posts=posts,
        notes=lane.notes,
        idle=lane.topology.idle,
        rates=lane.minute.rates(now),
    )


def _in_flight(instance: Instance, ledger: Ledger, running: Running | None, now: float) -> pb.InFlight:
    missing = ledger.missing(instance)
    here = running if running is not None and running.instance is instance else None
    flight = pb.InFlight(
        instance=instance.number,
        op=str(instance.collective.operation),
        site=instance.collective.site,
        seconds=now - instance.first.at,
        arrived=sorted(instance.come),
        missing=missing,
        bytes=sum(pack.count * pack.dtype.itemsize for pack in instance.first.prepared.layout.packs),
        state="running" if here else "arriving" if missing or instance.disputed else "queued",
    )
    if here is not None and here.then is None:  # else it is a stage before
        program = here.program
        flight.bytes = program.nbytes
        flight.algorithm = ", ".join(program.reasons)
        flight.why = "; ".join(dict.fromkeys(program.reasons.values()))
        flight.packs, flight.shards = len(program.strands_per_pack), program.shards
        flight.packs_done = flight.packs - here.packs_left
    return flight


def group_seen_from(lane: pb.LaneStatus, group: GroupInfo) -> pb.GroupStatus:
    """A group as far as one worker knows it, for answers without a coordinator: of other workers' ranks only where
    they are."""
    known = {member.rank: member for member in lane.members}
    return pb.GroupStatus(
        name=group.name,
        key=group.key,
        generation=lane.generation,
        state="partial",
        size=group.size,
        members=[known.get(member.rank) or member_to_proto(member) for member in group.members],
        collectives_done=lane.collectives_done,
        collectives_failed=lane.collectives_failed,
        bytes_reduced=lane.bytes_reduced,
        in_flight=lane.in_flight,
        table=lane.table,
        posts=lane.posts,
        notes=lane.notes,
        idle=lane.idle,
        rates=lane.rates,
    )
