"""What people are told of running groups: who waits for whom, where lost ranks stood, and how one who left differs."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from tests.waiting import settle

import collectived as cd
from collectived_proto.types import ANY_SOURCE
from collectived_proto.v1 import coordinator_pb2_grpc, status_pb2


def until(cluster: Any, fact: Any) -> status_pb2.GroupStatus:
    """Asks for status until a group is as `fact` says; the test's own time limit ends it otherwise."""

    def looked() -> status_pb2.GroupStatus | None:
        return next(filter(fact, cluster.status().groups), None)

    return settle(looked)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("source", [0, None])
def test_status_tells_which_rank_waits_for_a_letter_of_which(
    request: pytest.FixtureRequest, workers: int, async_op: bool, source: int | None
) -> None:
    cluster: Any = request.getfixturevalue("one_worker" if workers == 1 else "two_workers")
    seen = threading.Event()

    def body(group: cd.Group) -> Any:
        if group.rank == 0:
            told = until(cluster, lambda one: one.name.endswith(group.name) and one.posts)
            seen.set()
            group.send(np.ones(3), 1, tag=5)
            return told
        received = group.recv(source, tag=5, async_op=async_op)
        return received.result() if async_op else received

    told, letter = cluster.run(2, body)
    assert seen.is_set() and letter.tolist() == [1, 1, 1]
    (post,) = told.posts
    peer = ANY_SOURCE if source is None else source
    assert (post.rank, post.peer, post.tag, post.op) == (1, peer, 5, f"recv(source={source}, tag=5)")
    assert "test_status_of_waiting_and_lost_ranks.py" in post.site and post.seconds >= 0
    until(cluster, lambda one: one.generation == told.generation and not one.posts)


def test_status_says_that_the_hint_nccl_is_not_followed(two_workers: Any) -> None:
    options = cd.CommunicationOptions(implementation=cd.CommunicationImplementation.NCCL)

    def body(group: cd.Group) -> Any:
        group.all_reduce("sum", np.ones(3), options=options)
        told = until(two_workers, lambda one: one.name.endswith(group.name))
        group.barrier()
        return list(told.notes)

    assert two_workers.run(2, body) == [["on CPU devices: the hint NCCL falls back to RING"]] * 2


def test_a_rank_that_differs_from_a_root_that_has_left_hears_how(two_workers: Any) -> None:
    gone = threading.Event()

    def body(group: cd.Group) -> Any:
        if group.rank == 0:
            group.broadcast(np.ones((4, 8)))
            group.leave()
            until(two_workers, lambda one: any(m.rank == 0 for m in one.left) and one.name.endswith(group.name))
            gone.set()
            return None
        assert gone.wait(20)
        with pytest.raises(cd.errors.InvalidArgumentError) as caught:
            group.broadcast(np.ones((4, 9)))
        return caught.value

    error = two_workers.run(2, body)[1]
    assert [member.rank for member in error.differing] == [1]
    text = str(error)
    assert "rank 1 differs: the value is float64[4, 9] there, float64[4, 8] on rank 0" in text
    assert text.count("test_status_of_waiting_and_lost_ranks.py:") == 2  # both source lines


def until_known(cluster: Any, last_instances: list[int]) -> None:
    """Asks the coordinator for what it knows by itself, without asking the workers."""
    with grpc.insecure_channel(cluster.coordinator_address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)

        def known() -> list[int]:
            reply = stub.Status(status_pb2.StatusRequest(local_only=True))
            return [member.last_instance for group in reply.groups for member in group.members]

        settle(lambda: known() == last_instances)


CLIENT = """
import sys
import numpy as np
import collectived as cd
with cd.connect() as session, session.join(timeout=20) as group:
    for _ in range(3):
        group.all_reduce("sum", np.ones(3))
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        group.all_reduce("sum", np.ones(3))
    except cd.errors.UnavailableError as error:
        print(error.missing[0].last_instance, str(error).replace("\\n", " "), flush=True)
"""


def test_where_the_ranks_of_a_killed_worker_stood_is_known_from_its_heartbeats(make_cluster: Any) -> None:
    cluster = make_cluster(2, options=("--heartbeat", "0.2"))
    clients = [cluster.fresh_client(rank, 2, "train", CLIENT) for rank in range(2)]
    try:
        for client in clients:
            assert client.stdout and client.stdout.readline() == "ready\n"
        until_known(cluster, [2, 2])
        cluster.workers[1].process.kill()
        out, err = clients[0].communicate("\n", timeout=30)
        assert not err
        last, _, text = out.partition(" ")
        assert last == "2" and "rank 1 (" in text and "last finished #2, last did all_reduce(sum) #2 at" in text
    finally:
        for client in clients:
            client.kill()
            client.communicate()
        cluster.workers.pop().close()
        for name in ("door-1.sock", "worker-1.sock"):  # which a killed one cannot remove
            (cluster.folder / name).unlink(missing_ok=True)


@pytest.mark.parametrize("transport", ["shared memory", "grpc"])
def test_a_group_that_a_rank_has_aborted_fails_and_has_ended_when_that_rank_has_left_too(
    two_workers: Any, transport: str
) -> None:
    ways = two_workers.addresses if transport == "shared memory" else two_workers.tcp_addresses
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        sessions = [stack.enter_context(cd.connect(way)) for way in ways]
        name = f"aborted over {transport}"
        joins = [pool.submit(one.join, name, 2, rank=rank) for rank, one in enumerate(sessions)]
        groups = [join.result(20) for join in joins]
        groups[1].abort("enough")
        with pytest.raises(cd.errors.AbortedError):
            groups[0].barrier()
        groups[0].leave()
        assert until(two_workers, lambda one: one.generation == groups[0].generation and one.left).state == "failed"
        with contextlib.suppress(cd.errors.AbortedError):
            groups[1].leave()
        until(two_workers, lambda one: one.generation == groups[0].generation and one.state == "ended")
