"""Cross-device operations over the devices of real workers, driven by one client."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import collectived as cd

WORKERS = [f"/job:worker/replica:0/task:{task}" for task in range(3)]
Make = Callable[..., cd.CrossDeviceOps]
ALL_REDUCES: dict[str, Make] = {
    "nccl": cd.NcclAllReduce,
    "hierarchical": cd.HierarchicalCopyAllReduce,
    "multi-worker": lambda **options: cd.MultiWorkerAllReduce(WORKERS, 0, **options),
}
OPS: dict[str, Make] = {**ALL_REDUCES, "one device": cd.ReductionToOneDevice}


@pytest.fixture(scope="module")
def sessions() -> Iterator[dict[str, cd.Session]]:
    """One per transport, so that groups are joined once."""
    opened: dict[str, cd.Session] = {}
    yield opened
    for session in opened.values():
        session.close()


@pytest.fixture
def here(three_workers: Any, sessions: dict[str, cd.Session], transport: str) -> cd.Session:
    """A session with the first of three workers."""
    if transport not in sessions:
        sessions[transport] = cd.connect(three_workers.addresses[0])
    assert sessions[transport].transport == transport
    return sessions[transport]


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest, here: cd.Session) -> cd.CrossDeviceOps:
    return OPS[request.param](session=here)


@pytest.fixture(params=ALL_REDUCES)
def all_reduce(request: pytest.FixtureRequest, here: cd.Session) -> cd.CrossDeviceOps:
    return ALL_REDUCES[request.param](session=here)


def devices(count: int, workers: int = 1) -> list[str]:
    """So many CPU devices, in turn on so many workers."""
    return [f"{WORKERS[index % workers]}/device:CPU:{index // workers}" for index in range(count)]


def value(count: int, workers: int = 1, shape: Any = (5,), dtype: Any = np.float32) -> cd.PerReplica:
    """Small whole numbers, different on every replica."""
    size = int(np.prod(shape))
    parts = [(np.arange(size) % 3 + replica).reshape(shape).astype(dtype) for replica in range(count)]
    return cd.PerReplica(parts, devices(count, workers))


def summed(given: cd.PerReplica) -> Any:
    return np.sum([np.asarray(part, np.complex128) for part in given.values], axis=0).real


def shares_nothing(*arrays: Any) -> bool:
    return not any(np.shares_memory(one, other) for n, one in enumerate(arrays) for other in arrays[:n])


@pytest.mark.parametrize(("count", "workers"), [(2, 1), (3, 1), (5, 1), (2, 2), (3, 2), (5, 3), (7, 3)])
def test_sums_and_means_over_any_number_of_devices(ops: Any, count: int, workers: int) -> None:
    given = value(count, workers)
    before = [part.copy() for part in given.values]
    found, mean = ops.reduce("sum", given, given), ops.reduce(cd.ReduceOp.MEAN, given, given)
    assert isinstance(found, cd.Mirrored) and found.devices == given.devices
    assert all(np.array_equal(part, summed(given)) and part.dtype == np.float32 for part in found.values)
    assert all(np.allclose(part, summed(given) / count) for part in mean.values)
    assert shares_nothing(*found.values, *mean.values, *given.values)
    for part in found.values:
        part += 1  # writable, and nobody else's
    assert all(np.array_equal(part, old) for part, old in zip(given.values, before, strict=True))


@pytest.mark.parametrize("wanted", ["CPU:0", "/cpu:1", f"{WORKERS[1]}/device:CPU:0", "CPU:7"])
def test_a_result_for_one_device_is_the_bare_array(ops: Any, wanted: str) -> None:
    given = value(3, 2)
    found = ops.reduce("mean", given, wanted)
    assert isinstance(found, np.ndarray) and np.allclose(found, summed(given) / 3) and found.flags.writeable
    assert shares_nothing(found, *given.values)


def test_destinations_may_be_permuted_repeated_or_others(ops: Any) -> None:
    given = value(3)
    for wanted in (
        ["CPU:2", "CPU:0", "CPU:1"],
        ["CPU:1", "CPU:1"],
        ["CPU:0", "CPU:1", "CPU:2", "CPU:0"],
        ["CPU:5"] * 2,
    ):
        found = ops.reduce("sum", given, cd.Mirrored([None] * len(wanted), wanted))
        assert [device[-5:] for device in found.devices] == wanted
        assert all(np.array_equal(part, summed(given)) for part in found.values)
        assert shares_nothing(*found.values, *given.values)


def test_an_array_as_destination_says_its_device_and_is_not_written(ops: Any) -> None:
    given, where = value(2), np.full(5, 9.0)
    assert np.array_equal(ops.reduce("sum", given, where), summed(given))
    assert where.tolist() == [9] * 5
    assert np.array_equal(ops.reduce("sum", given, cd.IndexedSlices([1.0], [0])), summed(given))


def test_a_device_may_hold_several_replicas(ops: Any) -> None:
    given = cd.PerReplica([np.full(3, replica) for replica in range(4)], ["CPU:0", "CPU:1", "CPU:0", "CPU:0"])
    found = ops.reduce("sum", given, given)
    assert [part.tolist() for part in found.values] == [[6] * 3] * 4 and shares_nothing(*found.values)


def test_one_component_where_it_is_wanted_is_copied(ops: Any) -> None:
    array = np.ones(3, np.float32)
    found = ops.reduce("sum", array, "CPU:0")
    assert found.tolist() == [1, 1, 1] and shares_nothing(found, array)
    assert ops.reduce("sum", cd.PerReplica([array]), cd.PerReplica([array])).dtype == np.float32
    assert shares_nothing(ops.batch_reduce("sum", [(array, "CPU:0")])[0], array)
    assert ops.reduce("sum", 3, "CPU:0") == 3 and ops.reduce("sum", array, "CPU:1").tolist() == [1, 1, 1]


MEANS = [("int8", "float32"), ("uint16", "float32"), ("int32", "float64"), ("int64", "float64"), ("float16", "float16")]


@pytest.mark.parametrize(("dtype", "expected"), MEANS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_mean_has_its_type_whatever_the_number_of_replicas(ops: Any, count: int, dtype: str, expected: str) -> None:
    given = value(count, dtype=dtype)
    for wanted in (given, "CPU:0", "CPU:6"):
        found = ops.reduce("mean", given, wanted)
        found = found.primary if isinstance(found, cd.Mirrored) else found
        assert found.dtype == expected and np.allclose(found, summed(given) / count, rtol=1e-3)


@pytest.mark.parametrize(("dtype", "large"), [("float16", 40_000), ("int8", 100), ("int64", 1 << 62)])
def test_a_mean_does_not_overflow_where_it_is_representable(ops: Any, dtype: str, large: int) -> None:
    given = cd.PerReplica([np.full(3, large, dtype)] * 3, devices(3, 2))
    assert np.all(ops.reduce("mean", given, given).primary == large)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float16, ml_dtypes.bfloat16, np.float64, np.complex64])
def test_sums_keep_their_type(ops: Any, dtype: Any) -> None:
    given = value(3, 2, dtype=dtype)
    found = ops.reduce("sum", given, given).primary
    assert found.dtype == dtype and np.array_equal(found, summed(given).astype(dtype))


def test_numbers_come_back_as_numbers(ops: Any) -> None:
    found = ops.reduce("sum", cd.PerReplica([1, 2]), cd.PerReplica([0, 0]))
    assert found.values == (3, 3) and type(found.primary) is int
    assert ops.reduce("mean", cd.PerReplica([1, 2]), "CPU:0") == 1.5
    assert ops.reduce("mean", 1, "CPU:0") == 1.0 and type(ops.reduce("mean", 1, "CPU:0")) is float


def test_worker_memory_goes_in_and_results_are_apart(here: cd.Session, ops: Any) -> None:
    parts = [here.empty((4,), np.float32) for _ in range(3)]
    for replica, part in enumerate(parts):
        part[:] = replica
    given = cd.PerReplica(parts)
    found = ops.reduce("sum", given, given)
    assert all(part.tolist() == [3] * 4 and part.flags.writeable for part in found.values)
    assert shares_nothing(*found.values, *parts)


def test_arrays_of_jax_come_back_as_such(ops: Any) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    given = cd.PerReplica([jax.numpy.arange(3.0) * replica for replica in range(3)])
    assert given.devices == ("CPU:0", "CPU:1", "CPU:2")
    found, mean = ops.reduce("sum", given, given), ops.reduce("mean", given, given.primary)
    assert all(isinstance(part, jax.Array) and part.tolist() == [0, 3, 6] for part in found.values)
    assert isinstance(mean, jax.Array) and mean.tolist() == [0, 1, 2]
    assert isinstance(ops.broadcast(given.primary, "CPU:1"), jax.Array)
    sparse = cd.PerReplica([cd.IndexedSlices(jax.numpy.ones((1, 2)), [replica]) for replica in range(2)])
    assert isinstance(ops.reduce("mean", sparse, "CPU:0").values, jax.Array)


def slices(*rows: int, dtype: Any = np.float32, shape: Any = (6, 2)) -> cd.IndexedSlices:
    return cd.IndexedSlices(np.ones((len(rows), 2), dtype), np.array(rows, np.int64), shape)


def test_sparse_components_follow_each_other(ops: Any) -> None:
    given = cd.PerReplica([slices(4, 1), slices(1), slices()])
    found = ops.reduce("sum", given, given)
    assert len(found.values) == 3
    for part in found.values:
        assert part.indices.tolist() == [4, 1, 1] and part.dense_shape == (6, 2) and part.values.shape == (3, 2)
    assert shares_nothing(*(part.values for part in found.values), *(part.indices for part in found.values))
    mean = ops.reduce("mean", cd.PerReplica([slices(4, dtype=np.int32), slices(4, dtype=np.int32)]), "CPU:0")
    assert mean.values.tolist() == [[0.5, 0.5]] * 2 and mean.values.dtype == np.float64
    assert mean.to_dense()[4].tolist() == [1, 1]


def test_one_sparse_component_is_copied(ops: Any) -> None:
    given = slices(2, 2)
    found = ops.reduce("sum", given, "CPU:0")
    assert found.indices.tolist() == [2, 2] and shares_nothing(found.values, given.values)
    assert shares_nothing(found.indices, given.indices)


def test_a_dense_component_makes_the_result_dense(ops: Any) -> None:
    given = cd.PerReplica([slices(4, 4), np.ones((6, 2), np.float32)])
    found = ops.reduce("sum", given, "CPU:0")
    assert found[4].tolist() == [3, 3] and found[0].tolist() == [1, 1]
    unknown = cd.PerReplica([slices(4, shape=None), np.ones((6, 2), np.float32)])
    with pytest.raises(ValueError, match="dense_shape is not known"):
        ops.reduce("sum", unknown, "CPU:0")


def test_a_mean_of_sparse_and_dense_components_does_not_overflow(ops: Any) -> None:
    for dtype, large, expected in (("int8", 100, "float32"), ("float16", 60_000, "float16")):
        rows = cd.IndexedSlices(np.full((2, 1), large, dtype), [0, 1], (2, 1))
        found = ops.reduce("mean", cd.PerReplica([rows, np.full((2, 1), large, dtype)]), "CPU:0")
        assert found.tolist() == [[large], [large]] and found.dtype == expected
    for huge in (np.int64(2**62), np.uint64(2**63)):
        rows = cd.IndexedSlices(np.full((2, 1), huge), [0, 0], (2, 1))
        mean = ops.reduce("mean", cd.PerReplica([np.full((2, 1), huge), rows]), cd.PerReplica([0, 0]))
        assert all(part.tolist() == [[1.5 * huge], [huge / 2]] and part.dtype == np.float64 for part in mean.values)


def test_elements_of_another_byte_order_are_taken(ops: Any) -> None:
    big = np.full((2, 1), 3, ">f4")
    for given in (cd.PerReplica([big]), cd.PerReplica([big, big.astype("<f4")])):
        for wanted in ("CPU:0", given):
            found = ops.reduce("mean", given, wanted)
            found = found.primary if isinstance(found, cd.Mirrored) else found
            assert found.tolist() == [[3], [3]] and found.dtype.isnative and found.dtype == np.float32
    rows = [cd.IndexedSlices(big.astype(order), np.array([1, 0], ">i8"), (2, 1)) for order in (">f4", "<f4")]
    sparse = ops.reduce("mean", cd.PerReplica(rows), "CPU:0")
    assert sparse.values.tolist() == [[1.5]] * 4 and sparse.indices.tolist() == [1, 0, 1, 0]
    assert ops.reduce("sum", cd.PerReplica([rows[0], big]), "CPU:0").tolist() == [[6], [6]]


def expected_reduction(op: str, given: Any) -> Any:
    """In float64 and by NumPy alone; of sparse values the values, row after row, and the indices."""
    parts = given.values if isinstance(given, cd.PerReplica) else [given]
    by = len(parts) if op == "mean" else 1
    if all(isinstance(part, cd.IndexedSlices) for part in parts):
        rows = [row / by for part in parts for row in np.asarray(part.values, np.float64)]
        return rows, [int(index) for part in parts for index in part.indices]
    total: Any = 0.0
    for part in parts:
        if isinstance(part, cd.IndexedSlices):
            dense = np.zeros(part.dense_shape or ())
            for row, index in zip(part.values, part.indices, strict=True):
                dense[index] = dense[index] + row
            part = dense
        total = total + np.asarray(part, np.float64)
    return total / by


def test_a_batch_mixes_everything_and_keeps_its_order(ops: Any) -> None:
    given = [
        (value(3, shape=(2, 3)), "CPU:4"),
        (large := value(3, shape=(1000,), dtype=np.float64), large),
        (value(2, 2, dtype=np.int32), value(2, 2)),
        (cd.PerReplica([slices(1), slices(2)]), "CPU:1"),
        (small := value(3, shape=()), small),
        (np.ones(2), "CPU:0"),
        (empty := value(3, shape=(0, 4)), empty),
        (value(3, dtype=np.int64), cd.Mirrored([0] * 3, devices(3)[::-1])),
        (both := cd.PerReplica([slices(4, 4), np.ones((6, 2), np.float32), slices(0)]), both),
        (cd.PerReplica([slices(), slices(5, 5, 5), slices(5)]), cd.PerReplica([0, 0])),
    ]
    for op in ("sum", "mean"):
        found = ops.batch_reduce(op, (pair for pair in given))
        assert isinstance(found, list) and len(found) == len(given)
        for (source, wanted), result in zip(given, found, strict=True):
            expected = expected_reduction(op, source)
            where: Any = wanted.devices if isinstance(wanted, cd.DistributedValues) else (wanted,)
            assert isinstance(result, cd.Mirrored) == (len(where) > 1)
            parts = result.values if isinstance(result, cd.Mirrored) else (result,)
            if isinstance(result, cd.Mirrored):
                assert [device[-5:] for device in result.devices] == [device[-5:] for device in where]
            for part in parts:
                if isinstance(expected, tuple):
                    assert np.allclose(part.values, expected[0]) and part.indices.tolist() == expected[1]
                    assert part.dense_shape == (6, 2)
                else:
                    assert part.shape == expected.shape and np.allclose(part, expected)


@pytest.mark.parametrize("packs", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("kind", [cd.NcclAllReduce, cd.HierarchicalCopyAllReduce])
def test_packs_cut_through_tensors_of_several_types(here: cd.Session, kind: Any, packs: int) -> None:
    shapes = [(7,), (), (0,), (3, 5), (1,), (2, 2)]
    types = [np.float32, np.float32, np.int32, np.int32, np.float64, np.float32]
    given = [value(3, 2, shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]
    found = kind(packs, session=here).batch_reduce("sum", [(one, one) for one in given])
    for one, result in zip(given, found, strict=True):
        assert result.primary.shape == one.primary.shape and result.primary.dtype == one.primary.dtype
        assert all(np.array_equal(part, summed(one)) for part in result.values)


def test_more_packs_than_elements(here: cd.Session) -> None:
    given = value(3, shape=(2,))
    found = cd.HierarchicalCopyAllReduce(4, session=here).reduce("sum", given, given)
    assert np.array_equal(found.primary, summed(given))


@pytest.mark.parametrize(("most", "group"), [(16, 1), (16, 2), (1 << 20, 10), (16, 0)])
def test_small_gradients_travel_together(here: cd.Session, most: int, group: int) -> None:
    given = [value(2, 2, (count,)) for count in (3, 4, 100, 2, 1, 4, 5, 1)]
    many: list[cd.CrossDeviceOps] = [
        cd.MultiWorkerAllReduce(WORKERS, 0, "xring", 0, most, group, session=here),
        cd.AllReduceCrossDeviceOps("nccl", 0, most, group, session=here),
    ]
    for ops in many:
        found = ops.batch_reduce("sum", [(one, one) for one in given])
        assert all(np.array_equal(got.primary, summed(one)) for got, one in zip(found, given, strict=True))


def test_options_of_a_call_are_followed(all_reduce: Any) -> None:
    given = [value(3, 2, (count,)) for count in (32, 8, 200, 1)]
    options = cd.CommunicationOptions(bytes_per_pack=200, timeout_seconds=30, implementation="ring")  # type: ignore[arg-type]
    pairs = [(one, one) for one in given]
    for found in (
        all_reduce.batch_reduce("sum", pairs, options),
        all_reduce.batch_reduce("sum", pairs, experimental_hints=options),
        [all_reduce.reduce("sum", *pair, options) for pair in pairs],
    ):
        assert all(np.array_equal(got.primary, summed(one)) for got, one in zip(found, given, strict=True))


@pytest.mark.parametrize("algorithm", ["xring", "pscpu", "pscpu/pscpu"])
@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_algorithms_and_shards_over_any_workers(here: cd.Session, algorithm: str, shards: int, workers: int) -> None:
    ops = cd.MultiWorkerAllReduce(WORKERS, 0, (algorithm, shards, -1), session=here)
    given = [value(2 * workers + 1, workers, (count,)) for count in (1, 1001)]
    found = ops.batch_reduce("sum", [(one, one) for one in given])
    assert all(np.array_equal(part, summed(one)) for got, one in zip(found, given, strict=True) for part in got.values)


def test_tiers_choose_by_bytes_and_results_keep_the_order_of_the_input(here: cd.Session) -> None:
    spec: Any = [("pscpu/pscpu", 2, 32), ("xring", 1, 4096), ("pscpu", 3, -1)]
    sizes = [(5000, np.float32), (8, np.float32), (8, np.float64), (4, np.float64), (1000, np.float32)]
    given = [value(4, 2, (count,), dtype) for count, dtype in sizes]
    for packs in (0, 2):
        ops = cd.MultiWorkerAllReduce(WORKERS, 0, spec, packs, session=here)
        for op, by in (("sum", 1), ("mean", 4)):
            found = ops.batch_reduce(op, [(one, one) for one in given])
            for got, one in zip(found, given, strict=True):
                assert got.primary.dtype == one.primary.dtype and np.allclose(got.primary, summed(one) / by)


@pytest.mark.parametrize("algorithm", ["nccl", "nccl/xring", "nccl/rechd", "nccl/pscpu"])
def test_algorithms_for_gpus_are_refused_on_cpus_and_the_device_is_named(here: cd.Session, algorithm: str) -> None:
    ops = cd.MultiWorkerAllReduce(WORKERS, 0, algorithm, session=here)
    given = value(2, 2)
    for _ in range(2):  # the group is none the worse for it
        with pytest.raises(cd.errors.UnimplementedError, match=r"device:CPU:0"):
            ops.reduce("sum", given, given)
    assert np.array_equal(cd.HierarchicalCopyAllReduce(session=here).reduce("sum", given, given).primary, summed(given))


def test_psgpu_needs_no_gpu(here: cd.Session) -> None:
    given = value(2, 2)
    ops = cd.MultiWorkerAllReduce(WORKERS, 0, ("psgpu", 2, -1), session=here)
    assert np.array_equal(ops.reduce("sum", given, given).primary, summed(given))


def test_workers_that_were_not_listed_are_named(here: cd.Session) -> None:
    ops = cd.MultiWorkerAllReduce(WORKERS[:1], 0, session=here)
    given = value(2, 2)
    with pytest.raises(ValueError, match=r"task:1/device:CPU:0, but worker_devices names task 0"):
        ops.reduce("sum", given, given)


def test_devices_that_do_not_match_go_by_one_device_and_say_so_once(
    here: cd.Session, caplog: pytest.LogCaptureFixture
) -> None:
    ops, given = cd.HierarchicalCopyAllReduce(session=here), value(2)
    with caplog.at_level(logging.INFO, "collectived"):
        ops.reduce("sum", given, "CPU:0"), ops.reduce("sum", given, "CPU:1")
        ops.batch_reduce("sum", [(given, "CPU:0"), (given, given)])
    (said,) = [record.getMessage() for record in caplog.records]
    assert "is wanted on" in said and said.endswith("ReductionToOneDevice is used")


@pytest.mark.parametrize("device", [None, "CPU:1", "CPU:5", f"{WORKERS[2]}/device:CPU:0"])
def test_the_device_on_which_is_reduced_does_not_change_the_result(here: cd.Session, device: str | None) -> None:
    ops, given = cd.ReductionToOneDevice(device, session=here), value(4, 2)
    found = ops.reduce("sum", given, given)
    assert found.devices == given.devices and all(np.array_equal(part, summed(given)) for part in found.values)


def test_an_accumulation_of_ones_own_gets_the_components_in_order(here: cd.Session) -> None:
    seen: list[Any] = []

    def strange(parts: list[Any]) -> Any:
        seen.append(parts)
        return parts[1]

    ops = cd.ReductionToOneDevice(accumulation_fn=strange, session=here)
    given = value(3, dtype=np.int32)
    found = ops.reduce("mean", given, given)
    assert all(one is other for one, other in zip(seen[0], given.values, strict=True))
    assert all(np.allclose(part, given.values[1] / 3) and part.dtype == np.float64 for part in found.values)
    bare = ops.reduce("sum", given, "CPU:0")
    assert np.array_equal(bare, given.values[1]) and shares_nothing(bare, *given.values)
    assert ops.reduce("sum", cd.PerReplica([slices(1), slices(1)]), "CPU:0").indices.tolist() == [1, 1]
    assert len(seen) == 2  # sparse components are not its matter


@pytest.mark.parametrize("returned", [None, "text", [1.0]])
def test_an_accumulation_that_returns_no_component_is_named(here: cd.Session, returned: Any) -> None:
    ops, given = cd.ReductionToOneDevice(accumulation_fn=lambda parts: returned, session=here), value(2)
    for op in ("sum", "mean"):
        with pytest.raises(TypeError, match=f"the result of accumulation_fn is a .*{type(returned).__name__}"):
            ops.reduce(op, given, given)


def test_broadcasts_are_copies(ops: Any) -> None:
    array, where = np.arange(6.0).reshape(2, 3), value(3, 2)
    found = ops.broadcast(array, where)
    assert isinstance(found, cd.Mirrored) and found.devices == where.devices
    assert all(np.array_equal(part, array) for part in found.values) and shares_nothing(array, *found.values)
    bare = ops.broadcast(array, "CPU:3")
    assert isinstance(bare, np.ndarray) and shares_nothing(bare, array)
    assert ops.broadcast(2.5, where).values == (2.5, 2.5, 2.5)
    assert ops.broadcast(np.array([True]), "CPU:0").tolist() == [True]
    for shape in ((6, 2), None):
        sparse = ops.broadcast(given := slices(3, 3, shape=shape), where)
        assert all(part.indices.tolist() == [3, 3] and part.dense_shape == shape for part in sparse.values)
        assert shares_nothing(given.values, *(part.values for part in sparse.values))


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("CPU:99", "worker 0 has no device 'CPU:99': it has CPU:0, CPU:1"),
        (f"{WORKERS[1]}/device:GPU:0", "worker 1 has no device 'GPU:0'"),
        ("/job:worker/task:9/cpu:0", "no worker for .*task:9.*its workers are: task 0, task 1, task 2"),
    ],
)
def test_devices_that_nobody_has(ops: Any, device: str, text: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: ops.reduce("sum", value(2), device),
        lambda: ops.reduce("sum", cd.PerReplica([np.ones(1)] * 2, ["CPU:0", device]), "CPU:0"),
        lambda: ops.broadcast(np.ones(1), device),
    ]
    for call in calls:
        with pytest.raises(cd.errors.NotFoundError, match=text):
            call()


def test_components_that_differ_are_one_error_and_the_group_goes_on(ops: Any) -> None:
    parts = [np.ones(3), np.ones(4), np.ones(3)]
    for _ in range(2):
        with pytest.raises(cd.errors.InvalidArgumentError, match=r"rank 1 differs: the value is float64\[4\] there"):
            ops.reduce("sum", cd.PerReplica(parts), "CPU:0")
    parts[1] = parts[1][:3]
    assert ops.reduce("sum", cd.PerReplica(parts), "CPU:0").tolist() == [3] * 3


def test_in_a_batch_the_error_names_which_value_differs(all_reduce: Any) -> None:
    good, bad = value(2), cd.PerReplica([np.ones(3), np.ones(3, np.float32)])
    with pytest.raises(ValueError, match=r"\[1\] is float(32|64)\[3\] there"):
        all_reduce.batch_reduce("sum", [(good, good), (bad, bad)])
    assert np.array_equal(all_reduce.reduce("sum", good, good).primary, summed(good))


def test_several_threads_use_one_operation(ops: Any) -> None:
    start = threading.Barrier(4)

    def one(seed: int) -> bool:
        start.wait(10)
        given = [value(3, 2, (seed + 1,)), value(2, 1, (7,), np.int64)]
        return all(
            np.array_equal(got.primary, summed(source))
            for _ in range(10)
            for got, source in zip(ops.batch_reduce("sum", [(one, one) for one in given]), given, strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(4)))


class Doubling(cd.CrossDeviceOps):
    """An operation of a user's own."""

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        assert isinstance(options, cd.CommunicationOptions) and reduce_op is cd.ReduceOp.SUM
        return self.broadcast(2 * summed(per_replica_value), destinations)


def test_an_operation_of_ones_own_gets_checked_arguments(here: cd.Session) -> None:
    ops, given = Doubling(session=here), value(2)
    assert np.array_equal(ops.reduce("sum", given, "CPU:0"), 2 * summed(given))
    pair, alone = ops.batch_reduce("sum", [(given, given), (np.ones(1), "CPU:0")])
    assert np.array_equal(pair.primary, 2 * summed(given)) and alone.tolist() == [1]
