"""One client that drives several GPUs of its worker, and of others: cross-device operations and MirroredStrategy.

On fake GPUs, two per worker; the client reaches those of the other worker by way of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.e2e.gpu.cluster import Cluster, filled
from tests.fakes.client_cuda import FakeClientCuda, fake_gpus

import collectived as cd
from collectived.gpu.array import DeviceArray

GPUS = ("GPU:0", "GPU:1")
FULL = tuple(f"/job:worker/replica:0/task:{task}/device:{gpu}" for task in range(2) for gpu in GPUS)
DTYPES = [
    np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64, np.float16, ml_dtypes.bfloat16, np.float32,
    np.float64, np.complex64, np.complex128,
]  # fmt: skip
NCCL = cd.CommunicationImplementation.NCCL
ALL_REDUCE, REDUCE, BROADCAST = "all_redu", "reduce", "broadcas"  # as the fake NCCL names them


@pytest.fixture(scope="module", autouse=True)
def cuda() -> Iterator[FakeClientCuda]:
    with fake_gpus() as fake:
        yield fake


@pytest.fixture(scope="module")
def cluster(start: Callable[..., Cluster]) -> Cluster:
    return start(2)


@pytest.fixture(scope="module")
def session(cluster: Cluster, cuda: FakeClientCuda) -> Iterator[cd.Session]:
    with cd.connect(cluster.addresses[0]) as session:
        yield session


def values_of(dtype: Any, count: int = 2) -> list[NDArray[Any]]:
    return [((np.arange(60) % 7).reshape(3, 20) + 2 * number).astype(dtype) for number in range(count)]


def per_gpu(session: cd.Session, values: list[NDArray[Any]]) -> cd.PerReplica:
    return cd.PerReplica([filled(session, value, gpu) for value, gpu in zip(values, GPUS, strict=True)])


def exact(op: str, values: list[NDArray[Any]]) -> NDArray[Any]:
    wide = np.complex128 if np.iscomplexobj(values[0]) else np.float64
    total: NDArray[Any] = np.sum([value.astype(wide) for value in values], axis=0)
    return total / len(values) if op == "mean" else total


def on(values: cd.Mirrored) -> list[str]:
    return [device.rpartition("device:")[2] for device in values.devices]


class Carried:
    """What the fake NCCL of each worker has been given within a `with`: how many collectives of each kind."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.by_worker: list[dict[str, int]] = []

    def __enter__(self) -> Carried:
        self._before = self._cluster.nccl_calls()
        return self

    def __exit__(self, *_: object) -> None:
        calls = zip(self._cluster.nccl_calls(), self._before, strict=True)
        self.by_worker = [dict(after - before) for after, before in calls]


def check(found: Any, op: str, values: list[NDArray[Any]]) -> None:
    """What has come of values, on the GPUs: bit for bit, for these are small."""
    assert isinstance(found, cd.Mirrored) and on(found) == list(GPUS)
    for number, component in enumerate(found.values):
        assert isinstance(component, DeviceArray) and component.device == number
        got = np.asarray(component)
        assert (got == exact(op, values).astype(got.dtype)).all() and got.shape == (3, 20)


@pytest.mark.parametrize("ops", [cd.NcclAllReduce, cd.HierarchicalCopyAllReduce, cd.ReductionToOneDevice])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_every_type_is_reduced_over_the_gpus_it_lies_on(
    session: cd.Session, cluster: Cluster, ops: Any, dtype: Any, op: str
) -> None:
    values = values_of(dtype)
    parts = per_gpu(session, values)
    with Carried(cluster) as carried:
        check(ops(session=session).reduce(op, parts, parts), op, values)
    nccl_has_it = dtype is not np.int16 or op == "mean"  # of which partial sums are wider
    assert carried.by_worker == [{ALL_REDUCE: 2} if ops is cd.NcclAllReduce and nccl_has_it else {}, {}]


@pytest.mark.parametrize("spec", ["nccl", "nccl/xring", "nccl/rechd", "nccl/pscpu", "xring", "pscpu", "psgpu"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_multi_worker_all_reduce_over_the_gpus_of_one_worker(
    session: cd.Session, cluster: Cluster, spec: str, op: str
) -> None:
    values = values_of(np.float32)
    parts = per_gpu(session, values)
    ops = cd.MultiWorkerAllReduce(["/task:0"], 2, spec, session=session)
    with Carried(cluster) as carried:
        check(ops.reduce(op, parts, parts), op, values)
    assert carried.by_worker == [{ALL_REDUCE: 2} if spec.startswith("nccl") else {}, {}]


@pytest.mark.parametrize("spec", ["nccl", "nccl/xring", "nccl/rechd", "nccl/pscpu", "xring", "pscpu", "psgpu"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64], ids=lambda dtype: np.dtype(dtype).name)
def test_multi_worker_all_reduce_over_the_gpus_of_two_workers(
    session: cd.Session, cluster: Cluster, spec: str, dtype: Any
) -> None:
    both_gpus_in_both_shards = {"nccl": {ALL_REDUCE: 4}, "nccl/": {REDUCE: 4, BROADCAST: 4}}
    values = values_of(dtype, 4)
    parts = cd.PerReplica(values, FULL)
    ops = cd.MultiWorkerAllReduce(["/task:0", "/task:1"], 2, (spec, 2, -1), session=session)
    for op in ("sum", "mean"):
        with Carried(cluster) as carried:
            found = ops.reduce(op, parts, parts)
        assert carried.by_worker == [both_gpus_in_both_shards.get(spec[:5], {})] * 2
        assert found.devices == FULL
        for component in found.values:
            assert (component == exact(op, values).astype(component.dtype)).all()


def test_tiers_by_size_with_nccl_in_them_give_results_in_the_order_of_the_input(
    session: cd.Session, cluster: Cluster
) -> None:
    tiers = [("nccl", 1, 256), ("nccl/xring", 2, 4096), ("psgpu", 2, -1)]
    ops = cd.MultiWorkerAllReduce(["/task:0"], 2, tiers, num_packs=1, session=session)
    sizes = (5000, 10, 700, 20, 9000)
    arrays = [[np.full(size, size + number, np.float32) for number in range(2)] for size in sizes]
    pairs = [(parts, parts) for parts in (per_gpu(session, pair) for pair in arrays)]
    with Carried(cluster) as carried:
        reduced = ops.batch_reduce("sum", pairs)
    assert carried.by_worker == [{ALL_REDUCE: 2 + 2 * 2}, {}], "one tier in one shard, one in two; psgpu needs none"
    for size, found in zip(sizes, reduced, strict=True):
        assert on(found) == list(GPUS)
        for component in found.values:
            assert component.shape == (size,) and (np.asarray(component) == 2 * size + 1).all()


def test_a_batch_of_several_types_is_reduced_together(session: cd.Session, cluster: Cluster) -> None:
    given = [values_of(dtype) for dtype in (np.float32, np.int32, np.float16, np.float32)]
    pairs = [(parts, parts) for parts in (per_gpu(session, values) for values in given)]
    for ops in (cd.NcclAllReduce(num_packs=2, session=session), cd.HierarchicalCopyAllReduce(session=session)):
        with Carried(cluster) as carried:
            reduced = ops.batch_reduce("mean", pairs)
        three_types_in_two_packs = {ALL_REDUCE: 2 * 3 * 2}
        assert carried.by_worker == [three_types_in_two_packs if isinstance(ops, cd.NcclAllReduce) else {}, {}]
        for values, found in zip(given, reduced, strict=True):
            check(found, "mean", values)


def test_a_result_goes_to_one_gpu_or_to_the_host_where_that_is_wanted(session: cd.Session) -> None:
    values = values_of(np.float32)
    parts = per_gpu(session, values)
    for ops in (cd.NcclAllReduce(session=session), cd.ReductionToOneDevice(session=session)):
        there = ops.reduce("sum", parts, "GPU:1")
        assert (np.asarray(there) == exact("sum", values)).all()
        assert (np.asarray(ops.reduce("sum", parts, "CPU:0")) == exact("sum", values)).all()


def test_a_value_is_broadcast_to_gpus(session: cd.Session) -> None:
    value = np.arange(30, dtype=np.float32)
    found = cd.NcclAllReduce(session=session).broadcast(value, per_gpu(session, values_of(np.float32)))
    assert on(found) == list(GPUS)
    assert all((np.asarray(component) == value).all() for component in found.values)


@pytest.mark.parametrize("ops", [None, cd.NcclAllReduce, cd.HierarchicalCopyAllReduce, cd.ReductionToOneDevice])
def test_a_mirrored_strategy_has_a_replica_on_every_gpu(session: cd.Session, cluster: Cluster, ops: Any) -> None:
    strategy = cd.MirroredStrategy(cross_device_ops=ops and ops(session=session), session=session)
    assert strategy.num_replicas_in_sync == 2
    values = values_of(np.float64)

    def step(value: Any) -> Any:
        context = cd.get_replica_context()
        total = context.all_reduce("sum", {"a": value})["a"]
        assert isinstance(total, DeviceArray) and total.device == context.replica_id_in_sync_group
        return context.all_reduce("mean", value), total

    with Carried(cluster) as carried:
        mean, total = strategy.run(step, [per_gpu(session, values)])
    assert carried.by_worker == [{ALL_REDUCE: 2 * 2} if ops in (None, cd.NcclAllReduce) else {}, {}]
    for found, op in ((mean, "mean"), (total, "sum")):
        assert isinstance(found, cd.PerReplica) and on(cd.Mirrored(found.values, found.devices)) == list(GPUS)
        assert all((np.asarray(component) == exact(op, values)).all() for component in found.values)
    assert (np.asarray(strategy.reduce("sum", mean)) == 2 * exact("mean", values)).all()
    check(strategy.extended.reduce_to("sum", per_gpu(session, values), total), "sum", values)


def test_a_strategy_reduces_by_nccl_over_gpus(session: cd.Session, cluster: Cluster) -> None:
    strategy = cd.MirroredStrategy(session=session)
    assert isinstance(strategy._ops, cd.NcclAllReduce)
    values = values_of(np.float32)
    parts = per_gpu(session, values)
    cluster.nccl_hold.touch()
    try:
        with pytest.raises(cd.errors.DeadlineExceededError):
            options = cd.CommunicationOptions(timeout_seconds=0.5)
            strategy.extended.reduce_to("sum", parts, parts, options)
    finally:
        cluster.nccl_hold.unlink()
    check(strategy.extended.reduce_to("sum", parts, parts), "sum", values)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_reduce_and_broadcast_by_nccl_between_the_gpus_of_two_workers(cluster: Cluster, dtype: Any) -> None:
    values = values_of(dtype, 2)

    def body(session: cd.Session, group: cd.Group) -> None:
        mine = filled(session, values[group.rank], GPUS[group.rank])
        options = cd.CommunicationOptions(implementation=NCCL)
        for root in (0, 1):
            total = group.reduce("sum", mine, root, options)
            assert (total is None) == (group.rank != root)
            if total is not None:
                assert (np.asarray(total) == exact("sum", values).astype(dtype)).all()
            spread = group.broadcast(mine, root, options)
            assert isinstance(spread, DeviceArray) and (np.asarray(spread) == values[root]).all()
        taken = group.broadcast(mine if group.rank == 0 else None, 0, options)
        assert (np.asarray(taken) == values[0]).all()

    with Carried(cluster) as carried:
        cluster.run(2, body, device="GPU:0")
    sums = {} if dtype is np.int16 else {REDUCE: 2}
    assert carried.by_worker == [{BROADCAST: 3, **sums}] * 2
