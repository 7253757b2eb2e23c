"""The answer to `Status`: what the coordinator knows, merged with what each worker told of itself.

A *lane* is a group as one worker sees it; the lanes of a generation together are the group.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from collectived_proto import codec
from collectived_proto.lanes import flights, rates
from collectived_proto.protocol import OURS
from collectived_proto.shown import OVER
from collectived_proto.types import Verdict
from collectived_proto.v1 import status_pb2
from collectived_runtime.coordinator.snapshot import GroupView, PendingView, Snapshot, WorkerView

MOST_MEMBERS = 64  # of a failure, that are told


def status_reply(
    view: Snapshot,
    told: Mapping[int, status_pb2.WorkerStatus],
    unix_time: float,
    warnings: Iterable[str],
    silent: Container[int] = (),
) -> status_pb2.StatusReply:
    """Everything but `coordinator`, which describes the process.

    Args:
        told: by task, what workers have told of themselves. silent: those who were asked and have not.
    """
    lanes: dict[int, list[status_pb2.LaneStatus]] = {}
    for task in sorted(told):
        for lane in told[task].lanes:
            lanes.setdefault(lane.generation, []).append(lane)
    return status_pb2.StatusReply(
        unix_time=unix_time,
        workers=[
            worker_status(worker, told.get(worker.hello.task), worker.hello.task in silent) for worker in view.workers
        ],
        groups=[group_status(group, lanes.get(group.generation, [])) for group in view.groups],
        failures=[
            status_pb2.Failure(
                unix_time=unix_time - failure.seconds_ago, verdict=codec.verdict_to_proto(_in_short(failure.verdict))
            )
            for failure in view.failures
        ],
        warnings=warnings,
        answered_by="coordinator",
    )


def everybody_is_back(view: Snapshot) -> bool:
    """Whether every worker of a group that is not over is attached; after a restart that takes a moment."""
    here = {worker.hello.task for worker in view.workers if worker.connected}
    needed = {member.worker for group in view.groups if group.state not in OVER for member in group.members}
    return bool(here) and needed <= here


def _in_short(verdict: Verdict) -> Verdict:
    """Failures are many: of a group with thousands of ranks not each is told again with each of them."""
    return replace(
        verdict,
        missing=verdict.missing[:MOST_MEMBERS],
        differing=verdict.differing[:MOST_MEMBERS],
        members=verdict.members if len(verdict.members) <= MOST_MEMBERS else (),
    )


def coordinator_status(
    address: str, epoch: int, pid: int, uptime_seconds: float, job: str, insecure: bool
) -> status_pb2.CoordinatorStatus:
    return status_pb2.CoordinatorStatus(
        address=address,
        epoch=epoch,
        pid=pid,
        uptime_seconds=uptime_seconds,
        release=OURS.release,
        job=job,
        protocol=codec.versions_to_proto(OURS),
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


def group_status(group: GroupView, lanes: list[status_pb2.LaneStatus]) -> status_pb2.GroupStatus:
    """A group, with the counts and the members' last doings that its lanes tell."""
    members = [codec.member_to_proto(member) for member in group.members]
    if group.generation:
        for member in (member for lane in lanes for member in lane.members):
            if member.rank < len(members):
                entry = members[member.rank]
                entry.last_instance, entry.idle_seconds = member.last_instance, member.idle_seconds
                entry.last_op, entry.last_site = member.last_op, member.last_site
    # After a restart the coordinator does not know a table; the lanes do.
    table = codec.tiers_to_proto(group.table) or next((list(lane.table) for lane in lanes), [])
    return status_pb2.GroupStatus(
        name=group.name,
        key=group.key,
        generation=group.generation,
        state=group.state,
        size=group.size,
        members=members,
        left=[codec.member_to_proto(member) for member in group.left],
        collectives_done=max((lane.collectives_done for lane in lanes), default=0),
        collectives_failed=max((lane.collectives_failed for lane in lanes), default=0),
        bytes_reduced=sum(lane.bytes_reduced for lane in lanes),
        in_flight=flights(lanes, range(group.size), [_pending(one) for one in group.pending]),
        waiting_for=group.waiting_for,
        table=table,
        posts=[post for lane in lanes for post in lane.posts],
        notes=dict.fromkeys(note for lane in lanes for note in lane.notes),
        idle=group.idle,
        rates=rates(lanes),
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
