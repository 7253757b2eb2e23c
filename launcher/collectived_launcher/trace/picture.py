"""From what workers have told to the events of a trace: who arrived when, what ran, what moved, who was missing. Pure.

The form is the Trace Event Format's JSON object, which Perfetto and chrome://tracing show. One process per worker; in
it for each group a track per local rank, one for its lane, and where data moves between workers one for packs and one
per direction and peer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from collectived_launcher.trace.gather import Account, Worker
from collectived_launcher.trace.merge import Absence, absences
from collectived_launcher.trace.tracks import Event, Process, Slice, arrow
from collectived_proto.errors import Code
from collectived_proto.v1.trace_pb2 import TraceArrival, TraceCollective, TraceLane, TraceMark

_Flow = tuple[int, ...]  # group key, generation, instance, pack, shard, round, from, to
_BAD, _WAITING = "terrible", "bad"


def picture(account: Account) -> dict[str, Any]:
    """The whole trace, ready for `json`."""
    processes, flows = _processes(account)
    zero = _zero(processes)
    events: list[Event] = []
    for process in processes.values():
        events.extend(process.events(zero))
    for number, (key, ends) in enumerate(sorted(flows.items()), 1):
        if len(ends) == 2:
            events.extend(arrow(number, f"{key[-2]} to {key[-1]}", ends[0], ends[1]))
    return {"displayTimeUnit": "ms", "otherData": about(account, zero), "traceEvents": events}


def about(account: Account, zero: float) -> dict[str, Any]:
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
        "absences": [absence_args(absence) for absence in absences(account)],
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


def _zero(processes: dict[int, Process]) -> float:
    return min((piece.begin for process in processes.values() for piece in process.slices), default=0.0)


def _processes(account: Account) -> tuple[dict[int, Process], dict[_Flow, list[tuple[int, Slice]]]]:
    flows: dict[_Flow, list[tuple[int, Slice]]] = {}
    processes: dict[int, Process] = {}
    for task, worker in sorted(account.workers.items()):
        told = "" if worker.whole else "what it told is not all"
        processes[task] = process = Process(task, f"worker {task}, {worker.host}, pid {worker.pid}", told)
        for lane in worker.lanes:
            for rank in lane.ranks:
                process.track(_rank_track(lane.group, rank))
            process.track(_lane_track(lane.group))
        for collective in worker.collectives:
            _draw(process, worker, worker.lanes[collective.lane], collective, flows)
    for task, host in account.silent.items():
        processes.setdefault(task, Process(task, f"worker {task}, {host}: did not answer"))
    for absence in absences(account):
        if absence.task is None:
            continue
        process = processes.setdefault(absence.task, Process(absence.task, f"worker {absence.task}"))
        process.add(
            Slice(
                _rank_track(absence.group, absence.rank),
                absence.text,
                "absence",
                absence.since,
                absence.until,
                absence_args(absence),
                colour=_BAD,
            )
        )
    return processes, flows


def _draw(
    process: Process,
    worker: Worker,
    lane: TraceLane,
    collective: TraceCollective,
    flows: dict[_Flow, list[tuple[int, Slice]]],
) -> None:
    shift = worker.shift
    ended = (collective.ended or worker.now) + shift
    args = _args(lane, collective)
    for arrival in collective.arrivals:
        process.add(_of_rank(lane, collective, arrival, args, shift, ended))
    if collective.started and not collective.HasField("peer"):
        started = collective.started + shift
        how = {"arrivals": [one.rank for one in collective.arrivals], "moved": _moved(collective)}
        whole = Slice(_lane_track(lane.group), collective.op, "lane", started, ended, args | how)
        if not collective.marks and collective.algorithm == "local":
            whole.inner.append(Slice(whole.track, "fold and answer", "fold", started, ended))
        process.add(whole)
    _draw_marks(process, worker, lane, collective, flows)


def _of_rank(
    lane: TraceLane,
    collective: TraceCollective,
    arrival: TraceArrival,
    args: dict[str, Any],
    shift: float,
    ended: float,
) -> Slice:
    arrived = arrival.at + shift
    own = args | {"rank": arrival.rank, "site": arrival.site}
    piece = Slice(_rank_track(lane.group, arrival.rank), collective.op, "collective", arrived, ended, own)
    if collective.HasField("peer"):
        piece.category = "post"
        return piece
    started = collective.started + shift if collective.started else ended
    if started > arrived:
        waits = Slice(piece.track, "wait", "wait", arrived, started, _last(collective), colour=_WAITING)
        piece.inner.append(waits)
    if collective.started:
        piece.inner.append(Slice(piece.track, "run", "run", started, ended))
    return piece


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
    flows: dict[_Flow, list[tuple[int, Slice]]],
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
            flows.setdefault(key, []).insert(0 if out else 1, (worker.task, piece))
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
            around.inner.append(piece)


def _interval(
    lane: TraceLane, collective: TraceCollective, mark: TraceMark, shift: float, name: str, category: str
) -> Slice:
    args = {"instance": collective.instance, "pack": mark.pack, "shard": mark.shard}
    return Slice(f"{lane.group}: packs", name, category, mark.begin + shift, mark.end + shift, args)


def _move(lane: TraceLane, collective: TraceCollective, mark: TraceMark, shift: float) -> Slice:
    out = mark.kind == TraceMark.SEND
    track = f"{lane.group}: {'to' if out else 'from'} worker {mark.task}"
    name = f"{'send to' if out else 'receive from'} worker {mark.task}"
    args = {"instance": collective.instance, "pack": mark.pack, "shard": mark.shard, "round": mark.round}
    return Slice(track, name, "move", mark.begin + shift, mark.end + shift, args)


def _rank_track(group: str, rank: int) -> str:
    return f"{group}: rank {rank}"


def _lane_track(group: str) -> str:
    return f"{group}: lane"


def span(trace: dict[str, Any]) -> float:
    """Seconds from the first to the last of what is shown."""
    ends = (event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X")
    return max(ends, default=0.0) / 1e6


def lines(trace: dict[str, Any]) -> Iterator[str]:
    """As JSON, one event a line, so that a trace can be searched by line."""
    head = {key: value for key, value in trace.items() if key != "traceEvents"}
    yield json.dumps(head, separators=(",", ":"))[:-1] + ',"traceEvents":[\n'
    events = trace["traceEvents"]
    for number, event in enumerate(events):
        yield json.dumps(event, separators=(",", ":")) + (",\n" if number + 1 < len(events) else "\n")
    yield "]}\n"
