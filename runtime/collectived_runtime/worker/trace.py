"""What a worker tells of its past: the recorder's entries, and what is under way, in parts that travel.

Lanes and the recorder are read without locks and without asking anybody: a lane that hangs is no reason to wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from collectived_proto.v1 import trace_pb2 as pb
from collectived_runtime.engine.lane import Lane
from collectived_runtime.engine.ledger import Instance, Mark
from collectived_runtime.engine.posts import Post
from collectived_runtime.engine.recorder import NO_GIST, Entry, Gist, Label, MarkKind, Recorder
from collectived_runtime.worker.status import Identity

PART_BYTES = 256 << 10  # of the parts in which an answer travels
MOST_BYTES = 16 << 20  # of a whole answer


def worker_trace(
    identity: Identity, lanes: Iterable[Lane], recorder: Recorder, request: pb.TraceRequest
) -> Iterator[pb.WorkerTrace]:
    """The answer of this worker, part by part; what is under way first, then what has ended, newest first.

    Whatever of it is read is read here, at once; encoded is one part at a time.
    """
    now = time.monotonic()
    wanted = request.group
    living = [lane for lane in lanes if _is(wanted, lane.name, lane.topology.group.name)]
    told = _Told(living)
    since = now - request.last_seconds if request.last_seconds else 0.0
    ended = [entry for entry in recorder.entries() if entry.ended >= since and _is(wanted, entry.label.name)]
    under_way = [encode for lane in living for encode in _under_way(lane, told)]
    rest = [_ended(entry, told) for entry in reversed(ended)]
    return _parts(identity, now, chain(under_way, rest), len(under_way) + len(rest), told, request.most_bytes)


def _is(wanted: str, *names: str) -> bool:
    return not wanted or wanted in names


class _Told:
    """The lanes that an answer speaks of, by number, and which of them are still to be told."""

    def __init__(self, living: Iterable[Lane]) -> None:
        self._numbers: dict[Label, int] = {}
        self._new: list[pb.TraceLane] = []
        for lane in living:
            self._numbers[lane.label] = len(self._numbers)
            self._new.append(_living(lane))

    def number(self, label: Label) -> int:
        if label not in self._numbers:
            self._numbers[label] = len(self._numbers)
            self._new.append(_lane(label))
        return self._numbers[label]

    def news(self) -> list[pb.TraceLane]:
        new, self._new = self._new, []
        return new


_Encode = Callable[[], pb.TraceCollective]


def _parts(
    identity: Identity, now: float, collectives: Iterable[_Encode], count: int, told: _Told, most_bytes: int
) -> Iterator[pb.WorkerTrace]:
    most = min(most_bytes or MOST_BYTES, MOST_BYTES)
    part = pb.WorkerTrace(
        task=identity.task, host=identity.host, pid=os.getpid(), incarnation=identity.incarnation, now=now
    )
    filled = total = 0
    for encode in collectives:
        if total >= most:
            break
        collective = encode()
        part.collectives.append(collective)
        size = collective.ByteSize()
        filled, total, count = filled + size, total + size, count - 1
        if filled >= PART_BYTES:
            part.lanes.extend(told.news())
            yield part
            part, filled = pb.WorkerTrace(task=identity.task), 0
    part.lanes.extend(told.news())
    part.left_out, part.last = count, True
    yield part


def _lane(label: Label) -> pb.TraceLane:
    places = [pb.TracePlace(task=task, ranks=ranks) for task, ranks in zip(label.tasks, label.places, strict=False)]
    return pb.TraceLane(
        group=label.name, key=label.key, size=label.size, ranks=label.ranks, tasks=label.tasks, places=places
    )


def _living(lane: Lane) -> pb.TraceLane:
    told = _lane(lane.label)
    ledger = lane.ledger
    told.living, told.generation = True, ledger.generation
    members = lane.topology.group.members
    for rank, standing in list(ledger.standings.items()):
        member = members[rank]
        told.standings.add(
            rank=rank,
            submitted=standing.submitted,
            finished=standing.finished,
            last_op=standing.op,
            last_site=standing.site,
            active_at=standing.active_at,
            gone=standing.gone,
            host=member.host,
            pid=member.pid,
            label=member.label,
        )
    return told


def _under_way(lane: Lane, told: _Told) -> Iterator[_Encode]:
    number, ledger = told.number(lane.label), lane.ledger
    running = lane.running
    for instance in ledger.open():
        mine = running if running is not None and running.instance is instance else None
        gist = mine.program.gist if mine is not None else NO_GIST
        waits_for = mine.waited_for if mine is not None else ()
        yield _running(number, ledger.generation, instance, gist, ledger.missing(instance), waits_for)
    for post in lane.posts:
        yield _posted(number, ledger.generation, post)


def _running(
    lane: int, generation: int, instance: Instance, gist: Gist, missing: list[int], waits_for: tuple[int, ...]
) -> _Encode:
    came = list(instance.come.items())
    marks = list(instance.marks)
    started = instance.started_at

    def encode() -> pb.TraceCollective:
        told = pb.TraceCollective(
            lane=lane,
            generation=generation,
            instance=instance.number,
            op=instance.model.op if instance.model is not None else "",
            bytes=gist.nbytes or sum(leaf.nbytes for leaf in instance.collective.leaves),
            arrivals=[
                pb.TraceArrival(rank=rank, at=arrival.at, site=arrival.prepared.collective.site)
                for rank, arrival in came
            ],
            started=started,
            missing=missing,
            waits_for=waits_for,
        )
        _describe(told, gist, marks)
        return told

    return encode


def _posted(lane: int, generation: int, post: Post) -> _Encode:
    collective = post.prepared.collective
    arrival = pb.TraceArrival(rank=post.rank, at=post.since, site=collective.site)
    told = pb.TraceCollective(
        lane=lane,
        generation=generation,
        instance=post.number,
        op=post.prepared.op,
        bytes=sum(leaf.nbytes for leaf in collective.leaves),
        arrivals=[arrival],
        started=post.since,
        peer=post.other,
    )
    return lambda: told


def _ended(entry: Entry, told: _Told) -> _Encode:
    def encode() -> pb.TraceCollective:
        collective = pb.TraceCollective(
            lane=told.number(entry.label),
            generation=entry.generation,
            instance=entry.instance,
            op=entry.op,
            bytes=entry.gist.nbytes,
            arrivals=[
                pb.TraceArrival(rank=rank, at=at, site=site)
                for rank, at, site in zip(entry.ranks, entry.arrived, entry.sites, strict=True)
            ],
            started=entry.started,
            ended=entry.ended,
            code=entry.code,
            message=entry.message,
            missing=entry.missing,
            peer=entry.peer if entry.peer >= 0 else None,
        )
        _describe(collective, entry.gist, entry.marks)
        return collective

    return encode


def _describe(collective: pb.TraceCollective, gist: Gist, marks: Iterable[Mark]) -> None:
    collective.algorithm, collective.packs, collective.shards = gist.algorithm, gist.packs, gist.shards
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
    for flow in gist.traffic:
        collective.traffic.add(task=flow.task, sent=flow.sent, received=flow.received)
