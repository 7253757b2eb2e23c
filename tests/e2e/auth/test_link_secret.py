"""Daemons that somebody starts without a secret: links are proved with one that their coordinator makes."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import text_format
from tests.waiting import settle

import collectived as cd
from collectived.testing.daemon import Daemon
from collectived_proto.addresses import parse_address
from collectived_proto.v1 import coordinator_pb2, coordinator_pb2_grpc, status_pb2, trace_pb2
from collectived_runtime.transport.hello import ANSWER_BYTES, NONCE_BYTES, LinkHello

pytestmark = pytest.mark.timeout(240)
PATIENCE = 60.0  # for an answer: a busy machine may take its time, and no promise is about it


class Job:
    """A coordinator and two workers of which none has been given a secret."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
        self.coordinator_address = f"unix:{self.folder}/c.sock"
        self.started: list[Daemon] = []
        self.coordinator, _ = self.start("coordinator", "--listen", self.coordinator_address)
        told = [self._worker(task) for task in range(2)]
        self.addresses = [str(one["address"]) for one in told]
        self.link_addresses = [str(one["link_address"]) for one in told]

    def start(self, *arguments: str) -> tuple[Daemon, dict[str, Any]]:
        self.started.append(Daemon([*arguments, "--job", "test", "--log-level", "debug"], ""))
        return self.started[-1], self.started[-1].wait_ready(30)

    def _worker(self, task: int) -> dict[str, Any]:
        place = ("--folder", str(self.folder), "--host-name", f"host{task}", "--coordinator", self.coordinator_address)
        return self.start("worker", "--task", str(task), *place)[1]

    def given(self) -> str:
        """The secret for links, as a third worker gets it."""
        with grpc.insecure_channel(self.coordinator_address) as channel:
            hello = coordinator_pb2.WorkerMessage(hello=coordinator_pb2.Hello(task=7, incarnation=os.urandom(4).hex()))
            goodbye = coordinator_pb2.WorkerMessage(goodbye=coordinator_pb2.Goodbye())
            welcome, *_ = coordinator_pb2_grpc.CoordinatorStub(channel).Attach(iter([hello, goodbye]), timeout=PATIENCE)
        return str(welcome.welcome.link_secret)

    def shown(self) -> Iterator[str]:
        """All that these daemons show people."""
        with grpc.insecure_channel(self.coordinator_address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            yield text_format.MessageToString(stub.Status(status_pb2.StatusRequest(), timeout=PATIENCE))
            for part in stub.Trace(trace_pb2.TraceRequest(), timeout=PATIENCE):
                yield text_format.MessageToString(part)
        for daemon in self.started:
            yield daemon.log
            yield Path(f"/proc/{daemon.process.pid}/cmdline").read_bytes().decode()

    def until_both_are_back(self) -> None:
        with grpc.insecure_channel(self.coordinator_address) as channel:
            ask = coordinator_pb2_grpc.CoordinatorStub(channel).Status

            def both_are_back() -> bool:
                workers = ask(status_pb2.StatusRequest(local_only=True), timeout=PATIENCE, wait_for_ready=True).workers
                return [worker.connected for worker in workers] == [True, True]

            settle(both_are_back)

    def close(self) -> None:
        try:
            for daemon in reversed(self.started):
                daemon.close()
            assert os.listdir(self.folder) == []
        finally:
            shutil.rmtree(self.folder)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


def test_ranks_meet_and_still_dial_after_a_restart_of_the_coordinator_and_nobody_else_comes_in(job: Job) -> None:
    with cd.connect(job.addresses[0]) as here, cd.connect(job.addresses[1]) as there, ThreadPoolExecutor(2) as pool:

        def joined(name: str) -> list[cd.Group]:
            asked = [
                pool.submit(one.join, name, 2, rank=rank, timeout=PATIENCE) for rank, one in enumerate((here, there))
            ]
            return [one.result() for one in asked]

        def summed(groups: list[cd.Group]) -> list[Any]:
            return list(pool.map(lambda group: group.all_reduce("sum", group.rank + 1), groups))

        quick, late = joined("quick"), joined("late")
        assert summed(quick) == [3, 3]
        secret = job.given()
        assert re.fullmatch("[0-9a-f]{64}", secret)

        job.coordinator.kill()
        job.coordinator.close()
        job.started.remove(job.coordinator)
        job.start("coordinator", "--listen", job.coordinator_address)
        job.until_both_are_back()
        assert job.given() == secret, "the first worker that came back has brought it"
        assert summed(late) == [3, 3]
        assert not any(secret in text for text in job.shown())

        said = LinkHello(0, 1, 7, 100, 3, bytes(NONCE_BYTES)).encode()
        with socket.create_connection(parse_address(job.link_addresses[1]), timeout=PATIENCE) as guest:
            guest.sendall(said)
            answer = guest.recv(ANSWER_BYTES, socket.MSG_WAITALL)
            empty = hmac.new(b"", b"dial" + said + answer[:NONCE_BYTES], hashlib.sha256).digest()
            assert (
                answer[NONCE_BYTES:] != hmac.new(b"", b"accept" + said + answer[:NONCE_BYTES], hashlib.sha256).digest()
            )
            guest.sendall(empty)
            assert guest.recv(1) == b""
        for group in (*quick, *late):
            group.leave()
