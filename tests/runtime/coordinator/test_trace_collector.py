"""The relay of traces: parts as they come, the silent named, clocks compared by the question itself."""

from __future__ import annotations

import asyncio
import time

import pytest

from collectived_proto.v1 import coordinator_pb2, trace_pb2
from collectived_runtime import clock_sync
from collectived_runtime.coordinator import trace_collector
from collectived_runtime.coordinator.trace_collector import (
    MAX_TOTAL_BYTES,
    MAX_WORKER_BYTES,
    MIN_WORKER_BYTES,
    TraceCollector,
    TracedWorker,
)

AHEAD = 5000.0  # of the far worker's clock, in seconds


class Worker:
    """Answers when it is asked, in two parts, unless it is silent."""

    def __init__(self, relay: TraceCollector, task: int, *, parts: int = 2, ahead: float = 0.0) -> None:
        self.asked: list[coordinator_pb2.AskTrace] = []
        self._relay, self._task, self._parts, self._ahead = relay, task, parts, ahead
        name = clock_sync.clock_id() if not ahead else "another"
        self.correspondent = TracedWorker(task, f"host{task}", name, self.ask)

    def ask(self, message: coordinator_pb2.CoordinatorMessage) -> None:
        question = message.ask_trace
        self.asked.append(question)
        heard = time.monotonic() + self._ahead
        for number in range(self._parts):
            part = trace_pb2.WorkerTrace(task=self._task, now=heard, last=number == 1)
            told = coordinator_pb2.TracePart(trace=question.trace, part=part, asked_at=question.at)
            told.heard_at, told.answered_at = heard, time.monotonic() + self._ahead
            self._relay.add_part(self._task, told)


async def gathered(relay: TraceCollector, *workers: Worker, **wishes: float) -> list[trace_pb2.TraceReply]:
    known = {worker.correspondent.task: worker.correspondent for worker in workers}
    return [reply async for reply in relay.gather(trace_pb2.TraceRequest(**wishes), known)]  # type: ignore[arg-type]


def test_time_comes_first_then_parts_then_the_end() -> None:
    async def body() -> None:
        relay = TraceCollector()
        replies = await gathered(relay, Worker(relay, 0), Worker(relay, 1))
        assert replies[0].HasField("time") and replies[-1].last
        parts = [reply.worker for reply in replies[1:-1]]
        assert sorted((part.task, part.last) for part in parts) == [(0, False), (0, True), (1, False), (1, True)]
        assert [part.HasField("clock") for part in parts] == [True, False, True, False]
        assert not replies[-1].silent and not replies[-1].warnings

    asyncio.run(body())


@pytest.mark.parametrize("parts", [0, 1])
def test_who_stops_answering_is_named(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    monkeypatch.setattr(trace_collector, "PART_TIMEOUT_SECONDS", 0.05)

    async def body() -> None:
        relay = TraceCollector()
        replies = await gathered(relay, Worker(relay, 0), Worker(relay, 1, parts=parts))
        assert [(one.task, one.host) for one in replies[-1].silent] == [(1, "host1")]
        assert replies[-1].warnings[0].startswith("worker 1 (host host1) did not answer within 0.05 s")
        assert sum(reply.worker.task == 1 and reply.HasField("worker") for reply in replies) == parts

    asyncio.run(body())


def test_the_same_clock_needs_no_comparison_and_another_is_compared_by_the_question() -> None:
    async def body() -> None:
        relay = TraceCollector()
        near, far = Worker(relay, 0), Worker(relay, 1, ahead=AHEAD)
        found = {
            reply.worker.task: reply.worker.clock
            for reply in await gathered(relay, near, far)
            if reply.worker.HasField("clock")
        }
        assert (found[0].how, found[0].offset_seconds, found[0].error_seconds) == ("same clock", 0.0, 0.0)
        assert found[1].how == "asked"
        assert abs(found[1].offset_seconds + AHEAD) <= found[1].error_seconds + 1e-9

    asyncio.run(body())


def test_the_better_of_heartbeat_and_question_counts() -> None:
    async def body() -> None:
        relay = TraceCollector()
        far = Worker(relay, 1, ahead=AHEAD)
        known = far.correspondent
        known.clock, known.clock_at = trace_pb2.WorkerClock(offset_seconds=-AHEAD, error_seconds=0.0), time.monotonic()
        known.clock_at += 60.0  # as if it came just now, however slow this test is
        (clock,) = [reply.worker.clock for reply in await gathered(relay, far) if reply.worker.HasField("clock")]
        assert (clock.how, clock.offset_seconds) == ("heartbeat", -AHEAD)
        known.clock.error_seconds = 1000.0
        (clock,) = [reply.worker.clock for reply in await gathered(relay, far) if reply.worker.HasField("clock")]
        assert clock.how == "asked"

    asyncio.run(body())


def test_all_answers_together_stay_within_their_room() -> None:
    assert trace_collector._limit_bytes(trace_pb2.TraceRequest(), 1).most_bytes == MAX_WORKER_BYTES
    assert trace_collector._limit_bytes(trace_pb2.TraceRequest(), 64).most_bytes * 64 == MAX_TOTAL_BYTES
    assert trace_collector._limit_bytes(trace_pb2.TraceRequest(), 1_000_000).most_bytes == MIN_WORKER_BYTES
    asked = trace_collector._limit_bytes(trace_pb2.TraceRequest(most_bytes=7, last_seconds=3.0, group="g"), 2)
    assert (asked.most_bytes, asked.last_seconds, asked.group) == (7, 3.0, "g")


def test_without_workers_it_ends_at_once_and_late_parts_are_dropped() -> None:
    async def body() -> None:
        relay = TraceCollector()
        assert [reply.last for reply in await gathered(relay)] == [False, True]
        relay.add_part(0, coordinator_pb2.TracePart(trace=1))

    asyncio.run(body())
