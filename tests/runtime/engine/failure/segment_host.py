"""A worker's side of a group whose ranks meet in a segment, without a group loop."""

from __future__ import annotations

import os
import socket
import time
from functools import partial

import numpy as np

from collectived_native import core, segment
from collectived_native.segment import Geometry
from collectived_proto.devices import DeviceName
from collectived_proto.ipc import messages
from collectived_proto.types import (
    AllReduce,
    Barrier,
    Collective,
    DType,
    GroupInfo,
    Leaf,
    Member,
    Operation,
    Peer,
    ReduceOp,
    Report,
    Tier,
)
from collectived_runtime.engine.base.lent import MemoryUser
from collectived_runtime.engine.base.memory_budget import MemoryBudget, SessionBudget
from collectived_runtime.engine.base.poller import Poller
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.compile.negotiation import prepare
from collectived_runtime.engine.failure.reporter import CoordinatorAccess, FaultReporter
from collectived_runtime.engine.failure.segment_watch import SegmentWatch
from collectived_runtime.engine.failure.spanning_watch import SpanningWatch
from collectived_runtime.engine.record.counters import Counters
from collectived_runtime.engine.record.flight_recorder import (
    FlightRecorder,
    GroupLabel,
    GroupRecorder,
)
from collectived_runtime.engine.record.group_records import GroupRecords
from collectived_runtime.engine.record.rates import RateWindow
from collectived_runtime.engine.submit.tracker import InstanceTracker
from collectived_runtime.limits.rejections import RejectionCounters

SUMS, BARRIERS = 5, 6  # numbers of descriptions; those of rank 1 are larger by 10
COUNT = 1000
MIB = 1 << 20
SESSION_LIMIT = 100 * MIB


def _make_member(rank: int, task: int) -> Member:
    return Member(rank, str(DeviceName(task, "CPU", 0)), task, f"host{task}", 1000 + rank)


class Host:
    """A worker's side of a group, of which it has the first two ranks, and those ranks' ends of their doorbells."""

    def __init__(self, tasks: tuple[int, ...] = (0, 0)) -> None:
        """`tasks`: the worker of each rank."""
        group = GroupInfo("world", 7, 100, tuple(_make_member(rank, task) for rank, task in enumerate(tasks)))
        members = group.members[:2]
        peers = tuple(
            Peer(task, "i", f"host{task}", "127.0.0.1:1", tuple(r for r, of in enumerate(tasks) if of == task), 0)
            for task in sorted(set(tasks))
        )
        self.topology = GroupTopology.from_peers(group, peers, 0, (Tier("ring"),), False)
        self.poller = Poller()
        self.doorbells = Doorbells(self.poller, lambda _, __: None, lambda _, __: None, RejectionCounters())
        self.counters, self.rates = Counters(), RateWindow(time.monotonic())
        label = GroupLabel("world", 7, 2, (0, 1), (0,))
        self.recorder = FlightRecorder()
        self.records = GroupRecords(self.counters, self.rates, GroupRecorder(self.recorder, label))
        self.reports: list[Report] = []
        self.ends: list[socket.socket] = []
        self.budget = MemoryBudget(1 << 30)
        self.user = MemoryUser()
        self.sessions: list[SessionBudget] = []
        self.submitted: list[tuple[int, int]] = []  # rank and instance
        self.ended: list[int] = []  # ranks whose sessions have written too much
        for member in members:
            session = SessionBudget(self.budget, SESSION_LIMIT, user=self.user)
            session.expel = partial(self.ended.append, member.rank)
            self.sessions.append(session)
            local_rank = LocalRank(member.rank, member, lambda *_: np.zeros(0, np.uint8), -1, holder=session)
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            local_rank.attach_doorbell(theirs)
            self.ends.append(mine)
            self.doorbells.local_ranks[member.rank] = local_rank
            leaf = Leaf("", DType.FLOAT32, (COUNT,))
            self.describe(local_rank, SUMS, AllReduce(ReduceOp.SUM), (leaf,))
            self.describe(local_rank, BARRIERS, Barrier(), ())
        self.watch, self.tracker = self.begin(100, 0)

    def describe(self, local_rank: LocalRank, number: int, operation: Operation, leaves: tuple[Leaf, ...]) -> None:
        collective = Collective(operation, "*" if leaves else "", leaves, site=f"train.py:{number}")
        prepared = prepare(collective, local_rank.rank, self.topology)
        local_rank.prepared[number + 10 * local_rank.rank] = prepared

    def begin(self, generation: int, start: int) -> tuple[SegmentWatch, InstanceTracker]:
        tracker = InstanceTracker(7, generation, (0, 1), 60.0, time.monotonic(), start)
        coordinator = CoordinatorAccess(self.reports.append)
        reporter = FaultReporter(self.topology, tracker, "worker 0", coordinator, lambda _: None)
        parts = self.poller, tracker, reporter, self.doorbells, self.records, self.budget
        if len(self.topology.peers) == 1:
            return SegmentWatch(*parts), tracker
        return SpanningWatch(*parts, self.submit), tracker

    def submit(self, local_rank: LocalRank, submission: messages.Submit) -> None:
        """What the group loop does with a submission over the doorbell."""
        self.submitted.append((local_rank.rank, submission.instance))
        self.tracker.progress[local_rank.rank].received = submission.instance

    def attach(self, rank: int) -> core.Engine:
        """Take the seat that this rank is offered."""
        self.watch.offer(self.doorbells.local_ranks[rank])
        _, knockers, _, _ = socket.recv_fds(self.ends[rank], messages.MAX_MESSAGE, 1)
        data, memories, _, _ = socket.recv_fds(self.ends[rank], messages.MAX_MESSAGE, 1)
        offer = messages.parse_segment(data)
        engine = segment.attach(memories[0], Geometry.decode(offer.geometry), offer.seat)
        for descriptor in (*knockers, *memories):
            os.close(descriptor)
        return engine

    def close(self) -> None:
        self.doorbells.close()
        for end in self.ends:
            end.close()
        self.poller.close()
