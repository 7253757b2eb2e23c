"""Events of a trace from the reports of workers: arrivals, runs, moves of data, and missing ranks. Pure.

The form is the Trace Event Format's JSON object, which Perfetto and chrome://tracing show. One process per worker; in
it for each group a track per local rank, one for its group loop, and where data moves between workers one for packs
and one per direction and peer.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from collectived_launcher.trace.absences import Absence, find_absences
from collectived_launcher.trace.collect import CollectedTrace, TracedProcess
from collectived_launcher.trace.trace_events import Event, FlowEndpoint, Slice, TraceProcess, flow_events
from collectived_proto.errors import Code
from collectived_proto.report.phrases import peer_label
from collectived_proto.v1.trace_pb2 import TraceArrival, TraceCollective, TraceLane, TraceMark

_Flow = tuple[int, ...]  # group key, generation, instance, pack, shard, round, from, to
_Flows = dict[_Flow, list[FlowEndpoint | Slice]]
_BAD, _WAITING = "terrible", "bad"


class PerfettoTrace:
    """A trace, worker by worker, so that no more than one worker's slices are in memory. Its parts are made once.

    Attributes:
        metadata: `otherData`: what a reader must know of the whole.
        event_count, seconds: how many have been written, and from the first of them to the end of the last.
    """

    def __init__(self, account: CollectedTrace) -> None:
        self._account = account
        self._absences = find_absences(account)
        self._zero = min((_first_time(worker) for worker in account.workers.values()), default=0.0)
        self._zero = 0.0 if self._zero == math.inf else self._zero
        self.metadata = _metadata(account, self._absences, self._zero)
        self.event_count = 0
        self.seconds = 0.0

    @property
    def collective_count(self) -> int:
        """The number of reported collectives, each counted once, without sends and recvs."""
        return len(
            {
                (worker.group_loops[one.lane].key, one.generation, one.instance)
                for worker in self._account.workers.values()
                for one in worker.collectives
                if one.arrivals and not one.HasField("peer")
            }
        )

    def lines(self, on_worker: Callable[[], object] = lambda: None) -> Iterator[str]:
        """As JSON, one event a line, to be searched by line; `on_worker` is called after each worker's."""
        head = json.dumps({"displayTimeUnit": "ms", "otherData": self.metadata}, separators=(",", ":"))
        yield head[:-1] + ',"traceEvents":['
        for event in self._events(on_worker):
            yield (",\n" if self.event_count else "\n") + json.dumps(event, separators=(",", ":"))
            self.event_count += 1
            if event["ph"] == "X":
                self.seconds = max(self.seconds, (event["ts"] + event["dur"]) / 1e6)
        yield "\n]}\n"

    def _events(self, on_worker: Callable[[], object]) -> Iterator[Event]:
        flows: _Flows = {}
        for process in self._processes(flows):
            yield from process.events(self._zero)
            for ends in flows.values():
                ends[:] = [
                    FlowEndpoint(process.pid, one.tid, one.begin_ns, one.end_ns) if isinstance(one, Slice) else one
                    for one in ends
                ]
            on_worker()
        for number, (key, ends) in enumerate(sorted(flows.items()), 1):
            if len(ends) == 2:
                source, target = ends
                assert isinstance(source, FlowEndpoint) and isinstance(target, FlowEndpoint)
                yield from flow_events(number, f"{key[-2]} to {key[-1]}", source, target)

    def _processes(self, flows: _Flows) -> Iterator[TraceProcess]:
        workers, silent = self._account.workers, self._account.silent_workers
        elsewhere = {absence.task for absence in self._absences if absence.task is not None}
        for task in sorted(workers.keys() | silent.keys() | elsewhere):
            process = (
                _build_process(workers[task], flows) if task in workers else _silent_process(task, silent.get(task))
            )
            for absence in self._absences:
                if absence.task == task:
                    process.add_slice(_absence_slice(absence))
            yield process


def _first_time(worker: TracedProcess) -> float:
    """When its first reported event began, by the common clock; infinity where it reported none."""
    begun = (
        at
        for one in worker.collectives
        for at in (
            *(arrival.at for arrival in one.arrivals),
            *(mark.begin for mark in one.marks),
            one.started or math.inf,
        )
    )
    return min(begun, default=math.inf) + worker.clock_offset


def _build_process(worker: TracedProcess, flows: _Flows) -> TraceProcess:
    told = "" if worker.is_complete else "its answer is not complete"
    process = TraceProcess(worker.task, f"worker {worker.task}, {worker.host}, pid {worker.pid}", told)
    for group_loop in worker.group_loops:
        for rank in group_loop.ranks:
            process.add_track(_rank_track(group_loop.group, rank))
        process.add_track(_group_loop_track(group_loop.group))
    for collective in worker.collectives:
        _add_collective(process, worker, worker.group_loops[collective.lane], collective, flows)
    return process


def _silent_process(task: int, host: str | None) -> TraceProcess:
    return TraceProcess(task, f"worker {task}" if host is None else f"worker {task}, {host}: did not answer")


def _absence_slice(absence: Absence) -> Slice:
    return Slice(
        _rank_track(absence.group, absence.rank),
        absence.text,
        "absence",
        absence.since,
        absence.until,
        functools.partial(absence_args, absence),
        colour=_BAD,
    )


def _metadata(account: CollectedTrace, absent: list[Absence], zero: float) -> dict[str, Any]:
    """Describe the whole trace for its reader; `zero` is the time of the common clock that the trace calls 0."""
    return {
        "format": "collectived trace 1",
        "unix_time_of_zero": account.unix_time + zero - account.monotonic_time,
        "clock_error_seconds": account.clock_error,
        "workers": [
            {
                "task": worker.task,
                "host": worker.host,
                "pid": worker.pid,
                "clock_offset_seconds": worker.clock_offset,
                "clock_error_seconds": worker.clock.error_seconds,
                "clock_round_trip_seconds": worker.clock.round_trip_seconds,
                "clock_from": worker.clock.how,
                "collectives_left_out": worker.left_out,
                "whole": worker.is_complete,
            }
            for _, worker in sorted(account.workers.items())
        ],
        "missing_workers": [{"task": task, "host": host} for task, host in sorted(account.silent_workers.items())],
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
        "outcome": "lost" if absence.is_lost else "failed" if absence.code else "in flight",
    }
    if absence.last_state is not None:
        args |= {
            "host": absence.last_state.host,
            "pid": absence.last_state.pid,
            "label": absence.last_state.label,
            "last_op": absence.last_state.last_op,
            "last_site": absence.last_state.last_site,
            "last_instance": absence.last_state.finished,
        }
    return args


def _add_collective(
    process: TraceProcess,
    worker: TracedProcess,
    group_loop: TraceLane,
    collective: TraceCollective,
    flows: _Flows,
) -> None:
    shift = worker.clock_offset
    ended = (collective.ended or worker.now) + shift
    for arrival in collective.arrivals:
        process.add_slice(_rank_slice(group_loop, collective, arrival, shift, ended))
    if collective.started and not collective.HasField("peer"):
        started = collective.started + shift
        args = functools.partial(_group_loop_args, group_loop, collective)
        whole = Slice(_group_loop_track(group_loop.group), collective.op, "group", started, ended, args)
        if not collective.marks and collective.algorithm == "local":
            whole.children = [Slice(whole.track, "fold and answer", "fold", started, ended)]
        process.add_slice(whole)
    _add_marks(process, worker, group_loop, collective, flows)


def _rank_slice(
    group_loop: TraceLane,
    collective: TraceCollective,
    arrival: TraceArrival,
    shift: float,
    ended: float,
) -> Slice:
    arrived = arrival.at + shift
    args = functools.partial(_rank_args, group_loop, collective, arrival)
    piece = Slice(_rank_track(group_loop.group, arrival.rank), collective.op, "collective", arrived, ended, args)
    if collective.HasField("peer"):
        piece.category = "post"
        return piece
    started = collective.started + shift if collective.started else ended
    inner = []
    if started > arrived:
        last = functools.partial(_last_arrival_args, collective)
        inner.append(Slice(piece.track, "wait", "wait", arrived, started, last, colour=_WAITING))
    if collective.started:
        inner.append(Slice(piece.track, "run", "run", started, ended))
    piece.children = inner
    return piece


def _rank_args(group_loop: TraceLane, collective: TraceCollective, arrival: TraceArrival) -> dict[str, Any]:
    return _args(group_loop, collective) | {"rank": arrival.rank, "site": arrival.site}


def _group_loop_args(group_loop: TraceLane, collective: TraceCollective) -> dict[str, Any]:
    how = {"arrivals": [one.rank for one in collective.arrivals], "moved": _traffic_args(collective)}
    return _args(group_loop, collective) | how


def _last_arrival_args(collective: TraceCollective) -> dict[str, Any]:
    if collective.missing and not collective.ended:
        return {"local_ranks_not_arrived": list(collective.missing)}
    return {"last_to_arrive": max(collective.arrivals, key=lambda one: one.at).rank} if collective.arrivals else {}


def _args(group_loop: TraceLane, collective: TraceCollective) -> dict[str, Any]:
    args: dict[str, Any] = {
        "group": group_loop.group,
        "key": str(group_loop.key),
        "generation": str(collective.generation),
        "instance": collective.instance,
        "site": collective.arrivals[0].site if collective.arrivals else "",
        "bytes": collective.bytes,
        "outcome": _outcome(collective),
    }
    if collective.HasField("peer"):
        return args | {"peer": peer_label(collective.peer)}
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


def _traffic_args(collective: TraceCollective) -> list[dict[str, int]]:
    return [{"worker": one.task, "sent": one.sent, "received": one.received} for one in collective.traffic]


def _add_marks(
    process: TraceProcess,
    worker: TracedProcess,
    group_loop: TraceLane,
    collective: TraceCollective,
    flows: _Flows,
) -> None:
    tasks: dict[tuple[int, int], Slice] = {}
    folds: list[TraceMark] = []
    for mark in collective.marks:
        if mark.kind in (TraceMark.SEND, TraceMark.RECEIVE):
            piece = _move_slice(group_loop, collective, mark, worker.clock_offset)
            process.add_slice(piece)
            out = mark.kind == TraceMark.SEND
            ends = (worker.task, mark.task) if out else (mark.task, worker.task)
            key = (group_loop.key, collective.generation, collective.instance, mark.pack, mark.shard, mark.round, *ends)
            flows.setdefault(key, []).insert(0 if out else 1, piece)
        elif mark.kind == TraceMark.FOLD:
            folds.append(mark)
        else:
            name = f"pack {mark.pack} shard {mark.shard}" if mark.kind == TraceMark.STRAND else "prelude"
            piece = _mark_slice(group_loop, collective, mark, worker.clock_offset, name, "task")
            process.add_slice(piece)
            if mark.kind == TraceMark.STRAND:
                tasks[mark.pack, mark.shard] = piece
    for mark in folds:
        piece = _mark_slice(group_loop, collective, mark, worker.clock_offset, "fold", "fold")
        around = tasks.get((mark.pack, mark.shard))
        if around is None:
            process.add_slice(piece)
        else:
            around.children = [*around.children, piece]


def _mark_slice(
    group_loop: TraceLane, collective: TraceCollective, mark: TraceMark, shift: float, name: str, category: str
) -> Slice:
    args = functools.partial(_mark_args, collective, mark)
    return Slice(f"{group_loop.group}: packs", name, category, mark.begin + shift, mark.end + shift, args)


def _move_slice(group_loop: TraceLane, collective: TraceCollective, mark: TraceMark, shift: float) -> Slice:
    out = mark.kind == TraceMark.SEND
    track, name = _move_names(group_loop.group, out, mark.task)
    args = functools.partial(_move_args, collective, mark)
    return Slice(track, name, "move", mark.begin + shift, mark.end + shift, args)


@functools.cache
def _move_names(group: str, out: bool, task: int) -> tuple[str, str]:
    """Its track, and its own name."""
    if out:
        return f"{group}: to worker {task}", f"send to worker {task}"
    return f"{group}: from worker {task}", f"receive from worker {task}"


def _mark_args(collective: TraceCollective, mark: TraceMark) -> dict[str, Any]:
    return {"instance": collective.instance, "pack": mark.pack, "shard": mark.shard}


def _move_args(collective: TraceCollective, mark: TraceMark) -> dict[str, Any]:
    return _mark_args(collective, mark) | {"round": mark.round}


@functools.cache
def _rank_track(group: str, rank: int) -> str:
    return f"{group}: rank {rank}"


@functools.cache
def _group_loop_track(group: str) -> str:
    return f"{group}: worker"
