"""What workers told of themselves when they last did, for the time in which they do not. Counts; nothing in flight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from collectived_proto.v1 import status_pb2 as pb

T = TypeVar("T")


class Recollection:
    """By worker its last account, by generation the largest counts that were told."""

    def __init__(self) -> None:
        self._accounts: dict[int, pb.WorkerStatus] = {}
        self._groups: dict[int, pb.GroupStatus] = {}

    def hear(self, task: int, account: pb.WorkerStatus) -> None:
        """Keeps it without its lanes, which would be old at once."""
        kept = pb.WorkerStatus()
        kept.CopyFrom(account)
        del kept.lanes[:]
        self._accounts[task] = kept

    def fill(self, reply: pb.StatusReply) -> None:
        """Puts in what is missing; forgets workers and generations that the reply does not have."""
        for worker in reply.workers:
            before = self._accounts.get(worker.task)
            if before is not None and not worker.release and before.incarnation == worker.incarnation:
                now = (worker.connected, worker.last_heartbeat_seconds, worker.silent)
                worker.MergeFrom(_without_lists(before))
                worker.connected, worker.last_heartbeat_seconds, worker.silent = now
        groups = {group.generation: group for group in reply.groups if group.generation}
        for generation, group in groups.items():
            counts = self._groups.setdefault(generation, pb.GroupStatus())
            for name in ("collectives_done", "collectives_failed", "bytes_reduced"):
                most = max(getattr(counts, name), getattr(group, name))
                setattr(counts, name, most)
                setattr(group, name, most)
        self._accounts = _kept(self._accounts, (worker.task for worker in reply.workers))
        self._groups = _kept(self._groups, groups)


def _without_lists(account: pb.WorkerStatus) -> pb.WorkerStatus:
    """Of which the devices are known from its hello."""
    kept = pb.WorkerStatus()
    kept.CopyFrom(account)
    del kept.devices[:]
    return kept


def _kept(known: dict[int, T], keys: Iterable[int]) -> dict[int, T]:
    return {key: known[key] for key in keys if key in known}
