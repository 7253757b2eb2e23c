"""The coordinator process: the ready line, health, addresses in use, epochs, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from collectived_proto.config.daemons import CoordinatorSettings
from collectived_proto.v1 import coordinator_pb2, coordinator_pb2_grpc, status_pb2
from collectived_runtime.coordinator.files import next_epoch
from collectived_runtime.coordinator.server import serve

Story = Callable[[dict[str, Any]], Awaitable[None]]


def served(
    settings: CoordinatorSettings, capsys: pytest.CaptureFixture[str], story: Story, end: str = "lifeline"
) -> dict[str, Any]:
    """Serves, runs a story once ready, and ends the server by `end`; what the ready line said."""
    said: list[dict[str, Any]] = []

    async def run() -> None:
        lifeline: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        serving = asyncio.ensure_future(serve(settings, lifeline))
        printed = ""
        while not printed.endswith("\n"):
            await asyncio.wait([serving], timeout=0)
            assert not serving.done(), serving
            printed += capsys.readouterr().out
        word, _, rest = printed.partition(" ")
        assert word == "ready" and rest.count("\n") == 1
        said.append(json.loads(rest))
        await story(said[0])
        if end == "lifeline":
            lifeline.set_result(None)
        else:
            os.kill(os.getpid(), signal.Signals[end])
        await serving

    asyncio.run(run())
    return said[0]


async def nothing(_: dict[str, Any]) -> None:
    """A story in which nothing happens."""


@pytest.mark.parametrize("end", ["lifeline", "SIGTERM", "SIGINT"])
def test_it_serves_says_so_and_stops_in_order(end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "coordinator.sock"

    async def story(ready: dict[str, Any]) -> None:
        for address in ready["addresses"]:
            secret = () if address.startswith("unix:") else (("authorization", "Bearer s3cret"),)
            async with grpc.aio.insecure_channel(address) as channel:
                check = health_pb2_grpc.HealthStub(channel).Check
                reply = await check(
                    health_pb2.HealthCheckRequest(service="collectived.v1.Coordinator"), metadata=secret
                )
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
                stub = coordinator_pb2_grpc.CoordinatorStub(channel)
                status = await stub.Status(status_pb2.StatusRequest(), metadata=secret)
                assert status.coordinator.epoch == ready["epoch"]

    settings = CoordinatorSettings(job="job", listen=(f"unix:{path}", "127.0.0.1:0"), secret="s3cret")
    ready = served(settings, capsys, story, end)
    assert ready["address"] == f"unix:{path}" and ready["pid"] == os.getpid()
    assert int(ready["addresses"][1].removeprefix("127.0.0.1:")) > 0
    assert not path.exists()


def test_a_port_in_use_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SystemExit) as caught:
            asyncio.run(serve(CoordinatorSettings(job="job", listen=(address,), secret="s3cret")))
    assert caught.value.code == 1
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert f"cannot listen at {address}: address already in use; stop the process that uses it" in output.err


def test_a_socket_in_use_is_not_taken_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        with pytest.raises(SystemExit):
            asyncio.run(serve(CoordinatorSettings(job="job", listen=(f"unix:{path}",), secret="s3cret")))
    assert path.exists()
    assert f"unix:{path}: it is in use by another process" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address, reason",
    [
        ("unix:/nowhere/at/all", "the directory /nowhere/at does not exist"),
        (f"unix:/tmp/{'x' * 120}", "the path is longer than 107 bytes"),
        ("7450", "expected host:port or unix:/path"),
        ("localhost:http", "expected host:port or unix:/path"),
        ("192.0.2.1:0", "cannot assign requested address"),
    ],
)
def test_an_address_that_is_none_is_refused(address: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        asyncio.run(serve(CoordinatorSettings(job="job", listen=(address,), secret="s3cret")))
    assert caught.value.code == 1
    assert f"cannot listen at {address}: {reason}" in capsys.readouterr().err


def test_a_socket_that_a_killed_process_left_is_used_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    served(CoordinatorSettings(job="job", listen=(f"unix:{path}",), secret="s3cret"), capsys, nothing)


@pytest.mark.parametrize(("secret", "expected"), [("", "[0-9a-f]{64}"), ("s3cret", "")])
def test_workers_get_a_secret_for_links_where_the_job_has_none(
    secret: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = []

    async def story(ready: dict[str, Any]) -> None:
        async with grpc.aio.insecure_channel(ready["address"]) as channel:
            call = coordinator_pb2_grpc.CoordinatorStub(channel).Attach()
            await call.write(coordinator_pb2.WorkerMessage(hello=coordinator_pb2.Hello(task=0, incarnation="i")))
            given.append((await call.read()).welcome.link_secret)

    settings = CoordinatorSettings(job="job", listen=(f"unix:{tmp_path}/c",), secret=secret)
    served(settings, capsys, story)
    served(settings, capsys, story)
    assert all(re.fullmatch(expected, one) for one in given)
    assert len(given) == 2 and (given[0] != given[1] or secret)


def test_epochs_rise_over_restarts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "epoch"
    settings = CoordinatorSettings(job="job", listen=(f"unix:{tmp_path}/c",), secret="s3cret", journal=journal)
    first = served(settings, capsys, nothing)["epoch"]
    second = served(settings, capsys, nothing)["epoch"]
    assert first < second == int(journal.read_text())


def test_an_epoch_is_above_the_journal_even_where_the_clock_is_behind(tmp_path: Path) -> None:
    journal = tmp_path / "epoch"
    future = (time.time_ns() // 1_000_000) + 10**9
    journal.write_text(f"{future}\n")
    assert next_epoch(journal) == (future + 1, True)
    assert next_epoch(journal) == (future + 2, True)
    assert next_epoch(None)[0] < future and next_epoch(None)[1] is False
    assert next_epoch(tmp_path / "fresh")[1] is False


def test_a_journal_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "epoch"
    journal.write_text("yesterday\n")
    with pytest.raises(SystemExit):
        asyncio.run(serve(CoordinatorSettings(job="job", listen=(f"unix:{tmp_path}/c",), secret="", journal=journal)))
    assert f"{journal} holds 'yesterday" in capsys.readouterr().err
