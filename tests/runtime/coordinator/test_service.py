"""The shell over real gRPC on a Unix socket, with workers that are nothing but streams."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from collectived_proto.codec import group_from_proto
from collectived_proto.errors import Code
from collectived_proto.group_codec import compact_verdict_from_proto, formed_from_bytes
from collectived_proto.v1 import common_pb2, coordinator_pb2, coordinator_pb2_grpc, status_pb2, trace_pb2
from collectived_proto.version import OUR_VERSIONS
from collectived_runtime.coordinator.core.coordinator import Coordinator
from collectived_runtime.coordinator.service import MAX_GROUP_SENDS, CoordinatorService

PROTOCOL = common_pb2.Protocol(lowest=1, highest=1, release="test")


class FakeWorker:
    """A stream to the coordinator, and nothing behind it."""

    def __init__(self, stub: Any, task: int) -> None:
        self.task = task
        self.call = stub.Attach()

    async def send(self, **message: Any) -> None:
        await self.call.write(coordinator_pb2.WorkerMessage(**message))

    async def hear(self, kind: str) -> Any:
        """The next message, which must be of this kind."""
        message = await self.call.read()
        assert message is not grpc.aio.EOF, f"{await self.call.code()}: {await self.call.details()}"
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    async def hello(self, **more: Any) -> Any:
        fields: dict[str, Any] = {
            "protocol": PROTOCOL,
            "incarnation": f"i{self.task}",
            "host": "h",
            "pid": 100 + self.task,
        } | more
        await self.send(hello=coordinator_pb2.Hello(task=self.task, **fields))
        return await self.hear("welcome")

    async def refused(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ended."""
        with contextlib.suppress(grpc.aio.AioRpcError):  # reading ends with the status, or raises it
            assert await self.call.read() is grpc.aio.EOF
        return await self.call.code(), await self.call.details()

    async def ask(self, request: str, size: int = 2, label: str = "") -> None:
        device = f"/job:worker/replica:0/task:{self.task}/device:CPU:0"
        ask = coordinator_pb2.JoinAsk(
            request=request,
            name="job/train",
            min_size=size,
            max_size=size,
            device=device,
            host="h",
            pid=self.task,
            label=label,
        )
        await self.send(join=ask)


class Stage:
    def __init__(self, service: CoordinatorService, stub: Any) -> None:
        self.service = service
        self.stub = stub

    def worker(self, task: int) -> FakeWorker:
        return FakeWorker(self.stub, task)

    async def pair(self) -> tuple[FakeWorker, FakeWorker, common_pb2.Group]:
        """Two workers with one rank each in one group."""
        one, two = self.worker(0), self.worker(1)
        await one.hello()
        await two.hello()
        await one.ask("r0")
        await one.hear("join_update")
        await two.ask("r1")
        done = await one.hear("join_done")
        await two.hear("join_done")
        return one, two, formed_from_bytes(done.formed).group

    async def status(self, local_only: bool = False) -> Any:
        return await self.stub.Status(status_pb2.StatusRequest(local_only=local_only))

    async def until_absent(self, task: int) -> None:
        """Asks until the coordinator does not show that worker as connected any more."""
        while any(worker.task == task and worker.connected for worker in (await self.status(True)).workers):
            pass


@asynccontextmanager
async def staged(path: Path, heartbeat: float = 5.0) -> AsyncIterator[Stage]:
    service = CoordinatorService(Coordinator(1_000_000, heartbeat, 1.0), "job", f"unix:{path}")
    server = grpc.aio.server()
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            yield Stage(service, coordinator_pb2_grpc.CoordinatorStub(channel))
            service.stop()
    finally:
        await server.stop(1.0)


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    """Runs a story on a stage of its own."""

    def run(story: Callable[[Stage], Awaitable[None]], heartbeat: float = 5.0) -> None:
        async def staging() -> None:
            async with staged(tmp_path / "coordinator.sock", heartbeat) as stage:
                await story(stage)

        asyncio.run(staging())

    return run


Play = Callable[..., None]


def test_two_workers_form_a_group(play: Play) -> None:
    async def story(stage: Stage) -> None:
        one, two = stage.worker(0), stage.worker(1)
        welcome = await one.hello(link_address="h:1")
        assert (welcome.epoch, welcome.heartbeat_seconds, welcome.stall_seconds) == (1_000_000, 5.0, 1.0)
        await two.hello(link_address="h:2")
        await two.ask("r1")
        update = await two.hear("join_update")
        assert (update.present, update.expected) == (1, 2)
        assert update.text == "1 of 2 ranks here, waiting for 1 more"
        await one.ask("r0")
        here, there = await one.hear("join_done"), await two.hear("join_done")
        assert (here.request, here.rank, there.request, there.rank) == ("r0", 0, "r1", 1)
        assert here.formed == there.formed
        formed = formed_from_bytes(here.formed)
        assert 0 < formed.group.generation < 2**63 and not formed.idle
        assert [(peer.task, peer.link_address, list(peer.ranks)) for peer in formed.peers] == [
            (0, "h:1", [0]),
            (1, "h:2", [1]),
        ]

    play(story)


def test_workers_that_do_not_read_hold_up_nobody(play: Play) -> None:
    async def story(stage: Stage) -> None:
        size = MAX_GROUP_SENDS + 1
        async with contextlib.AsyncExitStack() as channels:
            deaf = []
            for task in range(MAX_GROUP_SENDS):
                # A connection of its own, as what one does not read blocks all of it, with a window that does not grow.
                options = (("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0))
                channel = grpc.aio.insecure_channel(stage.service.address, options)
                await channels.enter_async_context(channel)
                deaf.append(FakeWorker(coordinator_pb2_grpc.CoordinatorStub(channel), task))
            for worker in deaf:
                await worker.hello()
                await worker.ask(f"r{worker.task}", size, secrets.token_hex(8 << 10))
            last = stage.worker(MAX_GROUP_SENDS)
            await last.hello()
            await last.ask("last", size)
            done = await last.hear("join_done")
            assert len(done.formed) > 1 << 19  # more than gRPC takes for a worker that does not read

    play(story)


def test_a_deadline_is_asked_about_and_judged(play: Play) -> None:
    async def story(stage: Stage) -> None:
        one, two, group = await stage.pair()
        waiting = coordinator_pb2.RankPosition(
            rank=0, submitted=3, finished=2, arrived=True, op="barrier()", last_op="barrier()", last_site="a.py:1"
        )
        report = coordinator_pb2.Report(
            key=group.key,
            generation=group.generation,
            kind=coordinator_pb2.Report.EXPIRED,
            instance=3,
            timeout_seconds=0.5,
            ranks=[waiting],
        )
        await one.send(report=report)
        query = await two.hear("query")
        assert (query.key, query.generation, query.instance) == (group.key, group.generation, 3)
        idle = coordinator_pb2.RankPosition(rank=1, submitted=2, finished=2, last_op="barrier()", last_site="b.py:2")
        await two.send(position=coordinator_pb2.Position(query=query.query, instance=3, ranks=[idle]))
        verdicts = [await one.hear("verdict"), await two.hear("verdict")]
        assert verdicts[0] == verdicts[1]
        assert verdicts[0].code == Code.DEADLINE_EXCEEDED
        verdict = compact_verdict_from_proto(verdicts[0], group_from_proto(group).members)
        assert [(member.rank, member.last_site) for member in verdict.missing] == [(1, "b.py:2")]
        assert [(member.host, member.last_instance) for member in verdict.members] == [("h", 2), ("h", 2)]
        assert "it last did barrier() #2 at b.py:2; rank 0 is waiting at a.py:1" in verdicts[0].message

    play(story)


def test_an_unanswered_question_ends_by_the_clock(play: Play) -> None:
    async def story(stage: Stage) -> None:
        one, two, group = await stage.pair()
        report = coordinator_pb2.Report(
            key=group.key, generation=group.generation, kind=coordinator_pb2.Report.EXPIRED, instance=0
        )
        await one.send(report=report)
        await two.hear("query")
        verdict = await one.hear("verdict")
        assert "worker 1 does not answer" in verdict.message

    play(story)


def test_a_silent_worker_is_dropped(play: Play) -> None:
    async def story(stage: Stage) -> None:
        worker = stage.worker(0)
        await worker.hello()
        code, details = await worker.refused()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "worker 0 has sent no heartbeat for 0.1 s" in details
        assert not (await stage.status(True)).workers

    play(story, heartbeat=0.05)


def test_a_goodbye_says_why(play: Play) -> None:
    async def story(stage: Stage) -> None:
        one, two, _ = await stage.pair()
        await two.send(goodbye=coordinator_pb2.Goodbye(why="its launcher is gone"))
        assert "worker 1 went away: its launcher is gone" in (await one.hear("verdict")).message

    play(story)


def test_a_goodbye_ends_the_stream_at_once(play: Play) -> None:
    async def story(stage: Stage) -> None:
        one, two, _ = await stage.pair()
        await two.send(goodbye=coordinator_pb2.Goodbye())
        verdict = await one.hear("verdict")
        assert verdict.code == Code.UNAVAILABLE
        assert "worker 1 went away in order" in verdict.message
        assert (await two.refused())[0] is grpc.StatusCode.OK

    play(story)


def test_a_worker_whose_stream_broke_comes_back(play: Play) -> None:
    async def story(stage: Stage) -> None:
        _, two, group = await stage.pair()
        two.call.cancel()
        await stage.until_absent(1)
        again = stage.worker(1)
        await again.hello(groups=[coordinator_pb2.Attached(group=group, ranks=[1])])
        assert all(worker.connected for worker in (await stage.status(True)).workers)

    play(story)


def test_a_second_stream_of_a_worker_replaces_the_first(play: Play) -> None:
    async def story(stage: Stage) -> None:
        first, second = stage.worker(0), stage.worker(0)
        await first.hello()
        await second.hello()
        code, details = await first.refused()
        assert code is grpc.StatusCode.ABORTED and "has attached again" in details
        assert [worker.connected for worker in (await stage.status(True)).workers] == [True]

    play(story)


def test_a_second_worker_of_a_task_is_refused(play: Play) -> None:
    async def story(stage: Stage) -> None:
        first, second = stage.worker(0), stage.worker(0)
        await first.hello()
        await second.send(hello=coordinator_pb2.Hello(protocol=PROTOCOL, task=0, incarnation="j", host="other", pid=7))
        code, details = await second.refused()
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert "worker 0 (host other, pid 7) is refused: worker 0 (host " in details and "is attached" in details

    play(story)


def test_another_protocol_is_refused_naming_both(play: Play) -> None:
    async def story(stage: Stage) -> None:
        worker = stage.worker(0)
        future = common_pb2.Protocol(lowest=7, highest=9, release="9.9")
        await worker.send(hello=coordinator_pb2.Hello(protocol=future, task=0, incarnation="i"))
        code, details = await worker.refused()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details == (
            f"worker 0 (release 9.9, protocol 7 to 9) and this coordinator ({OUR_VERSIONS}) have no "
            f"version of the protocol in "
            "common: upgrade this coordinator to a release that speaks protocol 7"
        )

    play(story)


# The hellos of workers of the first protocol, as one has sent it, and one that says no versions.
RECORDED = bytes.fromhex(
    "0a520a0b080110011a05302e312e301a026930220168286432292f6a6f623a776f726b65722f7265706c6963613a302f7461736b3a302f646576"
    "6963653a4350553a303a07756e69783a2f774203683a315a0163"
)
SILENT = coordinator_pb2.WorkerMessage(hello=coordinator_pb2.Hello(task=0, incarnation="i0")).SerializeToString()


@pytest.mark.parametrize("said", [RECORDED, SILENT], ids=["recorded", "silent"])
def test_a_worker_of_the_first_protocol_is_welcome(play: Play, said: bytes) -> None:
    async def story(stage: Stage) -> None:
        worker = stage.worker(0)
        await worker.call.write(coordinator_pb2.WorkerMessage.FromString(said))
        welcome = await worker.hear("welcome")
        assert (welcome.protocol.lowest, welcome.protocol.highest) == (OUR_VERSIONS.lowest, OUR_VERSIONS.highest)
        (told,) = (await stage.status(True)).workers
        assert (told.protocol.lowest, told.protocol.highest) == (1, 1)

    play(story)


def test_the_first_message_must_be_a_hello(play: Play) -> None:
    async def story(stage: Stage) -> None:
        worker = stage.worker(0)
        await worker.send(heartbeat=coordinator_pb2.Heartbeat())
        code, details = await worker.refused()
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "got heartbeat" in details

    play(story)


def test_what_is_not_understood_is_passed_over(play: Play) -> None:
    async def story(stage: Stage) -> None:
        worker = stage.worker(0)
        await worker.hello()
        await worker.send(report=coordinator_pb2.Report.FromString(bytes([3 << 3, 99])))
        await worker.call.write(coordinator_pb2.WorkerMessage())
        await worker.ask("r0", size=1)
        await worker.hear("join_done")

    play(story)


def test_a_higher_epoch_ends_this_coordinator(play: Play) -> None:
    async def story(stage: Stage) -> None:
        worker = stage.worker(0)
        hello = coordinator_pb2.Hello(protocol=PROTOCOL, task=0, incarnation="i", highest_epoch=1_000_001)
        await worker.send(hello=hello)
        assert "later than this one's 1000000" in await stage.service.shutdown_reason
        assert (await worker.refused())[0] is grpc.StatusCode.UNAVAILABLE

    play(story)


def test_an_epoch_that_no_coordinator_can_have_yet_ends_nobody(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    async def story(stage: Stage) -> None:
        same, other = stage.worker(0), stage.worker(0)
        await same.hello(incarnation="i")
        hello = coordinator_pb2.Hello(protocol=PROTOCOL, task=0, incarnation="i", highest_epoch=2**63)
        await other.send(hello=hello)
        code, text = await other.refused()
        assert code is grpc.StatusCode.INVALID_ARGUMENT and f"epoch {2**63}, more than a day ahead" in text
        assert not stage.service.shutdown_reason.done()
        await same.ask("r0", size=1)
        await same.hear("join_done")

    play(story)
    assert [one.levelname for one in caplog.records if f"epoch {2**63}" in one.getMessage()] == ["WARNING"]


def test_stopping_tells_the_workers(play: Play) -> None:
    async def story(stage: Stage) -> None:
        worker = stage.worker(0)
        await worker.hello()
        stage.service.stop()
        assert await worker.refused() == (grpc.StatusCode.UNAVAILABLE, "the coordinator is stopping")

    play(story)


def _group_loop(
    group: common_pb2.Group, rank: int, done: int, last: int, flights: list[status_pb2.InFlight]
) -> status_pb2.LaneStatus:
    member = common_pb2.Member(rank=rank, last_instance=last, last_op="barrier()", last_site="a.py:1")
    return status_pb2.LaneStatus(
        group=group.name,
        key=group.key,
        generation=group.generation,
        ranks=[rank],
        collectives_done=done,
        bytes_reduced=100,
        in_flight=flights,
        members=[member],
    )


def test_status_merges_what_workers_tell(play: Play) -> None:
    async def story(stage: Stage) -> None:
        one, two, group = await stage.pair()
        asked = asyncio.ensure_future(stage.status())
        flight = status_pb2.InFlight(instance=1, op="barrier()", site="a.py:2", seconds=0.5, arrived=[0], bytes=8)
        for worker, group_loop in (
            (one, _group_loop(group, 0, 1, 0, [flight])),
            (two, _group_loop(group, 1, 1, 0, [])),
        ):
            inspect = (await worker.hear("inspect")).inspect
            account = status_pb2.WorkerStatus(sessions=3, threads=5, lanes=[group_loop])
            await worker.send(inspection=coordinator_pb2.Inspection(inspect=inspect, status=account))
        reply = await asked
        assert reply.coordinator.job == "job" and reply.coordinator.epoch == 1_000_000
        assert reply.coordinator.address.startswith("unix:")
        assert [(w.task, w.host, w.sessions) for w in reply.workers] == [
            (0, "h", 3),
            (1, "h", 3),
        ]
        [shown] = reply.groups
        assert (shown.name, shown.state, shown.size) == ("job/train", "ready", 2)
        assert (shown.collectives_done, shown.bytes_reduced) == (1, 200)
        assert [(m.rank, m.last_instance, m.last_site) for m in shown.members] == [(0, 0, "a.py:1"), (1, 0, "a.py:1")]
        [merged] = shown.in_flight
        assert (merged.instance, merged.op, merged.bytes) == (1, "barrier()", 8)
        assert (list(merged.arrived), list(merged.missing)) == ([0], [1])
        assert not reply.warnings

    play(story)


def test_status_names_the_worker_that_does_not_answer(play: Play) -> None:
    async def story(stage: Stage) -> None:
        one, two, _ = await stage.pair()
        asked = asyncio.ensure_future(stage.status())
        inspect = (await one.hear("inspect")).inspect
        await one.send(inspection=coordinator_pb2.Inspection(inspect=inspect, status=status_pb2.WorkerStatus()))
        await two.hear("inspect")
        reply = await asked
        assert list(reply.warnings) == [
            "worker 1 did not answer within 0.3 s: its last answer is shown, - if there is none"
        ]
        assert [worker.task for worker in reply.workers] == [0, 1]

    play(story)


def test_status_shows_what_forms_and_what_failed(play: Play) -> None:
    async def story(stage: Stage) -> None:
        one, two, group = await stage.pair()
        abort = coordinator_pb2.Report(
            key=group.key, generation=group.generation, kind=coordinator_pb2.Report.ABORT, rank=1, text="enough"
        )
        await two.send(report=abort)
        await one.hear("verdict")
        await one.ask("r2")
        await one.hear("join_update")
        reply = await stage.status(local_only=True)
        assert [(shown.name, shown.state) for shown in reply.groups] == [
            ("job/train", "forming"),
            ("job/train", "failed"),
        ]
        assert "still lives in the previous generation" in reply.groups[0].waiting_for
        [failure] = reply.failures
        assert failure.verdict.code == Code.ABORTED and "enough" in failure.verdict.message
        assert abs(failure.unix_time - reply.unix_time) < 60

    play(story)


def test_a_heartbeat_that_wants_an_echo_gets_one_and_what_it_says_of_its_clock_counts_in_traces(play: Play) -> None:
    async def story(stage: Stage) -> None:
        one = stage.worker(0)
        await one.hello(clock="of its own")
        clock = trace_pb2.WorkerClock(offset_seconds=7.0, error_seconds=1e-9)
        await one.send(heartbeat=coordinator_pb2.Heartbeat(sent_at=5.0, clock=clock))
        echo = await one.hear("echo")
        assert echo.sent_at == 5.0 and abs(echo.at - time.monotonic()) < 60
        call = stage.stub.Trace(trace_pb2.TraceRequest(group="train"))
        assert (await call.read()).HasField("time")
        asked = await one.hear("ask_trace")
        assert asked.request.group == "train"
        part = trace_pb2.WorkerTrace(task=0, now=1.0, last=True)
        told = coordinator_pb2.TracePart(trace=asked.trace, part=part, asked_at=asked.at)
        await one.send(trace_part=told)
        found = (await call.read()).worker
        assert (found.clock.how, found.clock.offset_seconds) == ("heartbeat", 7.0)
        assert (await call.read()).last and await call.read() is grpc.aio.EOF

    play(story)
