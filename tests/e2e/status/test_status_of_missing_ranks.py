"""`collectived status` beside real daemons and clients of which one does not come, and with daemons stopped."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from tests.waiting import settle

from collectived_launcher.status.discovery import Target, Unreachable, request_status
from collectived_proto.ipc import job_files
from collectived_proto.report.findings import FindingKind, collect_findings
from collectived_proto.types import RELEASE
from collectived_proto.v1 import coordinator_pb2_grpc
from collectived_proto.v1 import status_pb2 as pb

PATIENCE = 30.0  # seconds for what is promised much sooner: other tests run beside these
LATE = 3  # the rank that does not come

CLIENT = """
import sys
import numpy as np
import collectived as cd
with cd.connect() as session, session.join(timeout=60) as group:
    for _ in range(3):
        group.all_reduce("sum", np.ones(1000, np.float32))
    print("ready", flush=True)
    if group.rank == 3:
        sys.stdin.readline()
    group.barrier()
"""


@dataclass
class Job:
    target: Target
    late: subprocess.Popen[str]
    cluster: Any
    environment: dict[str, str]  # of a shell in which nothing is set


@pytest.fixture(scope="module")
def job(make_cluster: Any) -> Iterator[Job]:
    """Two workers with two ranks each, three of which wait in a barrier for the fourth."""
    cluster = make_cluster(2)
    clients = [cluster.fresh_client(rank, 4, "train", CLIENT) for rank in range(4)]
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        try:
            for client in clients:
                assert client.stdout and client.stdout.readline() == "ready\n", client.communicate()
            patch.setenv("XDG_RUNTIME_DIR", folder)
            addresses = tuple(cluster.addresses)
            job_files.write_job_file(
                job_files.JobFile("j", os.getpid(), cluster.coordinator_address, addresses, "python train.py")
            )
            target = Target(addresses, "test", cluster.coordinator_address)
            yield Job(target, clients[LATE], cluster, {"XDG_RUNTIME_DIR": folder, "COLUMNS": "500"})
        finally:
            assert clients[LATE].stdin
            clients[LATE].stdin.write("\n")
            clients[LATE].stdin.flush()
            ended = [client.communicate(timeout=PATIENCE) for client in clients]
    assert [client.returncode for client in clients] == [0] * 4, ended  # stopping daemons for a while has hurt nobody


def until(target: Target, fact: Callable[[pb.StatusReply], object]) -> pb.StatusReply:
    """What is told as soon as it is so."""
    reply = None

    def told() -> pb.StatusReply | None:
        nonlocal reply
        with contextlib.suppress(Unreachable):
            reply = request_status(target)
            return reply if fact(reply) else None
        return None

    try:
        return settle(told, PATIENCE)
    except AssertionError as error:
        raise AssertionError(f"it did not come about: {reply}") from error


def late(reply: pb.StatusReply) -> bool:
    """Whether a collective is known to wait for that rank alone."""
    return [list(flight.missing) for group in reply.groups for flight in group.in_flight] == [[LATE]]


def named(reply: pb.StatusReply) -> bool:
    """Whether that has lasted long enough to hurt."""
    return any(finding.kind is FindingKind.MISSING for finding in collect_findings(reply))


@contextlib.contextmanager
def stopped(*daemons: Any) -> Iterator[None]:
    for daemon in daemons:
        daemon.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for daemon in daemons:
            daemon.process.send_signal(signal.SIGCONT)


def test_the_rank_that_is_missing_is_named_in_a_shell_without_variables(job: Job) -> None:
    named = (
        r"^WAITING  group \S+: barrier\(\) #3 at \S+:\d+ has waited \d+\.\d s for "
        rf"rank {LATE} \(host host1, pid {job.late.pid}\), "
        r"which last called all_reduce\(sum\) #2 at \S+:\d+, \d+\.\d s ago; now: <string>:10 in <module>$"
    )
    deadline, said = time.monotonic() + PATIENCE, ""
    while not re.search(named, said, re.M):
        assert time.monotonic() < deadline, said
        command = [sys.executable, "-m", "collectived_launcher", "status"]
        said = subprocess.run(command, env=job.environment, text=True, capture_output=True, timeout=PATIENCE).stdout


def test_what_waits_is_told_with_who_has_come_and_why_it_is_carried_so(job: Job) -> None:
    reply = until(job.target, late)
    (group,) = reply.groups
    (flight,) = group.in_flight
    assert (flight.op, flight.instance, list(flight.arrived), flight.state) == ("barrier()", 3, [0, 1, 2], "arriving")
    assert (flight.algorithm, flight.packs, flight.packs_done) == ("one_shot", 1, 0)
    assert flight.why.startswith("table of AUTO for 1 byte: ")
    assert [list(worker.client_releases) for worker in reply.workers] == [[RELEASE]] * 2
    assert all(0 < worker.arena_bytes < worker.arena_limit_bytes for worker in reply.workers)


def test_the_coordinator_answers_whoever_asks_it(job: Job) -> None:
    until(job.target, late)
    with grpc.insecure_channel(job.cluster.coordinator_address) as channel:
        reply = coordinator_pb2_grpc.CoordinatorStub(channel).Status(pb.StatusRequest(), timeout=PATIENCE)
    assert reply.answered_by == "coordinator" and reply.coordinator.address == job.cluster.coordinator_address


def test_without_the_coordinator_workers_tell_together_who_is_missing(job: Job) -> None:
    until(job.target, late)
    with stopped(job.cluster.coordinator):
        reply = until(job.target, lambda reply: not reply.coordinator.address and late(reply) and named(reply))
    assert sorted(reply.answered_by.split(", ")) == ["/job:worker/task:0", "/job:worker/task:1"]
    assert [group.state for group in reply.groups] == ["partial"] and not reply.coordinator.address
    warning, missing = collect_findings(reply)
    assert (warning.kind, missing.ranks) == (FindingKind.INCOMPLETE, (LATE,))
    assert f"rank {LATE} (host host1, pid {job.late.pid})" in missing.sentence
    assert "which last called all_reduce(sum) #2 at" in missing.sentence


@pytest.fixture(scope="module")
def idle(make_cluster: Any) -> Any:
    """Two workers without a rank, that tests may stop for a while."""
    return make_cluster(2)


def test_what_is_missing_from_an_answer_without_the_coordinator_is_said(idle: Any) -> None:
    target = Target(tuple(idle.addresses), "test", idle.coordinator_address)
    with stopped(idle.coordinator, idle.workers[1]):
        reply = until(target, lambda reply: len(reply.workers) == 1)
    assert reply.answered_by == "/job:worker/task:0"
    assert any(f"the worker at {idle.addresses[1]} does not answer" in text for text in reply.warnings)


def test_with_all_workers_stopped_the_coordinator_tells_what_it_knows(idle: Any) -> None:
    target = Target(tuple(idle.addresses), "test", idle.coordinator_address)
    with stopped(*idle.workers):
        reply = until(target, lambda reply: all(one.silent or not one.connected for one in reply.workers))
    assert reply.answered_by == "coordinator" and len(reply.workers) == 2
