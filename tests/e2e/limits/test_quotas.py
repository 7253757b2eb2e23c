"""Limits of real daemons: who asks for more is told what, how many and which key, and the others go on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from tests.e2e.conftest import Cluster
from tests.e2e.raw_client import SUM, Raw, data, described, failure
from tests.e2e.rejection_counts import counting
from tests.waiting import settle

import collectived as cd
from collectived_proto.v1 import status_pb2, worker_pb2, worker_pb2_grpc

WORKER = (
    *("--max-sessions", "8", "--max-groups", "3", "--max-session-ranks", "2", "--max-session-memory", "32MiB"),
    *("--memory-limit", "256MiB", "--listen", "127.0.0.1:0", "--max-message", "2MiB", "--metrics", "0"),
)
COORDINATOR = ("--max-groups", "4", "--max-group-ranks", "100", "--metrics", "0")


@pytest.fixture(scope="module")
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(1, options=COORDINATOR, worker_options=WORKER)


@pytest.fixture(autouse=True)
def nobody_else(cluster: Cluster) -> Iterator[None]:
    """Each test begins where no session of another is left."""
    settle(lambda: not sessions(cluster))
    yield


def sessions(cluster: Cluster) -> int:
    return worker(cluster).sessions


def worker(cluster: Cluster) -> status_pb2.WorkerStatus:
    with grpc.insecure_channel(cluster.addresses[0], [("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = status_pb2.StatusRequest(local_only=True)
        found: status_pb2.WorkerStatus = worker_pb2_grpc.WorkerStub(channel).Status(request, timeout=10).workers[0]
    return found


def goes_on(cluster: Cluster) -> bool:
    """Whether an honest pair can work."""
    return cluster.run(2, lambda group: group.all_reduce("sum", 1.0)) == [2.0, 2.0]


def test_one_session_too_many_is_refused_and_the_others_stay(cluster: Cluster) -> None:
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(cd.connect(cluster.addresses[0])) for _ in range(8)]
        with (
            counting(cluster.metrics[1], "sessions"),
            pytest.raises(
                cd.errors.ResourceExhaustedError,
                match="this worker has 8 sessions, and there may be 8: close some, or raise max_sessions",
            ),
        ):
            cd.connect(cluster.addresses[0])
        kept[0].close()
        settle(lambda: sessions(cluster) == 7)
        assert goes_on_with(cluster, kept[1])


def goes_on_with(cluster: Cluster, session: cd.Session) -> bool:
    with session.join("one", 1, timeout=20) as group:
        return bool(group.all_reduce("sum", 2.0) == 2.0)


def test_one_rank_too_many_of_a_session_is_refused(cluster: Cluster) -> None:
    with cd.connect(cluster.addresses[0]) as session:
        with session.join("first", 1, timeout=20) as first, session.join("second", 1, timeout=20):
            with (
                counting(cluster.metrics[1], "session_ranks"),
                pytest.raises(cd.errors.ResourceExhaustedError, match="holds 2 ranks .* raise max_session_ranks"),
            ):
                session.join("third", 1, timeout=20)
            assert first.all_reduce("sum", 1.0) == 1.0
        settle(lambda: not worker(cluster).lanes)
        assert goes_on_with(cluster, session)


def test_one_group_too_many_of_a_worker_is_refused_but_its_groups_may_grow(cluster: Cluster) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(3):
            session = stack.enter_context(cd.connect(cluster.addresses[0]))
            stack.enter_context(session.join(f"group-{number}", 1, timeout=20))
        session = stack.enter_context(cd.connect(cluster.addresses[0]))
        with (
            counting(cluster.metrics[1], "groups"),
            pytest.raises(cd.errors.ResourceExhaustedError, match="has ranks of 3 groups, .* raise max_groups"),
        ):
            session.join("another", 1, timeout=20)
        stack.enter_context(session.join("group-0", 1, timeout=20))  # the next generation of a name that is there
    assert goes_on(cluster)


def test_more_memory_than_a_session_may_have_is_refused_and_others_have_theirs(cluster: Cluster) -> None:
    with cd.connect(cluster.addresses[0]) as greedy, cd.connect(cluster.addresses[0]) as honest:
        with (
            counting(cluster.metrics[1], "session_memory"),
            pytest.raises(cd.errors.ResourceExhaustedError, match="one session may have, .* raise max_session_memory"),
        ):
            greedy.empty((64 << 20,), np.uint8)
        assert len(honest.empty((1000,), np.uint8)) == 1000


def test_a_join_whose_place_in_the_segment_is_too_much_for_its_session_is_refused_and_the_others_told(
    cluster: Cluster,
) -> None:
    with cd.connect(cluster.addresses[0]) as greedy, cd.connect(cluster.addresses[0]) as honest:
        taken = greedy.empty((32 << 20) - (300 << 10), np.uint8)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(honest.join, "shared", 2, rank=0, timeout=20)
            with (
                counting(cluster.metrics[1], "session_memory"),
                pytest.raises(
                    cd.errors.ResourceExhaustedError,
                    match=r"rank 1 of group 'shared' is refused: 1048576 bytes more would exceed the 33554432 bytes of "
                    r"shared memory that one session may have, of which 33\d{6} are in use: .* max_session_memory",
                ),
            ):
                greedy.join("shared", 2, rank=1, timeout=20)
            with (
                waiting.result(20) as group,
                pytest.raises(cd.errors.UnavailableError, match="max_session_mem") as lost,
            ):
                group.all_reduce("sum", 1.0, timeout=20)
            assert [member.rank for member in lost.value.missing] == [1]
            del taken
            waiting = pool.submit(honest.join, "shared", 2, rank=0, timeout=20)
            with greedy.join("shared", 2, rank=1, timeout=20) as other, waiting.result(20) as group:
                told = pool.submit(group.all_reduce, "sum", 1.0)
                assert other.all_reduce("sum", 2.0) == 3.0 == told.result(20)


def test_what_is_sent_over_grpc_counts_as_memory_of_its_session(cluster: Cluster) -> None:
    raw = Raw(cluster.addresses[0])
    raw.join("over-grpc", 1, 0)
    with counting(cluster.metrics[1], "session_memory"):
        code, text, _ = failure(lambda: raw.submit(described(SUM, (16 << 20,)), bytes(1 << 20)))
    assert code == "RESOURCE_EXHAUSTED" and "max_session_memory" in text
    assert raw.submit(described(SUM, (3,)), data([1, 2, 3])).value == [1, 2, 3]
    raw.close()


@pytest.mark.parametrize(
    ("limit", "size", "text"),
    [("group_ranks", 101, "a group of 101 ranks was asked for, and there may be 100: .* raise max_group_ranks")],
)
def test_a_group_larger_than_there_may_be_is_refused(cluster: Cluster, limit: str, size: int, text: str) -> None:
    with (
        cd.connect(cluster.addresses[0]) as session,
        counting(cluster.metrics[0], limit),
        pytest.raises(cd.errors.ResourceExhaustedError, match=text),
    ):
        session.join("large", size, timeout=20)


def test_a_larger_message_than_there_may_be_is_refused_unread(cluster: Cluster) -> None:
    before = worker(cluster).resident_bytes
    with grpc.insecure_channel(cluster.addresses[0], [("grpc.max_send_message_length", -1)]) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        huge = worker_pb2.PrepareRequest(session=bytes(128 << 20))
        code, text, _ = failure(lambda: stub.Prepare(huge, timeout=60))
    assert code == "RESOURCE_EXHAUSTED" and "larger than max" in text
    assert worker(cluster).resident_bytes < before + (64 << 20)
    assert goes_on(cluster)


def test_metadata_has_a_limit(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.addresses[0]) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        much = (("authorization", "x" * 20_000),)
        call: Any = lambda: stub.Status(status_pb2.StatusRequest(), timeout=10, metadata=much)  # noqa: E731
        assert failure(call)[0] == "RESOURCE_EXHAUSTED"


def test_status_tells_of_limits_that_were_met(cluster: Cluster) -> None:
    with cd.connect(cluster.addresses[0]) as session, pytest.raises(cd.errors.ResourceExhaustedError):
        session.empty((64 << 20,), np.uint8)
    (met, *_) = worker(cluster).limits_met
    assert met.limit == "session_memory" and met.refused >= 1 and 0 <= met.last_seconds < 60
