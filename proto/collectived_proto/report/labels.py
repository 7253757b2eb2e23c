"""Words and numbers that `status`, `top` and the web page share, beside the findings. Pure."""

from __future__ import annotations

import enum
from dataclasses import replace

from collectived_proto.codec import versions_from_proto
from collectived_proto.v1 import common_pb2 as common
from collectived_proto.v1 import status_pb2 as pb
from collectived_proto.version import FIRST_VERSIONS, VersionRange

SLOW_SECONDS = 1.0  # in flight: what waits for longer is worth a word
STALLED_SECONDS = 5.0  # running: what takes longer although all ranks have come
ENDED_STATES = ("failed", "ended")  # states of groups


class WorkerState(enum.StrEnum):
    """How a worker stands with the coordinator; the worst first."""

    LOST = "lost"
    NOT_CONNECTED = "not connected"  # it answers for itself, and the coordinator does not count it
    SILENT = "silent"
    DRAINING = "draining"
    CONNECTED = "connected"


def worker_state(worker: pb.WorkerStatus) -> WorkerState:
    if not worker.connected:  # a worker that speaks for itself gives no age
        return WorkerState.LOST if worker.last_heartbeat_seconds else WorkerState.NOT_CONNECTED
    if worker.silent:
        return WorkerState.SILENT
    return WorkerState.DRAINING if worker.draining else WorkerState.CONNECTED


def has_reported(worker: pb.WorkerStatus) -> bool:
    """Whether it has ever given an account of itself; else its counts are unknown, and not 0."""
    return bool(worker.release)


def has_counts(reply: pb.StatusReply, group: pb.GroupStatus) -> bool:
    """Whether the counts of a group are known: some worker of it reports them, now or before."""
    if group.collectives_done or group.collectives_failed or group.state == "forming":
        return True
    answering = {worker.task for worker in reply.workers if has_reported(worker) and not worker.silent}
    return group.state not in ENDED_STATES and any(member.worker in answering for member in group.members)


def list_client_versions(worker: pb.WorkerStatus) -> list[VersionRange]:
    """Protocol versions of its clients; the first version where the worker reports only their releases."""
    if worker.clients:
        return [versions_from_proto(client) for client in worker.clients]
    return [replace(FIRST_VERSIONS, release=release) for release in worker.client_releases]


def rank_count(reply: pb.StatusReply) -> int:
    """Of the groups that are not over, without those that have left."""
    return sum(len(group.members) - len(group.left) for group in reply.groups if group.state not in ENDED_STATES)


def size_text(group: pb.GroupStatus) -> str:
    """`8`; while it forms `3 of 4 to 8`."""
    least = f"{group.min_size} to " if group.min_size else ""
    return f"{len(group.members)} of {least}{group.size}" if group.state == "forming" else str(group.size)


def is_late(group: pb.GroupStatus, flight: pb.InFlight) -> bool:
    """Whether it waits for ranks, or stands although all have come, for longer than is usual."""
    return not group.idle and flight.seconds > (SLOW_SECONDS if flight.missing else STALLED_SECONDS)


def is_late_p2p(group: pb.GroupStatus, post: pb.PostInFlight) -> bool:
    return not group.idle and post.seconds > SLOW_SECONDS


def finished_text(member: common.Member) -> str:
    """`#6`: the last instance that it has finished, which need not be its last call."""
    return f"#{member.last_instance}" if member.last_instance >= 0 else "nothing yet"
