"""What this worker tells of itself.

Running lanes are read without locks: numbers may be of slightly different moments.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from collectived_proto.codec import member_to_proto, tiers_to_proto
from collectived_proto.types import RELEASE
from collectived_proto.v1 import status_pb2 as pb
from collectived_runtime.engine.lane import Lane


@dataclass(frozen=True, slots=True)
class Identity:
    """What does not change while a worker lives."""

    task: int
    host: str
    incarnation: str
    devices: tuple[str, ...]
    address: str
    link_address: str
    started: float = field(default_factory=time.monotonic)


def worker_status(
    identity: Identity, lanes: list[Lane], *, connected: bool, sessions: int, arena_bytes: int, draining: bool = False
) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        task=identity.task,
        host=identity.host,
        pid=os.getpid(),
        incarnation=identity.incarnation,
        release=RELEASE,
        uptime_seconds=time.monotonic() - identity.started,
        devices=identity.devices,
        address=identity.address,
        link_address=identity.link_address,
        connected=connected,
        draining=draining,
        sessions=sessions,
        arena_bytes=arena_bytes,
        resident_bytes=resident_bytes(),
        threads=threading.active_count(),
        descriptors=len(os.listdir("/proc/self/fd")),
        lanes=[lane_status(lane) for lane in lanes],
    )


def resident_bytes() -> int:
    """Memory of this process that is not shared: what it costs beyond the arenas."""
    _, resident, shared = Path("/proc/self/statm").read_text().split()[:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


def lane_status(lane: Lane) -> pb.LaneStatus:
    now = time.monotonic()
    group, ledger, counters = lane.group, lane.ledger, lane.counters
    running = lane.running
    in_flight = []
    for instance in list(ledger.open()):
        here = running if running is not None and running.instance is instance else None
        collective = instance.collective
        in_flight.append(
            pb.InFlight(
                instance=instance.number,
                op=str(collective.operation),
                site=collective.site,
                seconds=now - instance.first.at,
                arrived=sorted(instance.arrivals),
                missing=ledger.missing(instance),
                bytes=sum(leaf.nbytes for leaf in collective.leaves),
                algorithm=here.program.algorithm if here else "",
            )
        )
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
    )
