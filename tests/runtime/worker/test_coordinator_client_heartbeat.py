"""What heartbeats tell of local ranks: what has moved, bounded, in turns, and all of it again on a new stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from collectived_proto.types import Barrier, Collective, Layout
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_proto.v1 import coordinator_pb2_grpc as rpc
from collectived_proto.v1 import trace_pb2
from collectived_runtime.engine.submit.contracts import PreparedCollective
from collectived_runtime.engine.submit.tracker import Arrival, InstanceTracker
from collectived_runtime.worker.coordinator_client import (
    MAX_RANKS_PER_HEARTBEAT,
    CoordinatorClient,
    CoordinatorEndpoint,
    ProgressDeltas,
)

PREPARED = PreparedCollective(
    Collective(Barrier(), "", (), site="train.py:88"), b"barrier", Layout((), (), 0, 0), "barrier()"
)


def tracker(generation: int, *ranks: int) -> InstanceTracker:
    return InstanceTracker(7, generation, ranks, 60.0, 0.0)


def submit(where: InstanceTracker, rank: int, now: float = 1.0) -> None:
    where.record_arrival(rank, where.progress[rank].submitted + 1, Arrival(PREPARED, None, now), 0.0)


def told(beat: pb.Heartbeat) -> dict[tuple[int, int], tuple[int, int, str]]:
    """(generation, rank) -> submitted, finished, what"""
    return {
        (one.generation, rank.rank): (rank.submitted, rank.finished, f"{rank.last_op} {rank.last_site}".strip())
        for one in beat.standings
        for rank in one.ranks
    }


def test_the_first_one_tells_of_all_ranks_and_later_ones_of_those_that_have_moved() -> None:
    beats, here, there = ProgressDeltas(), tracker(100, 0, 1), tracker(200, 5)
    nothing = (-1, -1, "")
    assert told(beats.next_heartbeat([here, there], 2.0)) == {(100, 0): nothing, (100, 1): nothing, (200, 5): nothing}
    assert beats.next_heartbeat([here, there], 7.0) == pb.Heartbeat()
    submit(here, 1)
    beat = beats.next_heartbeat([here, there], 12.0)
    assert told(beat) == {(100, 1): (0, -1, "barrier() train.py:88")}
    assert beat.standings[0].ranks[0].idle_seconds == 11.0 and not beat.more
    submit(here, 0)
    here.finish(here.instances[0], 13.0)
    here.progress[1].site = "eval.py:7"
    assert told(beats.next_heartbeat([here, there], 17.0)) == {
        (100, 0): (0, 0, "barrier() train.py:88"),
        (100, 1): (0, 0, "barrier() eval.py:7"),
    }


def test_a_heartbeat_with_nothing_new_has_no_bytes() -> None:
    beats, here = ProgressDeltas(), tracker(100, 0)
    beats.next_heartbeat([here], 1.0)
    assert beats.next_heartbeat([here], 2.0).ByteSize() == 0 == beats.next_heartbeat([], 3.0).ByteSize()


def test_on_a_new_stream_all_is_told_again() -> None:
    beats, here = ProgressDeltas(), tracker(100, 0)
    first = beats.next_heartbeat([here], 1.0)
    beats.reset()
    assert told(beats.next_heartbeat([here], 1.0)) == told(first) != {}


def test_very_many_ranks_have_their_turns_and_each_is_told_however_busy_the_others_are() -> None:
    beats, here = ProgressDeltas(), tracker(100, *range(3 * MAX_RANKS_PER_HEARTBEAT))
    seen: set[int] = set()
    for _ in range(3):
        for rank in here.progress:
            submit(here, rank)  # all move all the time
        beat = beats.next_heartbeat([here], 1.0)
        ranks = {rank for _, rank in told(beat)}
        assert beat.more and len(ranks) == MAX_RANKS_PER_HEARTBEAT and not ranks & seen
        seen |= ranks
    assert len(seen) == 3 * MAX_RANKS_PER_HEARTBEAT


def test_the_last_of_several_turns_leaves_nothing_unsaid() -> None:
    beats, here = ProgressDeltas(), tracker(100, *range(MAX_RANKS_PER_HEARTBEAT + 1))
    first, second = beats.next_heartbeat([here], 1.0), beats.next_heartbeat([here], 2.0)
    assert (first.more, len(told(first))) == (True, MAX_RANKS_PER_HEARTBEAT)
    assert (second.more, len(told(second))) == (False, 1)


def test_of_generations_that_have_ended_nothing_is_remembered() -> None:
    beats = ProgressDeltas()
    for generation in range(100):
        beats.next_heartbeat([tracker(generation, 0)], 1.0)
    assert len(beats._reported) == 1


class Talkative(rpc.CoordinatorServicer):
    """A coordinator that welcomes, answers, and keeps the heartbeats of each stream; `cut` ends the first."""

    def __init__(self) -> None:
        self.beats: asyncio.Queue[tuple[int, pb.Heartbeat]] = asyncio.Queue()
        self.streams = 0
        self.cut = False

    async def Attach(self, requests: AsyncIterator[pb.WorkerMessage], context: Any) -> None:
        self.streams += 1
        stream = self.streams
        async for message in requests:
            match message.WhichOneof("message"):
                case "hello":
                    await context.write(pb.CoordinatorMessage(welcome=pb.Welcome(epoch=1, heartbeat_seconds=0.02)))
                case "measured":
                    await context.write(pb.CoordinatorMessage(measure=pb.Measure()))
                case "heartbeat":
                    self.beats.put_nowait((stream, message.heartbeat))
            if stream == 1 and self.cut:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")

    async def next(self, stream: int) -> pb.Heartbeat:
        """The next heartbeat of that stream that tells something."""
        while True:
            number, beat = await asyncio.wait_for(self.beats.get(), 20)
            if number == stream and beat.standings:
                return beat


def test_a_worker_beats_with_what_has_moved_even_while_it_says_other_things(tmp_path: Path) -> None:
    async def story() -> None:
        coordinator, here = Talkative(), tracker(100, 0)
        server = grpc.aio.server()
        rpc.add_CoordinatorServicer_to_server(coordinator, server)
        address = f"unix:{tmp_path}/c.sock"
        server.add_insecure_port(address)
        await server.start()

        def say(*_: object) -> None:
            membership.send(pb.WorkerMessage(measured=pb.Measured()))

        membership = CoordinatorClient(CoordinatorEndpoint(address), lambda _: pb.Hello(), say, say, lambda: [here])
        try:
            await membership.wait_until_welcomed(20)
            assert told(await coordinator.next(1)) == {(100, 0): (-1, -1, "")}
            submit(here, 0)
            assert told(await coordinator.next(1)) == {(100, 0): (0, -1, "barrier() train.py:88")}
            coordinator.cut = True
            assert told(await coordinator.next(2)) == {(100, 0): (0, -1, "barrier() train.py:88")}
        finally:
            await membership.close()
            await server.stop(1.0)

    asyncio.run(story())


class Ahead(rpc.CoordinatorServicer):
    """A coordinator whose clock is ahead of ours, and which echoes heartbeats."""

    SECONDS = 5000.0

    def __init__(self) -> None:
        self.clocks: asyncio.Queue[trace_pb2.WorkerClock] = asyncio.Queue()

    async def Attach(self, requests: AsyncIterator[pb.WorkerMessage], context: Any) -> None:
        async for message in requests:
            if message.HasField("hello"):
                await context.write(pb.CoordinatorMessage(welcome=pb.Welcome(epoch=1, heartbeat_seconds=0.02)))
            elif message.HasField("heartbeat"):
                beat = message.heartbeat
                if beat.HasField("clock"):
                    self.clocks.put_nowait(beat.clock)
                if beat.sent_at:
                    echo = pb.Echo(sent_at=beat.sent_at, at=time.monotonic() + self.SECONDS)
                    await context.write(pb.CoordinatorMessage(echo=echo))


def test_echoes_tell_a_worker_how_its_clock_stands_and_its_heartbeats_tell_the_coordinator(tmp_path: Path) -> None:
    async def story() -> None:
        coordinator = Ahead()
        server = grpc.aio.server()
        rpc.add_CoordinatorServicer_to_server(coordinator, server)
        address = f"unix:{tmp_path}/c.sock"
        server.add_insecure_port(address)
        await server.start()
        membership = CoordinatorClient(CoordinatorEndpoint(address), lambda _: pb.Hello(), lambda _: None, lambda: None)
        try:
            await membership.wait_until_welcomed(20)
            clock = await asyncio.wait_for(coordinator.clocks.get(), 20)
            assert clock.round_trip_seconds > 0
            assert abs(clock.offset_seconds - Ahead.SECONDS) <= clock.error_seconds + 1e-9
        finally:
            await membership.close()
            await server.stop(1.0)

    asyncio.run(story())
