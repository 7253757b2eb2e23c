"""all_gather, reduce_scatter and all_to_all of values on GPUs, with real daemons: on fake GPUs, and on real ones."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.e2e.gpu.cluster import Cluster, filled
from tests.e2e.gpu.test_gpu_collectives import one_of

import collectived as cd
from collectived.gpu.array import DeviceArray

pytestmark = pytest.mark.usefixtures("client_cuda")

Body = Callable[[cd.Session, cd.Group], Any]


def on_host(array: Any) -> Any:
    """A result, which must lie on a GPU."""
    assert isinstance(array, DeviceArray)
    return np.asarray(array)


def run_on(cluster: Cluster, devices: tuple[str, ...], body: Callable[[cd.Session, cd.Group, str], Any]) -> list[Any]:
    """Runs a body as ranks on those devices."""

    def one(rank: int) -> Any:
        name = f"rows-{body.__qualname__}-{'-'.join(devices)}"
        with (
            cd.connect(cluster.address_of(rank, len(devices))) as session,
            session.join(name, len(devices), rank=rank, device=devices[rank], timeout=20) as group,
        ):
            return body(session, group, devices[rank])

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(one, range(len(devices))))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.bool_, np.complex64])
def test_all_gather_joins_what_lies_on_gpus(cluster: Cluster, dtype: Any) -> None:
    parts = [(np.arange(21).reshape(7, 3) * (rank + 1) % 5).astype(dtype) for rank in range(4)]

    def body(session: cd.Session, group: cd.Group) -> None:
        joined = on_host(group.all_gather(filled(session, parts[group.rank])))
        assert joined.dtype == dtype and (joined == np.concatenate(parts)).all()

    cluster.run(4, body, device="GPU:0")


@pytest.mark.parametrize("length", [8, 10, 3], ids=["even", "with a remainder", "fewer rows than ranks"])
@pytest.mark.parametrize(("op", "dtype"), [("sum", np.float32), ("mean", np.int32), ("max", np.float16)])
def test_reduce_scatter_gives_every_rank_its_piece(cluster: Cluster, op: str, dtype: Any, length: int) -> None:
    values = [((np.arange(length * 5).reshape(length, 5) + 7 * rank) % 50).astype(dtype) for rank in range(4)]
    exact = np.stack(values).astype(np.float64)
    whole = {"sum": exact.sum(0), "mean": exact.mean(0), "max": exact.max(0)}[op]

    def body(session: cd.Session, group: cd.Group) -> None:
        piece = on_host(group.reduce_scatter(op, filled(session, values[group.rank])))
        expected = np.array_split(whole, 4)[group.rank]
        assert piece.shape == expected.shape and (piece == expected).all()
        assert piece.dtype == (np.float64 if op == "mean" else dtype)

    cluster.run(4, body, device="GPU:0")


@pytest.mark.parametrize("length", [8, 10, 3], ids=["even", "with a remainder", "fewer rows than ranks"])
def test_all_to_all_sends_every_row_where_it_belongs(cluster: Cluster, length: int) -> None:
    values = [np.arange(length * 2, dtype=np.int32).reshape(length, 2) + 1000 * rank for rank in range(4)]

    def body(session: cd.Session, group: cd.Group) -> None:
        got = on_host(group.all_to_all(filled(session, values[group.rank])))
        assert (got == np.concatenate([np.array_split(value, 4)[group.rank] for value in values])).all()

    cluster.run(4, body, device="GPU:0")


def test_lengths_that_differ_come_by_the_host(cluster: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        rows = [np.full((rank + 1, 2), rank, np.float64) for rank in range(3)]
        value = {"more": filled(session, rows[group.rank]), "same": filled(session, np.full(4, group.rank, np.int32))}
        for _ in range(2):
            joined = group.all_gather(value)
            assert (on_host(joined["more"]) == np.concatenate(rows)).all()
            assert (on_host(joined["same"]) == np.repeat(range(3), 4)).all()
        out = filled(session, np.zeros((6, 2)))
        assert group.all_gather(value["more"], out=out) is out
        assert (np.asarray(out) == np.concatenate(rows)).all()
        work = group.all_gather(value, async_op=True)
        assert (on_host(work.wait()["more"]) == np.concatenate(rows)).all()

    cluster.run(3, body, device="GPU:0")


def test_rows_are_dealt_out_by_sizes(cluster: Cluster) -> None:
    """Where every rank gets as many as it gives, and where not."""

    def body(session: cd.Session, group: cd.Group) -> None:
        for sizes in ([[2, 3, 4]] * 3, [[3, 3, 3]] * 3, [[2, 3, 4], [3, 4, 2], [4, 2, 3]]):
            values = [np.arange(9, dtype=np.float32) + 10 * rank for rank in range(3)]
            got = group.all_to_all(filled(session, values[group.rank]), sizes=sizes[group.rank])
            parts = [np.split(value, np.cumsum(cut)[:-1])[group.rank] for value, cut in zip(values, sizes, strict=True)]
            assert (on_host(got) == np.concatenate(parts)).all()

    cluster.run(3, body, device="GPU:0")


def test_sizes_are_honoured(cluster: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = filled(session, np.arange(9, dtype=np.float32) + group.rank)
        piece = on_host(group.reduce_scatter("sum", x, sizes=(5, 0, 4)))
        assert piece.tolist() == (3 * np.arange(9) + 3)[(slice(0, 5), slice(5, 5), slice(5, 9))[group.rank]].tolist()
        sizes = (group.rank, 9 - group.rank, 0)
        got = on_host(group.all_to_all(x, sizes=sizes))
        sent = [(np.arange(9) + rank, rank) for rank in range(3)]
        expected = [
            np.concatenate([one[:cut] for one, cut in sent]),
            np.concatenate([one[cut:] for one, cut in sent]),
            np.zeros(0),
        ][group.rank]
        assert got.tolist() == expected.tolist()

    cluster.run(3, body, device="GPU:0")


def test_other_axes_are_moved_on_the_host(cluster: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = filled(session, np.full((2, 4), group.rank, np.float32))
        assert (on_host(group.all_gather(x, axis=1)) == [[0] * 4 + [1] * 4] * 2).all()
        assert on_host(group.reduce_scatter("sum", x, axis=-1)).tolist() == [[1, 1], [1, 1]]
        assert on_host(group.all_to_all(x, axis=1)).tolist() == [[0, 0, 1, 1]] * 2
        assert (on_host(group.all_gather(x, axis=-2)) == [[0] * 4] * 2 + [[1] * 4] * 2).all()

    cluster.run(2, body, device="GPU:0")


def test_values_keep_their_structure_and_kinds(cluster: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        value = {"gpu": filled(session, np.full((2, 3), group.rank)), "host": np.full(4, group.rank, np.int16)}
        joined = group.all_gather(value)
        assert (on_host(joined["gpu"]) == [[0] * 3] * 2 + [[1] * 3] * 2).all()
        assert type(joined["host"]) is np.ndarray and joined["host"].tolist() == [0] * 4 + [1] * 4
        work = group.all_to_all(value, async_op=True)
        leaves = dict(work.as_completed())
        assert on_host(leaves["gpu",]).tolist() == [[0] * 3, [1] * 3] and leaves["host",].tolist() == [0, 0, 1, 1]

    cluster.run(2, body, device="GPU:0")


def test_results_are_written_into_arrays_of_the_caller(cluster: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = filled(session, np.arange(6, dtype=np.float32) + group.rank)
        there, here = filled(session, np.zeros(12, np.float32)), np.zeros(12, np.float32)
        both = np.concatenate([np.arange(6), np.arange(6) + 1])
        for out in (there, here):
            assert group.all_gather(x, out=out) is out and (np.asarray(out) == both).all()
        with pytest.raises(ValueError, match=r"out is float32\[6\], the result is float32\[12\]"):
            group.all_gather(x, out=filled(session, np.zeros(6, np.float32)))
        assert group.all_to_all(x, out=x) is x, "it may be the input itself"
        assert (
            np.asarray(x) == (np.concatenate([both[:3], both[6:9]]), np.concatenate([both[3:6], both[9:]]))[group.rank]
        ).all()

    cluster.run(2, body, device="GPU:0")


def test_many_in_flight_come_out_right_and_in_stream_order(one_worker: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        sizes = np.random.default_rng(5).integers(1, 50_000, 30) * 2
        values = [filled(session, np.arange(n, dtype=np.float32) % 91 + group.rank) for n in sizes]
        works: list[tuple[int, cd.Work[Any]]] = []
        for n, value in zip(sizes, values, strict=True):
            works.append((n, group.all_gather(value, async_op=True)))
            works.append((n, group.reduce_scatter("sum", value, async_op=True)))
            works.append((n, group.all_to_all(value, async_op=True)))
        for number, (n, work) in enumerate(works):
            whole = np.arange(n, dtype=np.float32) % 91
            halves = whole.reshape(2, -1)[group.rank]
            expected = (np.concatenate([whole, whole + 1]), 2 * halves + 1, np.concatenate([halves, halves + 1]))
            assert (np.asarray(work.wait()) == expected[number % 3]).all()

    one_worker.run(2, body, device="GPU:0")


@pytest.mark.parametrize("kinds", [("GPU", "GPU"), ("GPU", "CPU"), ("CPU", "GPU", "GPU")], ids="-".join)
def test_ranks_on_several_devices_meet_in_one_group(one_worker: Cluster, kinds: tuple[str, ...]) -> None:
    size = len(kinds)
    devices = tuple(one_of(rank) if kind == "GPU" else "CPU:0" for rank, kind in enumerate(kinds))
    values = [np.arange(12 * size, dtype=np.float32) + 100 * rank for rank in range(size)]

    def body(session: cd.Session, group: cd.Group, device: str) -> None:
        x = values[group.rank]
        value = filled(session, x, device) if device.startswith("GPU") else x
        assert (np.asarray(group.all_gather(value)) == np.concatenate(values)).all()
        piece = np.sum(values, axis=0).reshape(size, -1)[group.rank]
        assert (np.asarray(group.reduce_scatter("sum", value)) == piece).all()
        rows = np.concatenate([one.reshape(size, -1)[group.rank] for one in values])
        assert (np.asarray(group.all_to_all(value)) == rows).all()

    run_on(one_worker, devices, body)


def test_values_of_the_host_and_of_a_gpu_meet_in_one_collective(cluster: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = np.full(6, group.rank, np.float32)
        value = filled(session, x) if group.rank == 0 else x
        joined = group.all_gather(value)
        assert isinstance(joined, DeviceArray if group.rank == 0 else np.ndarray)
        assert np.asarray(joined).tolist() == [0] * 6 + [1] * 6
        assert np.asarray(group.reduce_scatter("sum", value)).tolist() == [1] * 3

    cluster.run(2, body, device="GPU:0")


def test_ranks_that_differ_are_told_and_the_group_goes_on(cluster: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        with pytest.raises(cd.errors.InvalidArgumentError, match="differs"):
            group.all_gather(filled(session, np.zeros((2, 3 + group.rank))))
        assert on_host(group.all_gather(filled(session, np.full(1, group.rank)))).tolist() == [0, 1]

    cluster.run(2, body, device="GPU:0")


def test_a_missing_rank_is_named_at_the_deadline(one_worker: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        options = cd.CommunicationOptions(timeout_seconds=0.3)
        if group.rank == 0:
            with pytest.raises(cd.errors.DeadlineExceededError) as caught:
                group.reduce_scatter("sum", filled(session, np.zeros(4)), options=options)
            assert [member.rank for member in caught.value.missing] == [1]
        else:
            with pytest.raises(cd.errors.CollectiveError):
                group.recv(0, options=cd.CommunicationOptions(timeout_seconds=20))

    one_worker.run(2, body, device="GPU:0")


def test_no_rows_at_all_are_a_result_too(cluster: Cluster) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = filled(session, np.zeros((0, 3), np.float32))
        for got in (group.all_gather(x), group.reduce_scatter("sum", x), group.all_to_all(x)):
            assert on_host(got).shape == (0, 3)

    cluster.run(2, body, device="GPU:0")


@pytest.mark.parametrize("size", [2, 4])
def test_nccl_carries_rows_between_the_gpus_of_one_worker(one_worker: Cluster, size: int) -> None:
    options = cd.CommunicationOptions(implementation=cd.CommunicationImplementation.NCCL)
    devices = tuple(one_of(rank) for rank in range(size))  # with one GPU all of it is on that
    values = [np.arange(10 * size + 1, dtype=np.float32) + 100 * rank for rank in range(size)]

    def body(session: cd.Session, group: cd.Group, device: str) -> None:
        x = filled(session, values[group.rank], device)
        assert (on_host(group.all_gather(x, options=options)) == np.concatenate(values)).all()
        piece = np.array_split(np.sum(values, axis=0), size)[group.rank]
        assert (on_host(group.reduce_scatter("sum", x, options=options)) == piece).all()
        rows = np.concatenate([np.array_split(one, size)[group.rank] for one in values])
        assert (on_host(group.all_to_all(x, options=options)) == rows).all()

    run_on(one_worker, devices, body)
