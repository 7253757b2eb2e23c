"""Draining with real daemons: what runs finishes, nothing new begins, and what was cut is told."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.waiting import settle

import collectived as cd
from collectived_proto.v1 import coordinator_pb2_grpc, status_pb2, worker_pb2_grpc

PATIENCE = 60.0  # for facts that come in a second or two: a busy machine may take its time, and no promise is about it
pytestmark = pytest.mark.timeout(240)


class Draining:
    """Two workers with a rank each, in the same group; drains go on beside the test."""

    def __init__(self, cluster: Any, ranks: contextlib.ExitStack) -> None:
        self.cluster = cluster
        self._pool = ranks.enter_context(ThreadPoolExecutor(4))
        self.sessions = [ranks.enter_context(cd.connect(address)) for address in cluster.addresses]
        joining = [self.spawn(functools.partial(self.sessions[rank].join, "g", 2, rank=rank)) for rank in (0, 1)]
        self.groups = [one.result(PATIENCE) for one in joining]

    def spawn(self, call: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(call)

    def ask(self, worker: int, **request: Any) -> status_pb2.DrainReply:
        request = {"timeout_seconds": PATIENCE, **request}
        with grpc.insecure_channel(self.cluster.addresses[worker]) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            reply: status_pb2.DrainReply = stub.Drain(status_pb2.DrainRequest(**request), timeout=2 * PATIENCE)
        return reply

    def refused(self) -> bool:
        """Whether the group is drained: what comes now is refused."""
        status = self.cluster.status()
        return [group.state for group in status.groups if group.name.endswith("g")] == ["draining"]


@pytest.fixture
def two(make_cluster: Callable[..., Any]) -> Iterator[Draining]:
    with contextlib.ExitStack() as ranks:
        yield Draining(make_cluster(2), ranks)


def ended_well(cluster: Any, worker: int) -> None:
    assert cluster.workers[worker].process.wait(PATIENCE) == 0, cluster.log


def errors_of(two: Draining) -> list[cd.errors.CollectiveError]:
    found: list[cd.errors.CollectiveError] = []
    for group in two.groups:
        with pytest.raises(cd.errors.UnavailableError) as caught:
            group.all_reduce("sum", 1.0)
        found.append(caught.value)
    return found


def test_what_runs_finishes_and_what_is_new_is_refused_on_all_ranks(two: Draining) -> None:
    first = [group.all_reduce("sum", 1.0, async_op=True) for group in two.groups]
    assert [work.wait(PATIENCE) for work in first] == [2.0, 2.0]
    running = two.groups[0].all_reduce("sum", 3.0, async_op=True)
    drained = two.spawn(lambda: two.ask(1, stay=True))
    settle(two.refused)
    status = two.cluster.status()
    assert [worker.draining for worker in status.workers] == [False, True]
    # A rank that comes to what runs is let in; nothing was cut.
    assert two.groups[1].all_reduce("sum", 4.0) == 7.0
    assert running.wait(PATIENCE) == 7.0
    reply = drained.result(PATIENCE)
    assert (list(reply.workers), list(reply.groups), list(reply.cut)) == ([1], ["g"], [])
    # What comes later fails on all ranks with the same words, and letters still go.
    first_error, second = errors_of(two)
    assert "worker 1 (host host1) is draining: group 'g' begins nothing from #2 on" in str(first_error)
    assert str(first_error).partition(" (")[0] == str(second).partition(" (")[0]
    assert first_error.rejoin and second.rejoin


def test_a_drained_worker_that_stays_takes_no_new_ranks(two: Draining) -> None:
    assert not two.ask(1, stay=True).cut
    with pytest.raises(
        cd.errors.UnavailableError, match="worker 1 .host host1. is draining and takes no new ranks: con"
    ):
        two.sessions[1].join("other", 1)
    with two.sessions[0].join("other", 1) as group:
        assert group.all_reduce("sum", 1.0) == 1.0
    for worker, expected in enumerate(("SERVING", "NOT_SERVING")):
        with grpc.insecure_channel(two.cluster.addresses[worker]) as channel:
            found = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health_pb2.HealthCheckResponse.ServingStatus.Name(found.status) == expected
    assert two.cluster.workers[1].process.poll() is None


def test_a_rank_that_does_not_come_is_named_and_what_waits_for_it_is_cut(two: Draining) -> None:
    waiting = two.groups[0].all_reduce("sum", 3.0, async_op=True)
    done = subprocess.run(
        [sys.executable, "-m", "collectived_launcher", "drain", "--worker", two.cluster.addresses[1]]
        + ["--timeout", "1500ms", "--json"],
        text=True,
        capture_output=True,
        timeout=2 * PATIENCE,
    )
    assert done.returncode == 1, done.stderr
    [cut] = json.loads(done.stdout)["cut"]
    assert (cut["group"], cut["instance"], cut["op"], cut["missing"]) == ("g", "0", "all_reduce(sum)", [1])
    assert "test_worker_drain.py:" in cut["site"]
    with pytest.raises(cd.errors.UnavailableError) as caught:
        waiting.wait(PATIENCE)
    assert "was drained: all_reduce(sum) #0 of group 'g' did not finish within 1.5" in str(caught.value)
    assert [member.rank for member in caught.value.missing] == [1]
    ended_well(two.cluster, 1)


def test_sigterm_drains_a_worker(two: Draining) -> None:
    running = two.groups[0].all_reduce("sum", 3.0, async_op=True)
    two.cluster.workers[1].process.send_signal(signal.SIGTERM)
    settle(two.refused)
    assert two.groups[1].all_reduce("sum", 4.0) == 7.0
    assert running.wait(PATIENCE) == 7.0
    ended_well(two.cluster, 1)
    with pytest.raises(cd.errors.UnavailableError, match="worker 1 .host host1. is draining"):
        two.groups[0].all_reduce("sum", 1.0)


def test_workers_of_one_group_are_drained_side_by_side(two: Draining) -> None:
    def loop(group: cd.Group) -> str:
        while True:
            try:
                group.all_reduce("sum", 1.0)
            except cd.errors.UnavailableError as error:
                return str(error)

    ranks = [two.spawn(functools.partial(loop, group)) for group in two.groups]
    replies = [two.spawn(functools.partial(two.ask, worker)) for worker in (0, 1)]
    for worker, reply in enumerate(one.result(2 * PATIENCE) for one in replies):
        assert (list(reply.workers), list(reply.cut), list(reply.notes)) == ([worker], [], [])
    errors = [rank.result(PATIENCE).partition(" (")[0] for rank in ranks]
    assert len(set(errors)) == 1 and "is draining" in ranks[0].result()
    for worker in (0, 1):
        ended_well(two.cluster, worker)


def test_a_rank_that_comes_when_its_worker_has_ended_hears_that_it_was_drained(two: Draining) -> None:
    first = [group.all_reduce("sum", 1.0, async_op=True) for group in two.groups]
    assert [work.wait(PATIENCE) for work in first] == [2.0, 2.0]
    assert not two.ask(1).cut
    ended_well(two.cluster, 1)
    for error in reversed(errors_of(two)):
        assert "worker 1 (host host1) is draining: group 'g' begins nothing from #1 on" in str(error)
        assert "join it again at workers that stay" in str(error)


def test_a_worker_whose_launcher_is_gone_says_so(two: Draining) -> None:
    waiting = two.groups[0].all_reduce("sum", 3.0, async_op=True)
    standard_input = two.cluster.workers[1].process.stdin
    assert standard_input is not None
    standard_input.close()
    ended_well(two.cluster, 1)
    with pytest.raises(cd.errors.UnavailableError, match="worker 1 went away: its launcher is gone"):
        waiting.wait(PATIENCE)


def test_a_second_sigterm_ends_a_worker_at_once(two: Draining) -> None:
    waiting = two.groups[0].all_reduce("sum", 3.0, async_op=True)
    two.cluster.workers[1].process.send_signal(signal.SIGTERM)
    settle(two.refused)
    two.cluster.workers[1].process.send_signal(signal.SIGTERM)
    ended_well(two.cluster, 1)
    with pytest.raises(cd.errors.UnavailableError):
        waiting.wait(PATIENCE)


def test_a_group_is_drained_on_all_its_workers_which_go_on_with_others(two: Draining) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "collectived_launcher", "drain", "--group", "g"],
        env={**os.environ, "COLLECTIVED_WORKER": two.cluster.addresses[0]},
        text=True,
        capture_output=True,
        timeout=2 * PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, "group 'g' begins nothing new\nall that ran has finished\n"), (
        done.stderr
    )
    for error in errors_of(two):
        assert "group 'g' is draining: it begins nothing from #0 on" in str(error)
    again = [two.spawn(functools.partial(group.rejoin, timeout=PATIENCE)) for group in two.groups]
    assert [one.result(PATIENCE).size for one in again] == [2, 2]


def test_letters_that_wait_are_cut_and_told(two: Draining) -> None:
    waiting = two.groups[1].recv(0, async_op=True)
    settle(lambda: [group.posts for group in two.cluster.status().groups if group.posts])
    reply = two.ask(1, timeout_seconds=0.3)
    assert [(cut.instance, cut.op) for cut in reply.cut] == [(-1, "recv(source=0, tag=0)")]
    with pytest.raises(cd.errors.UnavailableError):
        waiting.wait(PATIENCE)


def test_without_a_coordinator_a_worker_waits_for_a_quiet_moment(two: Draining) -> None:
    two.cluster.coordinator.process.kill()
    two.cluster.coordinator.process.wait()
    (two.cluster.folder / "c.sock").unlink()
    settle(lambda: not any(worker.connected for worker in two.cluster.status().workers))
    running = two.groups[0].all_reduce("sum", 3.0, async_op=True)
    settle(lambda: two.cluster.status().workers[0].lanes[0].in_flight)
    drained = two.spawn(lambda: two.ask(0, stay=True))
    assert two.groups[1].all_reduce("sum", 4.0) == 7.0
    assert running.wait(PATIENCE) == 7.0
    reply = drained.result(PATIENCE)
    assert list(reply.workers) == [0] and not reply.cut and "the coordinator is away" in reply.notes[0]


def test_what_cannot_be_drained_is_said(two: Draining) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        two.ask(0, host="nowhere")
    assert "no worker is on host 'nowhere'; hosts: host0, host1" in str(caught.value)


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -1.0])
def test_a_timeout_that_no_clock_can_count_to_drains_nothing(two: Draining, timeout: float) -> None:
    with grpc.insecure_channel(two.cluster.coordinator_address) as channel:
        asked = [
            coordinator_pb2_grpc.CoordinatorStub(channel).Drain,
            lambda request: two.ask(0, timeout_seconds=timeout),
        ]
        for ask in asked:
            with pytest.raises(grpc.RpcError) as caught:
                ask(status_pb2.DrainRequest(task=0, timeout_seconds=timeout))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"from 0 to 31536000 (a year), got {timeout!r}" in str(caught.value)
    assert not any(worker.draining for worker in two.cluster.status().workers)
