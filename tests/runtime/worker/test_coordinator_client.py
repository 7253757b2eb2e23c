"""Membership: whatever a message brings about here, the worker hears the next one, or ends and says so."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from collectived_proto.errors import UnavailableError
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_proto.v1 import coordinator_pb2_grpc as rpc
from collectived_proto.v1 import status_pb2, trace_pb2
from collectived_runtime.worker.coordinator_client import CoordinatorClient, CoordinatorEndpoint, enlist
from collectived_runtime.worker.server import EXIT_DEFECT


class Coordinator(rpc.CoordinatorServicer):
    """Welcomes, and then says a word of each kind that it is given."""

    def __init__(self, *words: pb.CoordinatorMessage, busy_times: int = 0) -> None:
        self.words = words
        self.streams = 0
        self.busy_times = busy_times  # how often it has no room for anybody

    async def _refuse_if_busy(self, context: Any) -> None:
        self.busy_times -= 1
        if self.busy_times >= 0:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "there is no room")

    async def Enlist(self, request: pb.EnlistRequest, context: Any) -> pb.EnlistReply:
        await self._refuse_if_busy(context)
        return pb.EnlistReply(task=7)

    async def Attach(self, requests: AsyncIterator[pb.WorkerMessage], context: Any) -> None:
        self.streams += 1
        await self._refuse_if_busy(context)
        async for message in requests:
            if message.HasField("hello"):
                await context.write(pb.CoordinatorMessage(welcome=pb.Welcome(epoch=1, heartbeat_seconds=20)))
                for word in self.words:
                    await context.write(word)


def played(coordinator: Coordinator, folder: Path, play: Callable[[str], Awaitable[None]]) -> None:
    async def story() -> None:
        server = grpc.aio.server()
        rpc.add_CoordinatorServicer_to_server(coordinator, server)
        address = f"unix:{folder}/c.sock"
        server.add_insecure_port(address)
        await server.start()
        try:
            await asyncio.wait_for(play(address), 30)
        finally:
            await server.stop(0.0)

    asyncio.run(story())


def test_a_message_that_cannot_be_handled_is_logged_and_the_next_one_is_heard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = pb.CoordinatorMessage(measure=pb.Measure()), pb.CoordinatorMessage(query=pb.Query())

    async def play(address: str) -> None:
        heard: asyncio.Queue[str | None] = asyncio.Queue()

        def hear(message: pb.CoordinatorMessage) -> None:
            if message.HasField("measure"):
                raise RuntimeError("can't start new thread")
            heard.put_nowait(message.WhichOneof("message"))

        membership = CoordinatorClient(CoordinatorEndpoint(address), lambda _: pb.Hello(), hear, lambda: None)
        try:
            assert await heard.get() == "query"
        finally:
            await membership.close()

    played(Coordinator(*words), tmp_path, play)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "a message of kind measure from the coordinator has had no effect" in record.getMessage()
    assert record.exc_info and "can't start new thread" in str(record.exc_info[1])


def test_where_what_is_to_be_said_cannot_be_the_stream_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = Coordinator()

    async def play(address: str) -> None:
        tried = []

        def hello(epoch: int) -> pb.Hello:
            tried.append(epoch)
            if len(tried) == 1:
                raise ValueError("planted")
            return pb.Hello()

        membership = CoordinatorClient(CoordinatorEndpoint(address), hello, lambda _: None, lambda: None)
        try:
            await membership.wait_until_welcomed(20)
            assert not membership.finished.done() and membership.welcome_count == 1
        finally:
            await membership.close()

    played(coordinator, tmp_path, play)
    assert "nothing more can be said on this stream" in caplog.text and "planted" in caplog.text


def test_a_worker_that_starts_waits_while_its_coordinator_has_no_room(tmp_path: Path) -> None:
    async def play(address: str) -> None:
        membership = CoordinatorClient(CoordinatorEndpoint(address), lambda _: pb.Hello(), lambda _: None, lambda: None)
        try:
            await membership.wait_until_welcomed(20)
        finally:
            await membership.close()

    played(Coordinator(busy_times=3), tmp_path, play)


def test_where_there_is_no_room_for_as_long_as_it_waits_a_worker_says_so(tmp_path: Path) -> None:
    async def play(address: str) -> None:
        membership = CoordinatorClient(CoordinatorEndpoint(address), lambda _: pb.Hello(), lambda _: None, lambda: None)
        try:
            with pytest.raises(UnavailableError, match="refused this worker for 0.5 s: there is no room"):
                await membership.wait_until_welcomed(0.5)
        finally:
            await membership.close()

    played(Coordinator(busy_times=1_000_000), tmp_path, play)


def test_a_worker_without_a_number_waits_too(tmp_path: Path) -> None:
    async def play(address: str) -> None:
        assert await enlist(CoordinatorEndpoint(address), "here", 20) == 7

    played(Coordinator(busy_times=1), tmp_path, play)


def test_a_welcome_that_cannot_be_taken_ends_membership_which_can_be_closed_all_the_same(tmp_path: Path) -> None:
    async def play(address: str) -> None:
        def rejoin() -> None:
            raise ValueError("planted")

        membership = CoordinatorClient(CoordinatorEndpoint(address), lambda _: pb.Hello(), lambda _: None, rejoin)
        await asyncio.wait({membership.finished})
        assert str(membership.finished.exception()) == "planted"
        await membership.close()

    played(Coordinator(), tmp_path, play)


DEFECTIVE = """
from collectived_runtime.__main__ import main
from collectived_runtime.worker.groups import Groups

welcomed = iter([None])

def resend_joins(groups):
    if next(welcomed, "again"):
        raise ValueError("planted")

Groups.resend_joins = resend_joins
main()
"""


@pytest.mark.timeout(120)
def test_a_worker_that_a_defect_would_leave_deaf_ends_for_its_supervisor_and_says_so() -> None:
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as folder:
        served = ("--listen", f"unix:{folder}/c.sock", "--attached")
        there = ("--task", "0", "--folder", folder, "--coordinator", f"unix:{folder}/c.sock", "--attached")
        lines = {
            "coordinator": ("-m", "collectived_runtime", "coordinator", *served),
            "worker": ("-c", DEFECTIVE, "worker", *there),
        }
        started: list[subprocess.Popen[str]] = []

        def start(name: str) -> subprocess.Popen[str]:
            pipe = subprocess.PIPE
            started.append(
                subprocess.Popen([sys.executable, *lines[name]], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
            )
            daemon = started[-1]
            assert daemon.stdin and daemon.stdout
            daemon.stdin.write("the secret of these tests\n")
            daemon.stdin.flush()
            told = daemon.stdout.readline()
            assert told.startswith("ready "), daemon.communicate()
            return daemon

        try:
            coordinator, worker = start("coordinator"), start("worker")
            coordinator.kill()
            coordinator.wait(20)
            start("coordinator")
            worker.wait(30)
            out, err = worker.communicate()
        finally:
            for daemon in started:
                daemon.kill()
                daemon.communicate()
        assert (worker.returncode, out) == (EXIT_DEFECT, "")
        assert "no longer reads messages of its coordinator, and ends, for its supervisor to start it again" in err
        assert "ValueError: planted" in err


def test_a_worker_that_is_ending_says_so_to_whoever_asks_the_coordinator_through_it(tmp_path: Path) -> None:
    async def play(address: str) -> None:
        client = CoordinatorClient(CoordinatorEndpoint(address), lambda _: pb.Hello(), lambda _: None, lambda: None)
        await client.close()
        asked = (
            client.request_status(status_pb2.StatusRequest(), 1.0),
            client.request_drain(status_pb2.DrainRequest(), 1.0),
            anext(client.request_trace(trace_pb2.TraceRequest(), 1.0)),
        )
        for asking in asked:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asking
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == "this worker is ending"

    played(Coordinator(), tmp_path, play)
