"""Traces of all workers, gathered for a request: parts are passed on as they come, and no worker is waited for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

from collectived_proto.v1 import coordinator_pb2, trace_pb2
from collectived_runtime import clock_sync

PART_TIMEOUT_SECONDS = 1.5  # in which a worker must send its next part
MAX_TOTAL_BYTES = 64 << 20  # of all answers to one question
MIN_WORKER_BYTES = 16 << 10  # of each, however many there are
MAX_WORKER_BYTES = 16 << 20


@dataclass(slots=True)
class TracedWorker:
    """A connected worker as traces need it.

    Attributes:
        clock_name: as its hello says. clock: the coordinator's clock by its latest heartbeat, and when that
            came, by this clock.
    """

    task: int
    host: str
    clock_name: str
    send: Callable[[coordinator_pb2.CoordinatorMessage], None]
    clock: trace_pb2.WorkerClock | None = None
    clock_at: float = 0.0


@dataclass(slots=True)
class _PendingTrace:
    workers: Mapping[int, TracedWorker]
    parts: asyncio.Queue[trace_pb2.WorkerTrace] = field(default_factory=asyncio.Queue)
    deadlines: dict[int, float] = field(default_factory=dict)  # by worker, when its next part must have come
    started: set[int] = field(default_factory=set)


class TraceCollector:
    """Runs in the event loop."""

    def __init__(self) -> None:
        self._pending: dict[int, _PendingTrace] = {}
        self._request_count = 0
        self._clock_name = clock_sync.clock_id()

    async def gather(
        self, request: trace_pb2.TraceRequest, workers: Mapping[int, TracedWorker]
    ) -> AsyncGenerator[trace_pb2.TraceReply, None]:
        """The answer to a request: at once the time, then parts as they come, then the silent workers."""
        now = time.monotonic()
        yield trace_pb2.TraceReply(time=trace_pb2.TraceTime(unix=time.time(), monotonic=now))
        if request.local_only:
            yield trace_pb2.TraceReply(last=True, warnings=["the coordinator alone was asked, which records nothing"])
            return
        self._request_count += 1
        number, gathering = self._request_count, _PendingTrace(workers)
        self._pending[number] = gathering
        question = _limit_bytes(request, len(workers))
        silent: list[int] = []
        try:
            for task, worker in workers.items():
                now = time.monotonic()
                gathering.deadlines[task] = now + PART_TIMEOUT_SECONDS
                ask = coordinator_pb2.AskTrace(trace=number, request=question, at=now)
                worker.send(coordinator_pb2.CoordinatorMessage(ask_trace=ask))
            while gathering.deadlines or not gathering.parts.empty():
                part = await self._next(gathering)
                if part is not None:
                    yield trace_pb2.TraceReply(worker=part)
                    continue
                now = time.monotonic()
                late = [task for task, due in gathering.deadlines.items() if due <= now]
                silent += late
                for task in late:
                    del gathering.deadlines[task]
        finally:
            del self._pending[number]
        yield trace_pb2.TraceReply(
            last=True,
            silent=[trace_pb2.SilentWorker(task=task, host=workers[task].host) for task in sorted(silent)],
            warnings=[
                f"worker {task} (host {workers[task].host}) did not answer within {PART_TIMEOUT_SECONDS:g} s: "
                "what it has recorded is missing"
                for task in sorted(silent)
            ],
        )

    async def _next(self, gathering: _PendingTrace) -> trace_pb2.WorkerTrace | None:
        """Return the next part; None where the time of a worker is over."""
        if not gathering.parts.empty():
            return gathering.parts.get_nowait()
        wait = min(gathering.deadlines.values()) - time.monotonic()
        try:
            return await asyncio.wait_for(gathering.parts.get(), max(0.0, wait))
        except TimeoutError:
            return None

    def add_part(self, task: int, told: coordinator_pb2.TracePart) -> None:
        """Take a part that a worker has sent. A part of a request that has ended is dropped."""
        now = time.monotonic()
        gathering = self._pending.get(told.trace)
        if gathering is None or task not in gathering.deadlines:
            return
        part = told.part
        part.task = task
        if task not in gathering.started:
            gathering.started.add(task)
            part.clock.CopyFrom(self._compare_clock(gathering.workers[task], told, now))
        gathering.deadlines[task] = now + PART_TIMEOUT_SECONDS
        if part.last:
            del gathering.deadlines[task]
        gathering.parts.put_nowait(part)

    def _compare_clock(
        self, worker: TracedWorker, told: coordinator_pb2.TracePart, now: float
    ) -> trace_pb2.WorkerClock:
        """The offset of the worker's clock to this one: the best from its heartbeats and this exchange."""
        if worker.clock_name and worker.clock_name == self._clock_name:
            return trace_pb2.WorkerClock(how="same clock")
        asked = clock_sync.compute_offset(told.asked_at, told.heard_at, told.answered_at, now)
        found = trace_pb2.WorkerClock(
            offset_seconds=asked.seconds,
            error_seconds=asked.error(now),
            round_trip_seconds=asked.round_trip,
            how="asked",
        )
        if worker.clock is None:
            return found
        beaten = trace_pb2.WorkerClock()
        beaten.CopyFrom(worker.clock)
        beaten.error_seconds += clock_sync.DRIFT * (now - worker.clock_at)
        beaten.how = "heartbeat"
        return beaten if beaten.error_seconds < found.error_seconds else found


def _limit_bytes(request: trace_pb2.TraceRequest, workers: int) -> trace_pb2.TraceRequest:
    """The request with room for each worker's answer, so that all together stay within theirs."""
    share = min(MAX_WORKER_BYTES, max(MIN_WORKER_BYTES, MAX_TOTAL_BYTES // max(1, workers)))
    return trace_pb2.TraceRequest(
        last_seconds=request.last_seconds, group=request.group, most_bytes=min(request.most_bytes or share, share)
    )
