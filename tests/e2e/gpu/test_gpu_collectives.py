"""Real daemons and clients, values on GPUs from one end to the other: on fake ones, and on those of this machine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.e2e.gpu.cluster import Cluster, filled

import collectived as cd
from collectived.gpu import driver
from collectived.gpu.array import DeviceArray

pytestmark = pytest.mark.usefixtures("client_cuda")


def one_of(index: int) -> str:
    """A GPU of this process; where there are several, another one for another index."""
    return f"GPU:{index % len(driver.get_cuda().device_uuids())}"


def test_arrays_on_a_gpu_are_reduced_there(cluster: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> Any:
        x = filled(session, np.arange(1000, dtype=np.float32) + group.rank)
        y = group.all_reduce("sum", x)
        assert isinstance(y, DeviceArray)
        assert y.address != x.address
        return np.asarray(y)

    for got in cluster.run(2, body, device="GPU:0"):
        assert (got == 2 * np.arange(1000) + 1).all()


def test_values_keep_their_structure_and_kinds(cluster: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> Any:
        value = {"gpu": filled(session, np.full(10, 2.0)), "host": np.full((2, 3), 3, np.int16), "number": 1.5}
        mean = group.all_reduce("mean", value)
        assert isinstance(mean["gpu"], DeviceArray)
        assert isinstance(mean["host"], np.ndarray)
        return np.asarray(mean["gpu"]), mean["host"], mean["number"]

    for gpu, host, number in cluster.run(2, body, device=one_of(1)):
        assert (gpu == 2).all() and (host == 3).all() and number == 1.5


def test_reduce_and_broadcast(cluster: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = filled(session, np.full(100, group.rank + 1, np.int64))
        top = group.reduce("max", x, root=1)
        assert top is None if group.rank == 0 else (np.asarray(top) == 2).all()
        assert (np.asarray(group.broadcast(x, root=1)) == 2).all()

    cluster.run(2, body, device="GPU:0")


def test_all_other_collectives_pass_by_the_host(cluster: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = filled(session, np.full((2, 3), group.rank, np.float32))
        joined = group.gather(x, root=1)
        assert joined is None if group.rank == 0 else isinstance(joined, DeviceArray)
        assert group.rank == 0 or (np.asarray(joined) == [[0] * 3] * 2 + [[1] * 3] * 2).all()
        piece = group.scatter(x, root=1)
        assert np.asarray(piece).tolist() == [[1] * 3]
        group.send(x, 1 - group.rank)
        assert (np.asarray(group.recv(1 - group.rank)) == 1 - group.rank).all()
        group.barrier()

    cluster.run(2, body, device="GPU:0")


def test_a_result_is_written_into_an_array_of_the_caller(cluster: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x, out = filled(session, np.ones(50, np.float32)), filled(session, np.zeros(50, np.float32))
        assert group.all_reduce("sum", x, out=out) is out
        assert (np.asarray(out) == 2).all()
        on_host = np.zeros(50, np.float32)
        group.all_reduce("sum", x, out=on_host)
        assert (on_host == 2).all()
        assert group.all_reduce("sum", x, out=x) is x
        assert (np.asarray(x) == 2).all()

    cluster.run(2, body, device="GPU:0")


def test_ranks_on_cpus_and_gpus_meet_in_one_group(cluster: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> Any:
        return np.asarray(group.all_reduce("sum", np.full(100, group.rank, np.float32)))

    def one(rank: int) -> Any:
        with (
            cd.connect(cluster.address_of(rank, 3)) as session,
            session.join("mixed", 3, rank=rank, device=f"{('GPU', 'CPU', 'GPU')[rank]}:0", timeout=20) as group,
        ):
            return body(session, group)

    with ThreadPoolExecutor(3) as pool:
        for got in pool.map(one, range(3)):
            assert (got == 3).all()


def test_arrays_on_gpus_are_taken_by_groups_on_cpus(one_worker: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        y = group.all_reduce("sum", filled(session, np.ones(10)))
        assert isinstance(y, DeviceArray) and (np.asarray(y) == 2).all()

    one_worker.run(2, body, device="CPU:0")


def test_many_in_flight_of_many_sizes_come_out_right(one_worker: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        sizes = np.random.default_rng(5).integers(1, 200_000, 40)
        works = [group.all_reduce("sum", filled(session, np.full(n, n % 91, np.float32)), async_op=True) for n in sizes]
        for n, work in zip(sizes, works, strict=True):
            assert (np.asarray(work.result()) == 2 * (n % 91)).all()

    one_worker.run(2, body, device="GPU:0")


def test_several_pieces_between_gpus_of_one_worker_come_out_right(one_worker: Cluster) -> None:
    def one(rank: int) -> None:
        device = one_of(rank)
        with (
            cd.connect(one_worker.addresses[0]) as session,
            session.join("pieces", 2, rank=rank, device=device, timeout=20) as group,
        ):
            value = np.arange(5 << 20, dtype=np.float32) % 1000
            x = filled(session, value + rank, device)
            assert (np.asarray(group.all_reduce("sum", x)) == 2 * value + 1).all()
            assert (np.asarray(group.broadcast(x, root=1)) == value + 1).all()
            assert rank == 0 or (np.asarray(group.reduce("max", x, root=1)) == value + 1).all()
            assert rank == 1 or group.reduce("max", x, root=1) is None

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))


def test_a_killed_worker_takes_no_client_with_it(make: Callable[..., Cluster]) -> None:
    cluster = make(1)
    with cd.connect(cluster.addresses[0]) as session:
        group = session.join("left", 1, rank=0, device="GPU:0", timeout=20)
        x = filled(session, np.full(10, 7.0))
        y = group.all_reduce("sum", x)
        cluster.workers[0].kill()
        with pytest.raises(cd.errors.UnavailableError):
            group.all_reduce("sum", x)
        assert (np.asarray(y) == 7).all(), "its memory outlives the worker"
    cluster.workers[0].process.wait()


def test_cross_device_operations_reduce_over_gpus(one_worker: Cluster) -> None:
    with cd.connect(one_worker.addresses[0]) as session:
        parts = cd.PerReplica([filled(session, np.full(6, 1.0 + index), one_of(index)) for index in range(2)])
        for ops in (cd.NcclAllReduce(session=session), cd.ReductionToOneDevice(session=session)):
            total = ops.reduce("sum", parts, parts)
            assert [np.asarray(component).tolist() for component in total.values] == [[3.0] * 6] * 2
            assert [device.rpartition("device:")[2] for device in total.devices] == [one_of(0), one_of(1)]


def test_values_arrive_when_they_are_written(one_worker: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = filled(session, np.zeros(1000))
        for number in range(200):
            x.assign(np.full(1000, float(number + group.rank)))
            assert (np.asarray(group.all_reduce("sum", x)) == 2 * number + 1).all()

    one_worker.run(2, body, device="GPU:0")
