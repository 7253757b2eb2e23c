"""What concerns one rank alone: arguments that are refused, its `out`, its timeout, its byte order and its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import collectived as cd

Array = np.ndarray[Any, np.dtype[Any]]

pytestmark = pytest.mark.parametrize("transport", ["shared memory", "grpc"], indirect=True)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, workers: int) -> Any:
    return request.getfixturevalue("one_worker" if workers == 1 else "two_workers")


@pytest.mark.parametrize("workers", [1, 2])
def test_what_one_rank_alone_is_refused_is_no_word_for_the_group(cluster: Any, workers: int) -> None:
    def body(group: cd.Group) -> int:
        refused: list[Callable[[], Any]] = [
            lambda: group.all_gather(np.ones(2), axis=1),
            lambda: group.scatter(np.ones(3), root=group.rank, sizes=[1] * group.size),
            lambda: group.all_reduce("sum", np.ones(2), out=np.ones(3)),
            lambda: group.all_gather([np.ones(1)] * 5000),
        ]
        if group.rank == 1:
            for call in refused:
                with pytest.raises(ValueError) as caught:
                    call()
                assert not isinstance(caught.value, cd.errors.CollectiveError)
        other = (group.rank + 1) % 2
        sent = group.send(np.ones(2), other, async_op=True)
        if group.rank == 1:
            with pytest.raises(ValueError, match=r"out is float64\[3\], the result is float64\[2\]") as caught:
                group.recv(other, out=np.ones(3))
            assert not isinstance(caught.value, cd.errors.CollectiveError)
        else:
            group.recv(other)
        sent.wait()
        return int(group.all_reduce("sum", 1))

    assert cluster.run(2, body) == [2, 2]


def test_at_most_4096_arrays_are_gathered_at_once(one_worker: Any) -> None:
    def body(group: cd.Group) -> None:
        assert len(group.all_gather([np.ones(1, np.int8)] * 4096)) == 4096
        with pytest.raises(ValueError, match="4097 packs, and 4096 can travel at once") as caught:
            group.all_gather([np.ones(1, np.int8)] * 4097)
        assert not isinstance(caught.value, cd.errors.CollectiveError)
        group.barrier()

    one_worker.run(2, body)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_timeout_of_next_to_nothing_is_a_deadline_and_no_lost_worker(cluster: Any, workers: int) -> None:
    def body(group: cd.Group) -> type[BaseException]:
        group.all_reduce("sum", 1)
        with pytest.raises(cd.errors.CollectiveError) as caught:
            for _ in range(1000):  # one that is quick may be in time
                group.all_reduce("sum", 1, cd.CommunicationOptions(timeout_seconds=1e-9))
        return caught.type

    assert cluster.run(2, body) == [cd.errors.DeadlineExceededError] * 2


@pytest.mark.parametrize("workers", [1, 2])
def test_big_endian_arrays_are_reduced_in_place_and_averaged(cluster: Any, workers: int) -> None:
    def body(group: cd.Group) -> None:
        mine = (np.arange(3) + group.rank).astype(">f4")
        assert group.all_reduce("sum", mine, out=mine) is mine
        assert mine.tolist() == [1, 3, 5] and mine.dtype == ">f4"
        sparse = cd.IndexedSlices(np.ones((1, 1), ">f4"), [group.rank])
        mean = group.all_reduce("mean", sparse)
        assert mean.values.tolist() == [[0.5], [0.5]] and mean.values.dtype == np.float32
        assert group.all_reduce("mean", np.ones(1, ">f4")).tolist() == [1]

    cluster.run(2, body)


def arrays_in(value: Any) -> list[Array]:
    if isinstance(value, cd.IndexedSlices):
        return [value.values, value.indices]
    if isinstance(value, dict):
        return [array for part in value.values() for array in arrays_in(part)]
    if isinstance(value, list):
        return [array for part in value for array in arrays_in(part)]
    return [value]


@pytest.mark.parametrize("workers", [1, 2])
def test_nests_sparse_values_and_messages_alias_nothing_either(cluster: Any, workers: int) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        other = (group.rank + 1) % 2
        for make in (np.empty, session.empty):
            rows, numbers, dense = make((2, 3), np.float32), make((2,), np.int64), make((4,), np.float64)
            value: Any = {"s": [cd.IndexedSlices(rows, numbers)], "d": dense}
            results: list[Array] = []
            for name in ("all_reduce", "mean", "broadcast", "send", "late"):
                rows[:], numbers[:], dense[:] = 4, 1, 4
                if name == "send":
                    group.send(value, other)
                    found = group.recv(other)
                elif name == "late":
                    work = group.send(value, other, async_op=True)
                    found = group.recv(other)
                    work.wait()
                elif name == "broadcast":
                    found = group.broadcast(value)
                else:
                    found = group.all_reduce("sum" if name == "all_reduce" else "mean", value)
                rows[:], numbers[:], dense[:] = -1, -1, -1
                results += arrays_in(found)
            group.barrier()
            for number, array in enumerate(results):
                assert np.all(array > 0), "what went in is overwritten, not what came out"
                assert not any(np.shares_memory(array, mine) for mine in (rows, numbers, dense))
                assert not any(np.shares_memory(array, another) for another in results[:number])
                if array.flags.writeable:
                    array[...] = 9

    cluster.run_sessions(2, body)
