"""From what workers have told to the events of a trace: who arrived when, what ran, what moved, who was missing. Pure.

The form is the Trace Event Format's JSON object, which Perfetto and chrome://tracing show. One process per worker; in
it for each group a track per local rank, one for its lane, and where data moves between workers one for packs and one
per direction and peer.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from typing import Any

from collectived_launcher.trace.gather import Account, Worker
from collectived_launcher.trace.merge import Absence, absences
from collectived_launcher.trace.tracks import End, Event, Process, Slice, arrow
from collectived_proto.errors import Code
from collectived_proto.v1.trace_pb2 import TraceArrival, TraceCollective, TraceLane, TraceMark

_Flow = tuple[int, ...]  # group key, generation, instance, pack, shard, round, from, to
_Flows = dict[_Flow, list[End | Slice]]
_BAD, _WAITING = "terrible", "bad"


class Picture:
    """A trace, worker by worker, so that no more than one worker's slices are in memory. Its parts are made once.

    Attributes:
        about: `otherData`: what a reader must know of the whole.
        events, seconds: how many have been written, and from the first of them to the end of the last.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._absences = absences(account)
        self._zero = min((_first(worker) for worker in account.workers.values()), default=0.0)
        self._zero = 0.0 if self._zero == math.inf else self._zero
        self.about = _about(account, self._absences, self._zero)
        self.events = 0
        self.seconds = 0.0

    @property
    def collectives(self) -> int:
        """How many are told of, each counted once, without sends and recvs."""
        return len(
            {
                (worker.lanes[one.lane].key, one.generation, one.instance)
                for worker in self._account.workers.values()
                for one in worker.collectives
                if one.arrivals and not one.HasField("peer")
            }
        )

    def lines(self) -> Iterator[str]:
        """As JSON, one event a line, so that a trace can be searched by line."""
        head = json.dumps({"displayTimeUnit": "ms", "otherData": self.about}, separators=(",", ":"))
        yield head[:-1] + ',"traceEvents":['
        for event in self._events():
            yield (",\n" if self.events else "\n") + json.dumps(event, separators=(",", ":"))
            self.events += 1
            if event["ph"] == "X":
                self.seconds = max(self.seconds, (event["ts"] + event["dur"]) / 1e6)
        yield "\n]}\n"

    def _events(self) -> Iterator[Event]:
        flows: _Flows = {}
        for process in self._processes(flows):
            yield from process.events(self._zero)
            for ends in flows.values():
                ends[:] = [
                    End(process.pid, one.tid, one.first, one.last) if isinstance(one, Slice) else one for one in ends
                ]
        for number, (key, ends) in enumerate(sorted(flows.items()), 1):
            if len(ends) == 2:
                source, target = ends
                assert isinstance(source, End) and isinstance(target, End)
                yield from arrow(number, f"{key[-2]} to {key[-1]}", source, target)

    def _processes(self, flows: _Flows) -> Iterator[Process]:
        workers, silent = self._account.workers, self._account.silent
        elsewhere = {absence.task for absence in self._absences if absence.task is not None}
        for task in sorted(workers.keys() | silent.keys() | elsewhere):
            process = _process(workers[task], flows) if task in workers else _unheard(task, silent.get(task))
            for absence in self._absences:
                if absence.task == task:
                    process.add(_absence(absence))
            yield process


def _first(worker: Worker) -> float:
    """When the first of what it tells began, by the common clock; infinity where it tells nothing."""
    begun = (
        at
        for one in worker.collectives
        for at in (
            *(arrival.at for arrival in one.arrivals),
            *(mark.begin for mark in one.marks),
            one.started or math.inf,
        )
    )
    return min(begun, default=math.inf) + worker.shift


def _process(worker: Worker, flows: _Flows) -> Process:
    told = "" if worker.whole else "what it told is not all"
    process = Process(worker.task, f"worker {worker.task}, {worker.host}, pid {worker.pid}", told)
    for lane in worker.lanes:
        for rank in lane.ranks:
            process.track(_rank_track(lane.group, rank))
        process.track(_lane_track(lane.group))
    for collective in worker.collectives:
        _draw(process, worker, worker.lanes[collective.lane], collective, flows)
    return process


def _unheard(task: int, host: str | None) -> Process:
    return Process(task, f"worker {task}" if host is None else f"worker {task}, {host}: did not answer")


def _absence(absence: Absence) -> Slice:
    return Slice(
        _rank_track(absence.group, absence.rank),
        absence.text,
        "absence",
        absence.since,
        absence.until,
        functools.partial(absence_args, absence),
        colour=_BAD,
    )


def _about(account: Account, absent: list[Absence], zero: float) -> dict[str, Any]:
    """What a reader must know of the whole; `zero` is the time of the common clock that the trace calls 0."""
    return {
        "format": "collectived trace 1",
        "unix_time_of_zero": account.unix + zero - account.monotonic,
        "clock_error_seconds": account.error,
        "workers": [
            {
                "task": worker.task,
                "host": worker.host,
                "pid": worker.pid,
                "clock_offset_seconds": worker.shift,
                "clock_error_seconds": worker.clock.error_seconds,
                "clock_round_trip_seconds": worker.clock.round_trip_seconds,
                "clock_from": worker.clock.how,
                "collectives_left_out": worker.left_out,
                "whole": worker.whole,
            }
            for _, worker in sorted(account.workers.items())
        ],
        "missing_workers": [{"task": task, "host": host} for task, host in sorted(account.silent.items())],
        "absences": [absence_args(absence) for absence in absent],
        "warnings": list(account.warnings),
    }


def absence_args(absence: Absence) -> dict[str, Any]:
    key, generation, instance = absence.key
    args: dict[str, Any] = {
        "group": absence.group,
        "key": str(key),  # as text: many readers of JSON keep 53 bits of a number
        "generation": str(generation),
        "instance": instance,
        "op": absence.op,
        "site": absence.site,
        "rank": absence.rank,
        "text": absence.text,
        "worker": absence.task,
        "waiting_ranks": list(absence.waiting),
        "waited_seconds": round(absence.until - absence.since, 6),
        "outcome": "lost" if absence.lost else "failed" if absence.code else "in flight",
    }
    if absence.known is not None:
        args |= {
            "host": absence.known.host,
            "pid": absence.known.pid,
            "label": absence.known.label,
            "last_op": absence.known.last_op,
            "last_site": absence.known.last_site,
            "last_instance": absence.known.finished,
        }
    return args


def _draw(
    process: Process,
    worker: Worker,
    lane: TraceLane,
    collective: TraceCollective,
    flows: _Flows,
) -> None:
    shift = worker.shift
    ended = (collective.ended or worker.now) + shift
    for arrival in collective.arrivals:
        process.add(_of_rank(lane, collective, arrival, shift, ended))
    if collective.started and not collective.HasField("peer"):
        started = collective.started + shift
        args = functools.partial(_args_of_lane, lane, collective)
        whole = Slice(_lane_track(lane.group), collective.op, "lane", started, ended, args)
        if not collective.marks and collective.algorithm == "local":
            whole.inner = [Slice(whole.track, "fold and answer", "fold", started, ended)]
        process.add(whole)
    _draw_marks(process, worker, lane, collective, flows)


def _of_rank(
    lane: TraceLane,
    collective: TraceCollective,
    arrival: TraceArrival,
    shift: float,
    ended: float,
) -> Slice:
    arrived = arrival.at + shift
    args = functools.partial(_args_of_rank, lane, collective, arrival)
    piece = Slice(_rank_track(lane.group, arrival.rank), collective.op, "collective", arrived, ended, args)
    if collective.HasField("peer"):
        piece.category = "post"
        return piece
    started = collective.started + shift if collective.started else ended
    inner = []
    if started > arrived:
        last = functools.partial(_last, collective)
        inner.append(Slice(piece.track, "wait", "wait", arrived, started, last, colour=_WAITING))
    if collective.started:
        inner.append(Slice(piece.track, "run", "run", started, ended))
    piece.inner = inner
    return piece


def _args_of_rank(lane: TraceLane, collective: TraceCollective, arrival: TraceArrival) -> dict[str, Any]:
    return _args(lane, collective) | {"rank": arrival.rank, "site": arrival.site}


def _args_of_lane(lane: TraceLane, collective: TraceCollective) -> dict[str, Any]:
    how = {"arrivals": [one.rank for one in collective.arrivals], "moved": _moved(collective)}
    return _args(lane, collective) | how


def _last(collective: TraceCollective) -> dict[str, Any]:
    if collective.missing and not collective.ended:
        return {"local_ranks_not_arrived": list(collective.missing)}
    return {"last_to_arrive": max(collective.arrivals, key=lambda one: one.at).rank} if collective.arrivals else {}


def _args(lane: TraceLane, collective: TraceCollective) -> dict[str, Any]:
    args: dict[str, Any] = {
        "group": lane.group,
        "key": str(lane.key),
        "generation": str(collective.generation),
        "instance": collective.instance,
        "site": collective.arrivals[0].site if collective.arrivals else "",
        "bytes": collective.bytes,
        "outcome": _outcome(collective),
    }
    if collective.HasField("peer"):
        return args | {"peer": collective.peer}
    if collective.algorithm:
        args |= {"algorithm": collective.algorithm, "packs": collective.packs, "shards": collective.shards}
    if collective.code:
        args |= {"message": collective.message, "missing": list(collective.missing)}
    if collective.waits_for:
        args["waits_for_workers"] = list(collective.waits_for)
    return args


def _outcome(collective: TraceCollective) -> str:
    if not collective.ended:
        return "in flight"
    try:
        return Code(collective.code).name
    except ValueError:
        return f"code {collective.code}"


def _moved(collective: TraceCollective) -> list[dict[str, int]]:
    return [{"worker": one.task, "sent": one.sent, "received": one.received} for one in collective.traffic]


def _draw_marks(
    process: Process,
    worker: Worker,
    lane: TraceLane,
    collective: TraceCollective,
    flows: _Flows,
) -> None:
    strands: dict[tuple[int, int], Slice] = {}
    folds: list[TraceMark] = []
    for mark in collective.marks:
        if mark.kind in (TraceMark.SEND, TraceMark.RECEIVE):
            piece = _move(lane, collective, mark, worker.shift)
            process.add(piece)
            out = mark.kind == TraceMark.SEND
            ends = (worker.task, mark.task) if out else (mark.task, worker.task)
            key = (lane.key, collective.generation, collective.instance, mark.pack, mark.shard, mark.round, *ends)
            flows.setdefault(key, []).insert(0 if out else 1, piece)
        elif mark.kind == TraceMark.FOLD:
            folds.append(mark)
        else:
            name = f"pack {mark.pack} shard {mark.shard}" if mark.kind == TraceMark.STRAND else "prelude"
            piece = _interval(lane, collective, mark, worker.shift, name, "strand")
            process.add(piece)
            if mark.kind == TraceMark.STRAND:
                strands[mark.pack, mark.shard] = piece
    for mark in folds:
        piece = _interval(lane, collective, mark, worker.shift, "fold", "fold")
        around = strands.get((mark.pack, mark.shard))
        if around is None:
            process.add(piece)
        else:
            around.inner = [*around.inner, piece]


def _interval(
    lane: TraceLane, collective: TraceCollective, mark: TraceMark, shift: float, name: str, category: str
) -> Slice:
    args = functools.partial(_args_of_mark, collective, mark)
    return Slice(f"{lane.group}: packs", name, category, mark.begin + shift, mark.end + shift, args)


def _move(lane: TraceLane, collective: TraceCollective, mark: TraceMark, shift: float) -> Slice:
    out = mark.kind == TraceMark.SEND
    track, name = _names_of_move(lane.group, out, mark.task)
    args = functools.partial(_args_of_move, collective, mark)
    return Slice(track, name, "move", mark.begin + shift, mark.end + shift, args)


@functools.cache
def _names_of_move(group: str, out: bool, task: int) -> tuple[str, str]:
    """Of its track, and its own."""
    if out:
        return f"{group}: to worker {task}", f"send to worker {task}"
    return f"{group}: from worker {task}", f"receive from worker {task}"


def _args_of_mark(collective: TraceCollective, mark: TraceMark) -> dict[str, Any]:
    return {"instance": collective.instance, "pack": mark.pack, "shard": mark.shard}


def _args_of_move(collective: TraceCollective, mark: TraceMark) -> dict[str, Any]:
    return _args_of_mark(collective, mark) | {"round": mark.round}


@functools.cache
def _rank_track(group: str, rank: int) -> str:
    return f"{group}: rank {rank}"


@functools.cache
def _lane_track(group: str) -> str:
    return f"{group}: lane"
