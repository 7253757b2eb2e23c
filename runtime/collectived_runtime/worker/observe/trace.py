"""The trace of a worker: the recorder's entries, and collectives under way, in parts of limited size.

Group loops and the recorder are read without locks and without a question to another thread: a group loop that hangs is
no reason to wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from collectived_proto.v1 import trace_pb2 as pb
from collectived_runtime.engine.loop.group_loop import GroupLoop
from collectived_runtime.engine.p2p.pending_ops import PendingOp
from collectived_runtime.engine.record.flight_recorder import (
    EMPTY_SUMMARY,
    Entry,
    FlightRecorder,
    GroupLabel,
    MarkKind,
    ProgramSummary,
)
from collectived_runtime.engine.submit.tracker import Instance, Mark
from collectived_runtime.worker.observe.status import WorkerIdentity

PART_BYTES = 256 << 10  # of the parts in which an answer travels
MAX_TRACE_BYTES = 16 << 20  # of a whole answer


def worker_trace(
    identity: WorkerIdentity, group_loops: Iterable[GroupLoop], recorder: FlightRecorder, request: pb.TraceRequest
) -> Iterator[pb.WorkerTrace]:
    """The answer of this worker, part by part; collectives under way first, then those that have ended, newest first.

    Whatever of it is read is read here, at once; encoded is one part at a time.
    """
    now = time.monotonic()
    wanted = request.group
    living = [
        group_loop
        for group_loop in group_loops
        if _matches_group(wanted, group_loop.name, group_loop.topology.group.name)
    ]
    told = LoopTable(living)
    since = now - request.last_seconds if request.last_seconds else 0.0
    ended = [
        entry for entry in recorder.entries() if entry.ended_at >= since and _matches_group(wanted, entry.label.name)
    ]
    under_way = [encode for group_loop in living for encode in _in_flight_encoders(group_loop, told)]
    collectives = chain((encode() for encode in under_way), (_encode_entry(entry, told) for entry in reversed(ended)))
    return _split_parts(identity, now, collectives, len(under_way) + len(ended), told, request.most_bytes)


def _matches_group(wanted: str, *names: str) -> bool:
    return not wanted or wanted in names


class LoopTable:
    """The group loops that an answer speaks of, by number, and which of them are still to be described."""

    def __init__(self, living: Iterable[GroupLoop]) -> None:
        self._numbers: dict[GroupLabel, int] = {}
        self._unsent: list[pb.TraceLane] = []
        for group_loop in living:
            self._numbers[group_loop.label] = len(self._numbers)
            self._unsent.append(_encode_running_loop(group_loop))

    def number(self, label: GroupLabel) -> int:
        if label not in self._numbers:
            self._numbers[label] = len(self._numbers)
            self._unsent.append(_encode_loop(label))
        return self._numbers[label]

    def take_unsent(self) -> list[pb.TraceLane]:
        new, self._unsent = self._unsent, []
        return new


_Encode = Callable[[], pb.TraceCollective]


def _split_parts(
    identity: WorkerIdentity,
    now: float,
    collectives: Iterator[pb.TraceCollective],
    count: int,
    told: LoopTable,
    most_bytes: int,
) -> Iterator[pb.WorkerTrace]:
    most = min(most_bytes or MAX_TRACE_BYTES, MAX_TRACE_BYTES)
    part = pb.WorkerTrace(
        task=identity.task, host=identity.host, pid=os.getpid(), incarnation=identity.incarnation, now=now
    )
    filled = total = 0
    while total < most and (collective := next(collectives, None)) is not None:
        part.collectives.append(collective)
        size = collective.ByteSize()
        filled, total, count = filled + size, total + size, count - 1
        if filled >= PART_BYTES:
            part.lanes.extend(told.take_unsent())
            yield part
            part, filled = pb.WorkerTrace(task=identity.task), 0
    part.lanes.extend(told.take_unsent())
    part.left_out, part.last = count, True
    yield part


def _encode_loop(label: GroupLabel) -> pb.TraceLane:
    places = [pb.TracePlace(task=task, ranks=ranks) for task, ranks in zip(label.tasks, label.places, strict=False)]
    return pb.TraceLane(
        group=label.name, key=label.key, size=label.size, ranks=label.ranks, tasks=label.tasks, places=places
    )


def _encode_running_loop(group_loop: GroupLoop) -> pb.TraceLane:
    told = _encode_loop(group_loop.label)
    tracker = group_loop.tracker
    told.living, told.generation = True, tracker.generation
    members = group_loop.topology.group.members
    for rank, standing in list(tracker.progress.items()):
        member = members[rank]
        told.standings.add(
            rank=rank,
            submitted=standing.submitted,
            finished=standing.finished,
            last_op=standing.op,
            last_site=standing.site,
            active_at=standing.active_at,
            gone=standing.has_departed,
            host=member.host,
            pid=member.pid,
            label=member.label,
        )
    return told


def _in_flight_encoders(group_loop: GroupLoop, told: LoopTable) -> Iterator[_Encode]:
    number, tracker = told.number(group_loop.label), group_loop.tracker
    running = group_loop.execution
    for instance in tracker.list_open():
        mine = running if running is not None and running.instance is instance else None
        summary = mine.program.summary if mine is not None else EMPTY_SUMMARY
        waits_for = mine.awaited_peers if mine is not None else ()
        yield _instance_encoder(
            number, tracker.generation, instance, summary, tracker.missing_ranks(instance), waits_for
        )
    for post in group_loop.pending_ops:
        yield _pending_op_encoder(number, tracker.generation, post)


def _instance_encoder(
    group_loop: int,
    generation: int,
    instance: Instance,
    summary: ProgramSummary,
    missing: list[int],
    waits_for: tuple[int, ...],
) -> _Encode:
    came = list(instance.ready_arrivals.items())
    marks = list(instance.marks)
    started = instance.started_at

    def encode() -> pb.TraceCollective:
        told = pb.TraceCollective(
            lane=group_loop,
            generation=generation,
            instance=instance.number,
            op=instance.reference.op if instance.reference is not None else "",
            bytes=summary.nbytes or sum(leaf.nbytes for leaf in instance.collective.leaves),
            arrivals=[
                pb.TraceArrival(rank=rank, at=arrival.arrived_at, site=arrival.prepared.collective.site)
                for rank, arrival in came
            ],
            started=started,
            missing=missing,
            waits_for=waits_for,
        )
        _add_details(told, summary, marks)
        return told

    return encode


def _pending_op_encoder(group_loop: int, generation: int, post: PendingOp) -> _Encode:
    collective = post.prepared.collective
    arrival = pb.TraceArrival(rank=post.rank, at=post.submitted_at, site=collective.site)
    told = pb.TraceCollective(
        lane=group_loop,
        generation=generation,
        instance=post.number,
        op=post.prepared.op,
        bytes=sum(leaf.nbytes for leaf in collective.leaves),
        arrivals=[arrival],
        started=post.submitted_at,
        peer=post.peer,
    )
    return lambda: told


def _encode_entry(entry: Entry, told: LoopTable) -> pb.TraceCollective:
    collective = pb.TraceCollective(
        lane=told.number(entry.label),
        generation=entry.generation,
        instance=entry.instance,
        op=entry.op,
        bytes=entry.summary.nbytes,
        arrivals=[
            pb.TraceArrival(rank=rank, at=at, site=site)
            for rank, at, site in zip(entry.ranks, entry.arrival_times, entry.sites, strict=True)
        ],
        started=entry.started_at,
        ended=entry.ended_at,
        code=entry.code,
        message=entry.message,
        missing=entry.missing,
        peer=entry.peer if entry.peer >= 0 else None,
    )
    _add_details(collective, entry.summary, entry.marks)
    return collective


def _add_details(collective: pb.TraceCollective, summary: ProgramSummary, marks: Iterable[Mark]) -> None:
    collective.algorithm, collective.packs, collective.shards = summary.algorithm, summary.packs, summary.shards
    for kind, pack, shard, number, task, begin, end in list(marks):
        collective.marks.add(
            kind=MarkKind(kind).name,
            pack=pack,
            shard=shard,
            round=number,
            task=task if task >= 0 else None,
            begin=begin,
            end=end,
        )
    for flow in summary.traffic:
        collective.traffic.add(task=flow.task, sent=flow.sent, received=flow.received)
