"""Real daemons and clients: two workers with one GPU each, which is fake, or where there is a real one is that.

What hangs or is killed is tried with fake ones.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.e2e.gpu.cluster import Cluster
from tests.e2e.gpu.conftest import real_cuda
from tests.fakes.client_cuda import FakeClientCuda, fake_gpus

import collectived as cd
from collectived_proto.all_reduce_spec import ALGORITHMS
from collectived_proto.errors import FailedPreconditionError
from collectived_runtime.device.nccl.binding import load_binding

NCCL = cd.CommunicationOptions(implementation=cd.CommunicationImplementation.NCCL)
ABORT_SECONDS = 5.0  # that an abort may take, before its worker ends
GPU_LOST = 70


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def start(workers: int = 2, **options: Any) -> Cluster:
        made.append(Cluster(workers, 1, tmp_path_factory.mktemp("fakes"), **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(2, 1, tmp_path_factory.mktemp("fakes"))
    yield made
    made.close()


@pytest.fixture(scope="module", params=["fake", "real"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, bool]]:
    real = request.param == "real"
    if real:
        real_cuda()
        try:
            load_binding()
        except FailedPreconditionError as error:
            pytest.skip(str(error))
    made = Cluster(2, 1, tmp_path_factory.mktemp("either"), real=real)
    yield made, real
    made.close()


@pytest.fixture
def either(shared: tuple[Cluster, bool]) -> Iterator[Cluster]:
    cluster, real = shared
    with contextlib.nullcontext() if real else fake_gpus():
        yield cluster


def filled(session: cd.Session, value: Any) -> Any:
    host = np.asarray(value)
    array = session.empty(host.shape, host.dtype, device="GPU:0")
    array.assign(host)
    return array


def summed(session: cd.Session, group: cd.Group) -> None:
    one = filled(session, np.ones(100, np.float32))
    assert (np.asarray(group.all_reduce("sum", one, options=NCCL)) == group.size).all()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", ["int32", "float16", "float32", "float64", "int64", "uint8"])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_nccl_carries_an_all_reduce_between_workers(either: Cluster, size: int, dtype: str, op: str) -> None:
    def body(session: cd.Session, group: cd.Group) -> Any:
        value = (np.arange(1000) % 50 + group.rank).astype(dtype)
        return np.asarray(group.all_reduce(op, filled(session, value), options=NCCL))

    exact = np.stack([np.arange(1000) % 50 + rank for rank in range(size)]).astype(np.float64)
    expected = {"sum": exact.sum(0), "mean": exact.mean(0), "max": exact.max(0)}[op]
    for got in either.run(size, body, device="GPU:0"):
        assert (got == expected.astype(got.dtype)).all()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("length", [40, 41, 3], ids=["even", "with a remainder", "few rows"])
@pytest.mark.parametrize("dtype", ["int32", "float16", "float32", "float64", "int64", "uint8"])
def test_nccl_carries_rows_between_workers(either: Cluster, size: int, length: int, dtype: str) -> None:
    values = [((np.arange(3 * length).reshape(length, 3) + 5 * rank) % 30).astype(dtype) for rank in range(size)]

    def body(session: cd.Session, group: cd.Group) -> None:
        x = filled(session, values[group.rank])
        assert (np.asarray(group.all_gather(x, options=NCCL)) == np.concatenate(values)).all()
        whole = np.sum(values, axis=0, dtype=np.float64)
        piece = np.array_split(whole, size)[group.rank]
        assert (np.asarray(group.reduce_scatter("sum", x, options=NCCL)) == piece.astype(dtype)).all()
        mean = group.reduce_scatter("mean", x, options=NCCL)
        assert (np.asarray(mean) == (piece / size).astype(mean.dtype)).all()
        rows = np.concatenate([np.array_split(value, size)[group.rank] for value in values])
        assert (np.asarray(group.all_to_all(x, options=NCCL)) == rows).all()

    either.run(size, body, device="GPU:0")


def test_nccl_carries_many_rows_in_stream_order(either: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        for n in np.random.default_rng(7).integers(1, 50_000, 20) * 2:
            whole = np.arange(n, dtype=np.float32) % 91
            x = filled(session, whole + group.rank)
            works = [
                group.all_gather(x, options=NCCL, async_op=True),
                group.reduce_scatter("sum", x, options=NCCL, async_op=True),
                group.all_to_all(x, options=NCCL, async_op=True),
            ]
            half = whole.reshape(2, -1)[group.rank]
            expected = [np.concatenate([whole, whole + 1]), 2 * half + 1, np.concatenate([half, half + 1])]
            for work, right in zip(works, expected, strict=True):
                assert (np.asarray(work.wait()) == right).all()

    either.run(2, body, device="GPU:0")


def test_rows_of_the_host_and_of_other_axes_go_by_nccl_too(either: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = np.full((4, 2), group.rank, np.float32)
        assert group.all_gather(x, options=NCCL).tolist() == [[0, 0]] * 4 + [[1, 1]] * 4
        assert group.reduce_scatter("sum", x, options=NCCL).tolist() == [[1, 1]] * 2
        there = group.all_gather(filled(session, x), axis=1, options=NCCL)
        assert np.asarray(there).tolist() == [[0, 0, 1, 1]] * 4

    either.run(2, body, device="GPU:0")


def test_lengths_that_differ_go_by_nccl_and_come_by_the_host(either: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        rows = [np.full((rank + 1, 2), rank, np.float64) for rank in range(2)]
        sizes = [(3, 1), (2, 2)][group.rank]
        got = group.all_to_all(filled(session, np.full(4, group.rank)), sizes=sizes, options=NCCL)
        assert np.asarray(got).tolist() == [[0, 0, 0, 1, 1], [0, 1, 1]][group.rank]
        assert (
            np.asarray(group.all_gather(filled(session, rows[group.rank]), options=NCCL)) == np.concatenate(rows)
        ).all()

    either.run(2, body, device="GPU:0")


def test_status_says_which_nccl_there_is_and_what_it_carries(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        summed(session, group)
        group.barrier()
        cluster.nccl_hold.touch()
        work = group.all_reduce("sum", filled(session, np.ones(10)), options=NCCL, async_op=True)
        if group.rank == 0:
            cluster.until(lambda: ("nccl", "the hint NCCL") in in_flight())
            cluster.nccl_hold.unlink()
        assert (np.asarray(work.result()) == 2).all()

    def in_flight() -> list[tuple[str, str]]:
        groups = cluster.status().groups
        return [(flight.algorithm, flight.why) for group in groups for flight in group.in_flight]

    cluster.run(2, body, device="GPU:0")
    assert {worker.nccl for worker in cluster.status().workers} == {"fake, NCCL 2.28.9"}


def test_many_of_many_sizes_come_out_right(either: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        for n in np.random.default_rng(7).integers(1, 100_000, 60):
            found = group.all_reduce("sum", filled(session, np.full(n, n % 91, np.int32)), options=NCCL)
            assert (np.asarray(found) == 2 * (n % 91)).all()

    either.run(2, body, device="GPU:0")


@pytest.mark.parametrize("spec", ALGORITHMS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64], ids=lambda dtype: np.dtype(dtype).name)
def test_every_algorithm_of_a_spec_reduces_over_the_gpus_of_two_workers(either: Cluster, spec: str, dtype: Any) -> None:
    devices = tuple(f"/job:worker/replica:0/task:{task}/device:GPU:0" for task in range(2))
    values = [(np.arange(60) % 7 + 2 * task).astype(dtype) for task in range(2)]
    with cd.connect(either.addresses[0]) as session:
        ops = cd.MultiWorkerAllReduce(["/task:0", "/task:1"], 1, (spec, 2, -1), session=session)
        parts = cd.PerReplica(values, devices)
        for op, exact in (("sum", np.sum(values, axis=0)), ("mean", np.mean(np.asarray(values, np.float64), axis=0))):
            found = ops.reduce(op, parts, parts)
            assert found.devices == devices
            for component in found.values:
                assert (np.asarray(component) == exact.astype(component.dtype)).all()


def test_several_groups_over_the_same_gpus_called_in_opposite_orders(either: Cluster) -> None:
    def one(rank: int) -> None:
        with (
            cd.connect(either.address_of(rank, 2)) as session,
            session.join("first", 2, rank=rank, device="GPU:0", timeout=20) as first,
            session.join("second", 2, rank=rank, device="GPU:0", timeout=20) as second,
        ):
            value = filled(session, np.full(50, rank + 1, np.float32))
            for _ in range(10):
                order = (first, second) if rank else (second, first)
                works = [group.all_reduce("sum", value, options=NCCL, async_op=True) for group in order]
                for work in works:
                    assert (np.asarray(work.result()) == 3).all()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))


def test_a_wait_returns_when_nccl_has_launched_it(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        one = filled(session, np.ones(100, np.float32))
        summed(session, group)
        group.barrier()
        if group.rank == 0:
            cluster.hold.touch()
        group.barrier()
        work = group.all_reduce("sum", one, options=NCCL, async_op=True)
        found = work.wait(20)
        assert not work.done()
        waiting.wait(20)
        if group.rank == 0:
            cluster.hold.unlink()
        assert (np.asarray(found) == 2).all()
        assert work.result() is found

    waiting = threading.Barrier(2)
    cluster.run(2, body, device="GPU:0")


def test_a_rank_that_never_comes_is_an_error_by_the_deadline(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        if group.rank == 1:
            return
        with pytest.raises(cd.errors.DeadlineExceededError, match="rank 1"):
            group.all_reduce("sum", filled(session, np.ones(10)), options=NCCL.merge(_within(0.5)))

    def stay(session: cd.Session, group: cd.Group) -> None:
        try:
            body(session, group)
        finally:
            done.append(group.rank)
            cluster.until(lambda: 0 in done)

    done: list[int] = []
    cluster.run(2, stay, device="GPU:0")
    cluster.run(2, summed, device="GPU:0")


@pytest.mark.parametrize("warm", [False, True], ids=["while a communicator is made", "amid a collective"])
def test_what_hangs_in_nccl_is_an_error_by_the_deadline_and_the_gpu_is_usable_afterwards(
    cluster: Cluster, cuda: FakeClientCuda, warm: bool
) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        if warm:
            summed(session, group)
        group.barrier()
        cluster.nccl_hold.touch()
        began = time.monotonic()
        with pytest.raises(cd.errors.DeadlineExceededError):
            group.all_reduce("sum", filled(session, np.ones(10)), options=NCCL.merge(_within(1.0)))
        assert time.monotonic() - began < 4.0

    cluster.run(2, body, device="GPU:0")
    cluster.nccl_hold.unlink()
    cluster.run(2, summed, device="GPU:0")


@pytest.mark.parametrize("workers", [2, 3])
def test_a_killed_worker_is_a_typed_error_and_leaves_the_other_ones_gpu_usable(
    start: Callable[..., Cluster], cuda: FakeClientCuda, workers: int
) -> None:
    cluster = start(workers)

    def body(session: cd.Session, group: cd.Group) -> list[int]:
        summed(session, group)
        if group.rank == 1:
            cluster.workers[1].process.kill()
        with pytest.raises(
            cd.errors.UnavailableError, match="is lost" if group.rank == 1 else "rank 1 .* is lost"
        ) as e:
            for _ in range(1000):
                summed(session, group)
        return [member.rank for member in e.value.missing]

    found = cluster.run(workers, body, device="GPU:0")
    assert [found[rank] for rank in range(workers) if rank != 1] == [[1]] * (workers - 1)
    with (
        cd.connect(cluster.addresses[0]) as session,
        session.join("alone", 1, rank=0, device="GPU:0", timeout=20) as group,
    ):
        assert (np.asarray(group.all_reduce("sum", filled(session, np.ones(10)))) == 1).all()


@pytest.mark.parametrize("workers", [2, 3])
def test_nccl_that_fails_on_one_worker_is_told_alike_to_all_ranks_and_accuses_none(
    start: Callable[..., Cluster], cuda: FakeClientCuda, workers: int
) -> None:
    cluster = start(workers)

    def body(session: cd.Session, group: cd.Group) -> str:
        summed(session, group)
        group.barrier()
        if group.rank == 1:
            cluster.nccl_broken[1].touch()
        group.barrier()
        began = time.monotonic()
        with pytest.raises(cd.errors.UnavailableError, match="on worker 1, of rank 1 .*a call to the system") as caught:
            group.all_reduce("sum", filled(session, np.ones(10)), options=NCCL)
        assert time.monotonic() - began < 4.0, "all are there and say so: nobody is waited for"
        assert caught.value.missing == () and caught.value.rejoin and caught.value.verdict is not None
        cluster.nccl_broken[1].unlink(missing_ok=True)
        group.rejoin(timeout=20)
        summed(session, group)
        return caught.value.verdict.message

    (message,) = set(cluster.run(workers, body, device="GPU:0"))
    assert message.endswith("no member of the group is known to be lost")


def test_nccl_that_fails_without_a_coordinator_is_an_error_when_a_silent_worker_would_be_lost(
    start: Callable[..., Cluster], cuda: FakeClientCuda
) -> None:
    cluster = start(coordinating=("--heartbeat-seconds", "0.5"))

    def body(session: cd.Session, group: cd.Group) -> str:
        summed(session, group)
        group.barrier()
        if group.rank == 1:
            cluster.coordinator.process.kill()
            cluster.nccl_broken[1].touch()
        group.barrier()
        began = time.monotonic()
        with pytest.raises(cd.errors.UnavailableError, match="no member .* is known to be lost") as caught:
            group.all_reduce("sum", filled(session, np.ones(10)), options=NCCL)
        assert time.monotonic() - began < 8.0, "two heartbeats and a second, not two of the usual ones"
        assert caught.value.missing == () and caught.value.verdict is not None
        return caught.value.verdict.message

    (message,) = set(cluster.run(2, body, device="GPU:0"))
    assert "decided by worker 1 alone" in message


def test_an_abort_that_hangs_ends_its_worker(start: Callable[..., Cluster], cuda: FakeClientCuda) -> None:
    cluster = start()

    def body(session: cd.Session, group: cd.Group) -> None:
        summed(session, group)
        group.barrier()
        cluster.nccl_hold.touch()
        cluster.abort_hold.touch()
        with pytest.raises(cd.errors.CollectiveError):
            group.all_reduce("sum", filled(session, np.ones(10)), options=NCCL.merge(_within(0.5)))

    began = time.monotonic()
    cluster.run(2, body, device="GPU:0")
    for worker in cluster.workers:
        assert worker.process.wait(4 * ABORT_SECONDS) == GPU_LOST
    assert time.monotonic() - began >= ABORT_SECONDS


def _within(seconds: float) -> cd.CommunicationOptions:
    return cd.CommunicationOptions(timeout_seconds=seconds, implementation=NCCL.implementation)
