"""Sparse values: reduced as gathers beside the dense leaves, broadcast and sent as they are."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import collectived as cd
from collectived.errors import Code
from collectived.values.indexed_slices import IndexedSlices
from collectived_proto.ipc import messages
from collectived_proto.types import AllGather, AllReduce, Broadcast, Gather, Reduce, Send


def slices(dtype: Any = np.float32, rows: int = 2, dense_shape: Any = (9, 3)) -> IndexedSlices:
    values = np.arange(3 * rows).reshape(rows, 3).astype(dtype)
    return IndexedSlices(values, np.arange(rows)[::-1].copy(), dense_shape)


def operations(far: Any) -> list[Any]:
    return [far.prepared[ring.prepared][0].operation for ring in far.rings]


def test_dense_leaves_travel_together_then_each_sparse_one(make: Any) -> None:
    setting = make(size=2)
    value = {"b": np.ones(2), "emb": slices(), "a": [slices(rows=0, dense_shape=None), 3], "n": None}
    result = setting.group.all_reduce("sum", value)
    assert list(result) == ["b", "emb", "a", "n"]
    assert result["b"].tolist() == [2, 2] and result["a"][1] == 6 and result["n"] is None
    emb, empty = result["emb"], result["a"][0]
    assert isinstance(emb, IndexedSlices) and emb.dense_shape == (9, 3)
    assert np.array_equal(emb.values, np.concatenate([slices().values] * 2)) and emb.indices.tolist() == [1, 0, 1, 0]
    assert empty.values.shape == (0, 3) and empty.dense_shape is None
    assert operations(setting.far) == [AllReduce(cd.ReduceOp.SUM), AllGather(), AllGather()]
    assert [ring.instance for ring in setting.far.rings] == [0, 1, 2]
    dense, first, second = (setting.far.prepared[number][0] for number in (1, 2, 3))
    assert [leaf.path for leaf in dense.leaves] == ["['a'][1]", "['b']"]
    assert [leaf.path for leaf in first.leaves] == ["['a'][0].values", "['a'][0].indices"]
    assert [leaf.path for leaf in second.leaves] == ["['emb'].values", "['emb'].indices"]
    assert "dense_shape=None" in first.structure and "dense_shape=(9, 3)" in second.structure


def test_a_sparse_value_alone_is_one_collective(make: Any) -> None:
    setting = make(size=3)
    result = setting.group.all_reduce("sum", slices())
    assert result.indices.tolist() == [1, 0] * 3
    assert operations(setting.far) == [AllGather()]
    assert setting.far.prepared[1][0].leaves[0].path == ".values"


@pytest.mark.parametrize(
    ("given", "got"),
    [
        *[(np.int8, np.float32), (np.uint16, np.float32), (np.int32, np.float64), (np.uint64, np.float64)],
        *[(dtype, dtype) for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64)],
    ],
    ids=lambda dtype: np.dtype(dtype).name,
)
def test_the_mean_divides_values_by_the_number_of_ranks(make: Any, given: Any, got: Any) -> None:
    value = slices(given)
    result = make(size=4).group.all_reduce("mean", value)
    assert result.values.dtype == got and result.indices.dtype == value.indices.dtype
    assert np.array_equal(
        result.values.astype(np.complex128), np.concatenate([value.values.astype(np.complex128) / 4] * 4)
    )


def test_only_the_root_of_a_reduce_gets_the_result(make: Any) -> None:
    root, other = make(size=2, rank=1), make(size=2, rank=0)
    value = [np.ones(2), slices()]
    result = root.group.reduce("sum", value, root=1)
    assert result[0].tolist() == [2, 2] and result[1].indices.tolist() == [1, 0, 1, 0]
    assert other.group.reduce("sum", value, root=1) is None
    assert operations(other.far) == [Reduce(cd.ReduceOp.SUM, 1), Gather(1)]
    work = other.group.reduce("sum", value, root=1, async_op=True)
    assert list(work.as_completed()) == [] and work.result() is None


def test_a_broadcast_is_one_collective_and_brings_dense_shape(make: Any) -> None:
    root, template = make(size=2), make(size=2, rank=1)
    value: dict[str, Any] = {"emb": slices(), "b": np.ones(2)}
    emb = value["emb"]
    template.far.comes = {"b": value["b"], "emb": [emb.values, emb.indices, *emb.dense_shape]}  # leaf by leaf
    for result in (root.group.broadcast(value), template.group.broadcast(value)):
        assert result["emb"].dense_shape == (9, 3) and result["emb"].values is not value["emb"].values
        assert np.array_equal(result["emb"].values, value["emb"].values)
    assert operations(root.far) == [Broadcast()]
    collective = root.far.prepared[1][0]
    assert collective.structure == "{'b': *, 'emb': IndexedSlices(values=*, indices=*, dense_shape=(*, *))}"


def test_sparse_values_are_sent_and_come_as_such(make: Any) -> None:
    setting = make(size=2)
    setting.group.send([slices()], 1)
    collective = setting.far.prepared[1][0]
    assert collective.operation == Send(1) and [leaf.path for leaf in collective.leaves][:2] == [
        "[0].values",
        "[0].indices",
    ]

    class Twin(tuple):  # type: ignore[type-arg]
        _fields = ("values", "indices", "dense_shape")

    Twin.__name__ = "IndexedSlices"
    setting.far.comes = [Twin((np.ones((2, 3)), np.arange(2), (9, 3)))]
    (found,) = setting.group.recv(1)
    assert isinstance(found, IndexedSlices) and found.dense_shape == (9, 3) and found.indices.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda group: group.all_gather([slices()]),
            r"\[0\] is IndexedSlices, which all_gather\(axis=0\) does not take",
        ),
        (lambda group: group.gather({"e": slices()}), r"\['e'\] is IndexedSlices.*: all_reduce, reduce, broadcast"),
        (lambda group: group.scatter(slices()), "the value is IndexedSlices"),
        (lambda group: group.reduce_scatter("sum", slices()), "the value is IndexedSlices"),
        (lambda group: group.all_to_all(slices()), "give its values and indices as arrays"),
        (lambda group: group.all_reduce("max", [1, slices()]), r"\[1\] is IndexedSlices, which max does not take"),
        (lambda group: group.all_reduce("sum", slices(bool)), r"\.values has dtype bool, which sum does not take"),
        (lambda group: group.all_reduce("sum", slices(), out=slices()), "out cannot take IndexedSlices"),
        (lambda group: group.recv(1, out=slices()), "out is a .*IndexedSlices"),
    ],
)
def test_what_sparse_values_do_not_do_is_refused_before_anything_is_sent(make: Any, call: Any, says: str) -> None:
    setting = make(size=2)
    with pytest.raises(TypeError, match=says):
        call(setting.group)
    assert setting.far.rings == []


def test_their_work_is_one(make: Any) -> None:
    setting = make(size=2)
    far = setting.far
    far.answer = lambda ring: []
    work = setting.group.all_reduce("sum", [np.ones(1), slices()], async_op=True)
    called: list[Any] = []
    ended = threading.Event()

    def callback(work: cd.Work[Any]) -> None:
        called.append(work.result()[0].tolist())
        ended.set()

    work.add_done_callback(callback)
    far.until(lambda: len(far.rings) == 2)
    for answer in far.complete(far.rings[1]):
        far.doorbell.send(answer)
    assert not work.done() and called == []
    with pytest.raises(TimeoutError, match=r"all_reduce\(sum\) has not ended within 0.01 s"):
        work.wait(0.01)
    assert "all_reduce(sum) instance 0 and 1 more" in repr(work) and "in flight" in repr(work)
    for answer in far.complete(far.rings[0]):
        far.doorbell.send(answer)
    assert work.exception() is None and work.done()
    result = work.result()
    assert result is work.wait() and result[1].indices.tolist() == [1, 0, 1, 0]
    assert ended.wait(10) and called == [[2.0]]


def test_their_leaves_come_with_paths(make: Any) -> None:
    setting = make(size=2)
    value = {"a": np.ones(1), "b": slices(), "c": 2, "d": slices(rows=1)}
    work = setting.group.all_reduce("sum", value, async_op=True)
    arrived = list(work.as_completed())
    assert [path for path, _ in arrived] == [("c",), ("a",), ("b",), ("d",)]
    assert arrived[2][1].indices.tolist() == [1, 0, 1, 0] and arrived[2][1].dense_shape == (9, 3)
    assert work.result()["b"].values is arrived[2][1].values and work.result()["a"] is arrived[1][1]
    assert [path for path, _ in work.as_completed()] == [("d",), ("c",), ("b",), ("a",)], "once collected"


def test_they_can_be_awaited_and_called_back(make: Any) -> None:
    group = make(size=2).group

    async def main() -> Any:
        return await group.all_reduce("sum", [slices(), slices(), 1], async_op=True)

    assert asyncio.run(main())[2] == 2


def test_an_error_of_any_part_is_the_error_of_all(make: Any) -> None:
    setting = make(size=2)
    far = setting.far
    verdict = far.verdict(Code.INVALID_ARGUMENT, "rank 1 differs", 1, successor=101)
    far.answer = lambda ring: [far.failed(1, verdict)] if (ring.generation, ring.instance) == (100, 1) else None
    with pytest.raises(cd.errors.InvalidArgumentError, match="rank 1 differs"):
        setting.group.all_reduce("sum", [np.ones(1), slices(), slices()])
    assert setting.group.generation == 101
    assert setting.group.all_reduce("sum", [np.ones(1), slices()])[0].tolist() == [2]


def test_more_of_them_than_may_be_in_flight_take_turns(make: Any) -> None:
    setting = make(size=1)
    group = setting.group
    value = [slices() for _ in range(100)]
    assert len(group.all_reduce("sum", value)) == 100
    setting.far.answer = lambda ring: [] if ring.instance < 164 else None
    works = [group.barrier(async_op=True) for _ in range(64)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(group.all_reduce, "sum", value)
        setting.far.until(lambda: setting.far.rings[-1].instance == 163)
        for number in range(100, 164):
            setting.far.doorbell.send(messages.Completion(number, 0, True, False).encode())
        assert len(waiting.result(10)) == 100
    cd.wait(works)


def test_worker_memory_is_gathered_where_it_lies(make: Any) -> None:
    setting = make(size=2)
    values = setting.memory.empty((2, 3), np.dtype(np.float32))
    indices = setting.memory.empty((2,), np.dtype(np.int64))
    values[:], indices[:] = 1, 4
    result = setting.group.all_reduce("sum", IndexedSlices(values, indices))
    assert not setting.far.rings[0].staged and not result.values.flags.writeable
    assert result.values.shape == (4, 3) and result.indices.tolist() == [4] * 4


def test_where_memory_is_refused_nothing_starts(make: Any) -> None:
    setting = make(size=2)
    setting.group.all_reduce("sum", np.ones(2))
    setting.far.refusals.extend([(Code.RESOURCE_EXHAUSTED, "no more memory")] * 2)
    huge = IndexedSlices(np.zeros((3 << 20, 2)), np.zeros(3 << 20, np.int64))
    with pytest.raises(cd.errors.ResourceExhaustedError, match="no more memory"):
        setting.group.all_reduce("sum", [np.ones(2), huge])
    assert len(setting.far.rings) == 1
