"""A rank whose own worker is stopped, killed or started again: the group is over for it, and it can come back."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from tests.e2e.conftest import Cluster, Daemon
from tests.e2e.raw_client import Raw
from tests.waiting import settle

import collectived as cd
from collectived.shared import doorbell
from collectived_proto.v1 import coordinator_pb2_grpc, status_pb2, worker_pb2

PROMISED = 0.25  # seconds after its deadline in which every collective ends


@contextlib.contextmanager
def stopped(cluster: Cluster, task: int) -> Iterator[None]:
    pid = cluster.workers[task].process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def pair(two_workers: Any) -> Iterator[list[tuple[cd.Session, cd.Group]]]:
    """Two ranks, each on a worker of its own."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        sessions = [stack.enter_context(cd.connect(address)) for address in two_workers.addresses]
        joining = [pool.submit(sessions[rank].join, "pair", 2, rank=rank, timeout=20) for rank in range(2)]
        yield list(zip(sessions, [one.result(20) for one in joining], strict=True))


def both(pair: list[tuple[cd.Session, cd.Group]], use: Callable[[cd.Group], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(use, [group for _, group in pair]))


def reduced(group: cd.Group, timeout: float | None = None) -> float:
    """One line, so that the second call of it is prepared already."""
    return float(group.all_reduce("sum", 1.0, cd.CommunicationOptions(timeout_seconds=timeout)))


def ones(group: cd.Group, length: int, timeout: float) -> Any:
    return group.all_reduce("sum", np.ones(length), cd.CommunicationOptions(timeout_seconds=timeout))


def differ(group: cd.Group, length: int) -> float:
    """Seconds from its deadline until a call has failed in which this rank differs from the other."""
    began = time.monotonic()
    with pytest.raises(cd.errors.CollectiveError):
        ones(group, length, 0.5)
    return time.monotonic() - began - 0.5


def late(group: cd.Group, use: Callable[[cd.Group, float], Any], timeout: float) -> tuple[float, Any]:
    """Seconds from its deadline until a call has failed, and its error."""
    began = time.monotonic()
    with pytest.raises(cd.errors.DeadlineExceededError) as caught:
        use(group, timeout)
    return time.monotonic() - began - timeout, caught.value


@pytest.mark.parametrize("known", [True, False], ids=["known call", "call of a new kind"])
def test_a_call_to_a_stopped_worker_ends_in_time_and_both_ranks_can_rejoin(
    two_workers: Any, pair: Any, delays: Any, known: bool
) -> None:
    took: list[float] = []
    while not took or (took[-1] > PROMISED and len(took) < 3):  # this machine may be busy
        if known:
            both(pair, reduced)
        with stopped(two_workers, 1):
            seconds, error = late(pair[1][1], reduced, 0.3)
            took.append(seconds)
            assert error.rejoin and error.decided_by == "rank 1"
            assert "did not complete within 0.3 s" in str(error) and "worker 1" in str(error)
            with pytest.raises(cd.errors.DeadlineExceededError, match="did not complete within 0.3 s"):
                pair[1][1].barrier()
        with pytest.raises(cd.errors.CollectiveError) as caught:
            while True:  # what had been submitted may still complete
                reduced(pair[0][1], 20)
        assert caught.value.rejoin and [member.rank for member in caught.value.missing] == [1]
        both(pair, lambda group: group.rejoin(timeout=20))
    assert min(took) <= PROMISED + delays.room, took
    assert both(pair, reduced) == [2.0, 2.0]


def measure_differing(cluster: Cluster, name: str) -> float:
    """Seconds from their deadline until both ranks of a group have failed, whose worker is stopped."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        sessions = [stack.enter_context(cd.connect(cluster.addresses[0])) for _ in range(2)]
        groups = list(pool.map(lambda rank: sessions[rank].join(name, 2, rank=rank, timeout=20), range(2)))
        list(pool.map(lambda group: [ones(group, length, 20) for length in (3, 4)], groups))  # it describes them
        with stopped(cluster, 0):
            return max(pool.map(lambda group: differ(group, 3 + group.rank), groups))


def test_ranks_that_differ_while_their_worker_is_stopped_end_at_their_deadline(one_worker: Any, delays: Any) -> None:
    took: list[float] = []
    while not took or (took[-1] > PROMISED and len(took) < 3):  # this machine may be busy
        took.append(measure_differing(one_worker, f"differ-{len(took)}"))
    assert min(took) <= PROMISED + delays.room, took


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def ranks(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[cd.Group]]]:
    """Two ranks on each of one or two workers, which ask early whether their worker lives."""
    monkeypatch.setattr(doorbell, "PING_INTERVAL", 0.5)
    cluster = request.getfixturevalue("one_worker" if request.param == 1 else "two_workers")
    places = [address for address in cluster.addresses[: request.param] for _ in range(2)]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(places)) as pool:
        sessions = [stack.enter_context(cd.connect(address)) for address in places]
        joining = [
            pool.submit(session.join, "silent", len(places), rank=rank, timeout=20)
            for rank, session in enumerate(sessions)
        ]
        groups = [one.result(20) for one in joining]
        list(pool.map(cd.Group.barrier, groups))  # it describes them
        settle(lambda: knows_barrier(cluster))  # else it may be one that the verdict covers
        yield cluster, groups


def knows_barrier(cluster: Cluster) -> bool:
    """Whether the coordinator has heard that all ranks have finished their first collective."""
    with grpc.insecure_channel(cluster.coordinator_address) as channel:
        told = coordinator_pb2_grpc.CoordinatorStub(channel).Status(status_pb2.StatusRequest(local_only=True))
    members = [member for group in told.groups if group.state != "ended" for member in group.members]
    return bool(members) and all(member.last_instance == 0 for member in members)


def test_ranks_that_wait_without_a_deadline_notice_that_their_worker_is_stopped(ranks: Any) -> None:
    cluster, groups = ranks
    with stopped(cluster, 0), ThreadPoolExecutor(1) as pool:
        error = pool.submit(groups[1].barrier).exception(20)
    assert isinstance(error, cd.errors.UnavailableError) and error.rejoin
    assert "worker 0" in str(error) and "is lost" in str(error)
    for absent in {groups[-1], groups[0]} - {groups[1]}:  # one has not waited
        with pytest.raises(cd.errors.UnavailableError) as caught:  # not by its deadline
            absent.barrier(timeout=20)
        assert caught.value.verdict is None or caught.value.verdict.from_instance == 1


def test_a_worker_that_answers_is_not_lost_however_long_a_rank_waits_for_another(ranks: Any) -> None:
    _, groups = ranks
    with ThreadPoolExecutor(len(groups)) as pool:
        waiting = [pool.submit(group.barrier) for group in groups[1:]]
        time.sleep(4 * doorbell.PING_INTERVAL)
        groups[0].barrier()
        assert [one.exception(20) for one in waiting] == [None] * len(waiting)


def test_a_call_of_a_new_kind_to_a_killed_worker_is_the_end_of_the_group_and_after_a_restart_one_connects_again(
    make_cluster: Any,
) -> None:
    cluster = make_cluster(1)
    with cd.connect(cluster.addresses[0]) as session, session.join("killed", 1, rank=0) as group:
        cluster.workers[0].process.kill()
        cluster.workers[0].process.wait()
        for _ in range(2):
            with pytest.raises(cd.errors.UnavailableError, match=r"worker 0 \(at .*join again") as caught:
                group.all_reduce("sum", np.ones(3))
            assert caught.value.rejoin and caught.value.decided_by == "rank 0"
        again(cluster)
        uses: list[Callable[[], Any]] = [group.rejoin, lambda: session.join("other", 1)]
        for use in uses:
            with pytest.raises(cd.errors.UnavailableError) as caught:
                use()
            assert not caught.value.rejoin
        with cd.connect(cluster.addresses[0]) as new, new.join("killed", 1, rank=0, timeout=20) as back:
            assert back.all_reduce("sum", 1.0) == 1.0


@pytest.mark.parametrize("nbytes", [1 << 20, 16 << 20])
def test_the_value_of_a_call_that_ended_with_its_worker_does_not_count_for_others(
    make_cluster: Any, nbytes: int
) -> None:
    """Its array is the caller's again, and may have changed by the time when another rank comes."""
    cluster = make_cluster(1)
    value = np.full(nbytes, 5, np.uint8)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        sessions = [stack.enter_context(cd.connect(cluster.addresses[0])) for _ in range(2)]
        root, other = pool.map(lambda rank: sessions[rank].join("given-back", 2, rank=rank, timeout=20), range(2))
        pool.submit(other.broadcast, np.zeros(nbytes, np.uint8), root=0)
        root.broadcast(value, root=0)  # of a known kind nobody asks the worker
        broadcasting = pool.submit(root.broadcast, value, root=0)
        settle(lambda: any(loop.in_flight for row in cluster.status().workers for loop in row.lanes))
        cluster.workers[0].process.kill()
        cluster.workers[0].process.wait()
        assert isinstance(broadcasting.exception(20), cd.errors.UnavailableError)
        value[:] = 9
        with contextlib.suppress(cd.errors.UnavailableError):
            assert np.all(other.broadcast(np.zeros(nbytes, np.uint8), root=0) == 5)
    again(cluster)


def test_a_session_that_a_worker_does_not_know_or_that_has_ended_is_unavailable_with_what_to_do(
    one_worker: Any,
) -> None:
    raw = Raw(one_worker.addresses[0])
    request = worker_pb2.JoinRequest(session=b"of another life.", name="x", min_size=2, max_size=2)

    def refused() -> str:
        with pytest.raises(grpc.RpcError) as caught:
            list(raw.stub.Join(request))
        status: Any = caught.value
        assert status.code() is grpc.StatusCode.UNAVAILABLE
        return str(status.details())

    try:
        assert refused() == (
            "this worker does not know the session: it was restarted after the session was opened; connect again"
        )
        request.session = raw.opened.session
        raw.life.cancel()
        assert refused() == "this session has ended: its session ended; connect again"
    finally:
        raw.channel.close()


def again(cluster: Cluster) -> None:
    """Starts the killed worker of a cluster of one again, at the same address."""
    cluster.workers[0].close()
    cluster.workers[0] = Daemon(
        *("worker", "--task", "0", "--folder", str(cluster.folder), "--host-name", "host0"),
        *("--coordinator", cluster.coordinator_address, "--link-listen", "127.0.0.1:0"),
    )
    assert cluster.workers[0].wait_ready()["address"] == cluster.addresses[0]
