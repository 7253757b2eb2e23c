"""`collectived trace` on real daemons: with a rank missing, a worker stopped, no coordinator, another clock."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.e2e.conftest import Cluster, Daemon
from tests.trace_event_format import parsed
from tests.waiting import settle

from collectived_proto.v1 import trace_pb2, worker_pb2_grpc

_groups = itertools.count()
PATIENCE = 30.0
RANK = """
import numpy as np, collectived as cd
with cd.connect() as session, session.join() as group:
    for _ in range(5):
        group.all_reduce("sum", np.ones(1000, np.float32))
    print("ready", flush=True)
    if group.rank == 2:
        input()
    group.barrier()
    print("done", flush=True)
"""


def traced(cluster: Cluster, folder: Path, *options: str, worker: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trace in the file, checked against its format's rules, and what the command says of it."""
    file = folder / "trace.json"
    command = [sys.executable, "-m", "collectived_launcher", "trace", "--worker", cluster.addresses[worker]]
    done = subprocess.run(
        [*command, "-o", str(file), "--json", *options], text=True, capture_output=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return parsed(file.read_text()), json.loads(done.stdout)


class Hanging:
    """Four ranks of which rank 2 waits to be told before it comes to instance 5."""

    def __init__(self, cluster: Cluster) -> None:
        self.group = f"group-{next(_groups)}"
        self.clients = [cluster.client(rank, 4, self.group, RANK) for rank in range(4)]
        for client in self.clients:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n", client.stderr and client.stderr.read()
        settle(lambda: self.arrived(cluster) == {0, 1, 3})

    def arrived(self, cluster: Cluster) -> set[int]:
        status = cluster.status()
        return {
            rank
            for group in status.groups
            if group.name.endswith(self.group)
            for flight in group.in_flight
            for rank in flight.arrived
        }

    def release(self) -> None:
        assert self.clients[2].stdin is not None
        self.clients[2].stdin.write("\n")
        self.clients[2].stdin.flush()
        for client in self.clients:
            assert client.stdout is not None
            assert client.stdout.readline() == "done\n"

    def close(self) -> None:
        for client in self.clients:
            with client:
                client.kill()


@pytest.fixture
def hanging(two_workers: Cluster) -> Iterator[Hanging]:
    ranks = Hanging(two_workers)
    yield ranks
    ranks.close()


def collectives(trace: dict[str, Any], instance: int) -> list[dict[str, Any]]:
    events = [event for event in trace["traceEvents"] if event.get("cat") == "collective"]
    return [event for event in events if event["args"]["instance"] == instance]


@pytest.mark.timeout(120)
def test_one_of_four_is_missing_and_afterwards_it_is_not(
    two_workers: Cluster, hanging: Hanging, tmp_path: Path
) -> None:
    trace, said = traced(two_workers, tmp_path, "--group", hanging.group)
    assert sorted(event["args"]["rank"] for event in collectives(trace, 5)) == [0, 1, 3]
    assert {event["args"]["outcome"] for event in collectives(trace, 5)} == {"in flight"}
    (absent,) = [event for event in trace["traceEvents"] if event.get("cat") == "absence"]
    assert (absent["name"], absent["pid"]) == ("rank 2 has not arrived", 1)
    args = absent["args"]
    assert (args["op"], args["site"], args["pid"]) == ("barrier()", "<string>:9", hanging.clients[2].pid)
    assert (args["last_op"], args["last_site"], args["last_instance"]) == ("all_reduce(sum)", "<string>:5", 4)
    assert said["absences"] == [args] and said["missing_workers"] == []
    for instance in range(5):
        events = collectives(trace, instance)
        assert sorted(event["args"]["rank"] for event in events) == [0, 1, 2, 3]
        assert {event["args"]["outcome"] for event in events} == {"OK"}
        assert {event["args"]["site"] for event in events} == {"<string>:5"}
    moves = [event for event in trace["traceEvents"] if event.get("cat") == "move"]
    assert {event["name"] for event in moves if event["pid"] == 0} == {"send to worker 1", "receive from worker 1"}
    assert sum(event["ph"] == "s" for event in trace["traceEvents"]) >= 5
    hanging.release()
    whole = settle(lambda: _complete(traced(two_workers, tmp_path, "--group", hanging.group, worker=1)[0]))
    assert not [event for event in whole["traceEvents"] if event.get("cat") == "absence"]


def test_what_ranks_of_one_worker_have_carried_out_themselves_is_there(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(1)
    cluster.run(2, lambda group: [group.barrier() for _ in range(600)], name=(name := f"group-{next(_groups)}"))
    trace, _ = traced(cluster, tmp_path, "--group", name)
    for instance in range(600 - 512, 600):
        events = collectives(trace, instance)
        assert sorted(event["args"]["rank"] for event in events) == [0, 1], instance
        assert {event["args"]["outcome"] for event in events} == {"OK"}
        (site,) = {event["args"]["site"] for event in events}
        assert site.startswith(f"{Path(__file__).name}:")


def _complete(trace: dict[str, Any]) -> dict[str, Any] | None:
    """Ranks hear that they are done a moment before it is recorded."""
    events = collectives(trace, 5)
    return trace if len(events) == 4 and all(event["args"]["outcome"] == "OK" for event in events) else None


@pytest.mark.timeout(120)
def test_a_stopped_worker_is_named_as_missing_and_a_stopped_coordinator_leaves_what_one_worker_knows(
    two_workers: Cluster, hanging: Hanging, tmp_path: Path
) -> None:
    stopped = two_workers.workers[1].process
    stopped.send_signal(signal.SIGSTOP)
    try:
        trace, said = traced(two_workers, tmp_path, "--group", hanging.group)
    finally:
        stopped.send_signal(signal.SIGCONT)
    assert said["missing_workers"] == [{"task": 1, "host": "host1"}]
    assert any("worker 1 (host host1) did not answer" in warning for warning in said["warnings"])
    assert sorted(event["args"]["rank"] for event in collectives(trace, 5)) == [0, 1]
    assert said["absences"] == []  # of those who are not heard nothing is claimed
    coordinator = two_workers.coordinator.process
    coordinator.send_signal(signal.SIGSTOP)
    try:
        trace, said = traced(two_workers, tmp_path, "--group", hanging.group)
    finally:
        coordinator.send_signal(signal.SIGCONT)
    assert [worker["task"] for worker in said["workers"]] == [0]
    assert "the coordinator at" in said["warnings"][0]
    assert said["warnings"][-1] == "this is what one worker has recorded"
    assert sorted(event["args"]["rank"] for event in collectives(trace, 5)) == [0, 1]


@pytest.mark.timeout(120)
def test_ranks_whose_worker_was_killed_are_lost_whether_they_had_come_or_not(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(2)
    ranks = Hanging(cluster)  # of those of worker 1, rank 3 has come and rank 2 has not
    try:
        cluster.workers[1].process.kill()
        cluster.workers[1].process.wait(PATIENCE)
        asked = ("--group", ranks.group)
        said = settle(lambda: _with_losses(traced(cluster, tmp_path, *asked)[1]))
    finally:
        ranks.close()
        for socket in cluster.folder.glob("*-1.sock"):  # who is killed cannot tidy up
            socket.unlink()
    assert [(one["text"], one["worker"]) for one in said["absences"]] == [
        ("rank 2 was lost", 1),
        ("rank 3 was lost", 1),
    ]


def _with_losses(said: dict[str, Any]) -> dict[str, Any] | None:
    return said if any(one["outcome"] == "lost" for one in said["absences"]) else None


def test_an_answer_travels_in_parts_and_says_what_it_left_out(two_workers: Cluster) -> None:
    two_workers.run(4, lambda group: [group.barrier() for _ in range(1000)], name=(name := f"group-{next(_groups)}"))

    def ask(**wishes: Any) -> list[trace_pb2.TraceReply]:
        with grpc.insecure_channel(two_workers.addresses[0]) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            return list(stub.Trace(trace_pb2.TraceRequest(group=name, **wishes), timeout=PATIENCE))

    replies = settle(lambda: found if _told(found := ask()) == [1000, 1000] else None)
    assert all(reply.ByteSize() < 1 << 20 for reply in replies)
    assert replies[-1].last and not replies[-1].silent
    parts = [reply.worker for reply in replies if reply.HasField("worker")]
    assert sorted(part.task for part in parts if part.last) == [0, 1]
    ended = [
        [(place.task, list(place.ranks)) for place in group_loop.places] for part in parts for group_loop in part.lanes
    ]
    assert ended == [[(0, [0, 1]), (1, [2, 3])]] * 2, "the group has ended, and where its ranks were is known"
    few = ask(most_bytes=10_000)
    assert all(0 < count < 200 for count in _told(few))
    left = [reply.worker.left_out for reply in few if reply.worker.last]
    assert [count + rest for count, rest in zip(_told(few), left, strict=True)] == [1000, 1000]
    assert _told(ask(last_seconds=1e-9)) == [0, 0]


def _told(replies: list[trace_pb2.TraceReply]) -> list[int]:
    """How many collectives each worker tells of, in the order in which they end their answers."""
    counts: dict[int, int] = {}
    for reply in replies:
        if reply.HasField("worker"):
            task = reply.worker.task
            counts[task] = counts.get(task, 0) + len(reply.worker.collectives)
    return [counts[reply.worker.task] for reply in replies if reply.worker.last]


AHEAD = 5000.0  # seconds
ELSEWHERE = ("unshare", "--time", "--monotonic", f"{AHEAD:.0f}", "--fork", "--kill-child")


@pytest.fixture
def another_clock() -> tuple[str, ...]:
    """What starts a process whose monotonic clock is `AHEAD` of ours."""
    try:
        tried = subprocess.run([*ELSEWHERE, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare (util-linux) is not installed")
    if tried.returncode:
        pytest.skip(f"no time namespace can be made here: {tried.stderr.strip()}")
    return ELSEWHERE


@pytest.mark.timeout(120)
def test_a_worker_with_another_clock_is_put_right_within_the_error_that_is_told(
    one_worker: Cluster, another_clock: tuple[str, ...], tmp_path: Path
) -> None:
    place = ("--folder", str(one_worker.folder), "--coordinator", one_worker.coordinator_address)
    far = Daemon("worker", "--task", "7", *place, "--host-name", "far", within=another_clock)
    try:
        far.wait_ready()
        _, said = traced(one_worker, tmp_path)
    finally:
        far.close()
    clocks = {worker["task"]: worker for worker in said["workers"]}
    assert (clocks[0]["clock_from"], clocks[0]["clock_offset_seconds"]) == ("same clock", 0.0)
    assert clocks[7]["clock_from"] in ("asked", "heartbeat")
    wrong = abs(clocks[7]["clock_offset_seconds"] + AHEAD)
    assert clocks[7]["clock_error_seconds"] > 0.0 and wrong <= clocks[7]["clock_error_seconds"] + 1e-6
    assert said["clock_error_seconds"] == clocks[7]["clock_error_seconds"]
