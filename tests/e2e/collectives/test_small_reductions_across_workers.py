"""Small reductions of ranks that share a worker go by their segment, all else over the doorbell: in one order."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import collectived as cd

SMALL, LARGE = 1000, 1_200_000  # elements: in one tick of a segment, and not
TIMES = 4  # the third time, and from then on, the native core has a part in it
RING = cd.CommunicationOptions(implementation=cd.CommunicationImplementation.RING)


@pytest.mark.parametrize(("workers", "size"), [(2, 4), (2, 5), (3, 5), (3, 6)])
def test_all_ways_and_orders_mix(request: pytest.FixtureRequest, workers: int, size: int) -> None:
    """Whatever is in flight behind and before what, each has its own result; a rank may be alone on its worker."""
    cluster = request.getfixturevalue({2: "two_workers", 3: "three_workers"}[workers])

    def body(group: cd.Group) -> list[Any]:
        works: list[cd.Work[Any]] = []
        found = []
        for step in range(40):
            mine = np.full(3, 100 * step + group.rank)
            works.append(group.all_reduce("sum", mine, async_op=True))
            if step % 2:
                works.append(group.all_gather(mine[:1], async_op=True))
            if step % 3 == 0:
                works.append(group.all_reduce("max", np.full(LARGE, step + group.rank, np.float32), async_op=True))
            if step % 5 == 0:
                group.barrier()
                found.append(group.broadcast(step if group.rank == size - 1 else None, root=size - 1))
            works.append(group.reduce("min", mine, root=step % size, async_op=True))
        return found + [work.result() for work in works]

    ranks, last = range(size), size - 1
    for rank, got in enumerate(cluster.run(size, body)):
        results = iter(got)
        assert [next(results) for _ in range(0, 40, 5)] == list(range(0, 40, 5))
        for step in range(40):
            assert next(results).tolist() == [sum(100 * step + one for one in ranks)] * 3
            if step % 2:
                assert next(results).tolist() == [100 * step + one for one in ranks]
            if step % 3 == 0:
                assert np.all(next(results) == step + last)
            least = next(results)
            assert least is None if rank != step % size else least.tolist() == [100 * step] * 3


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int8, np.complex64])
def test_small_and_large_values_give_the_same_bits(two_workers: Any, dtype: Any) -> None:
    def body(group: cd.Group) -> None:
        chance = np.random.default_rng(group.rank)
        value = (chance.standard_normal(LARGE) * 3).astype(np.float32).astype(dtype)
        for op in ("sum", "mean", "product"):
            large = group.all_reduce(op, value, options=RING)
            small = group.all_reduce(op, value[:SMALL], options=RING)
            rooted = group.reduce(op, value[:SMALL], root=1, options=RING)
            assert small.dtype == large.dtype and (rooted is None) == (group.rank != 1), op
            for one in (small, rooted):
                assert one is None or one.tobytes() == large[:SMALL].tobytes(), op

    two_workers.run(4, body)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.complex64])
def test_results_have_the_bits_that_they_have_where_values_go_through_the_worker(
    two_workers: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    def body(group: cd.Group) -> list[bytes]:
        chance = np.random.default_rng(group.rank)
        value = (chance.standard_normal((7, 50)) * 3).astype(np.float32).astype(dtype)
        values: Any = {"one": value, "other": [value[0], np.full(3, group.rank, np.float64)]}
        found: list[Any] = [group.all_reduce(op, value) for op in ("sum", "mean", "product")]
        found += group.all_reduce("mean", values)["other"]
        found += [one for one in [group.reduce("sum", value, root=2)] if one is not None]
        rows = np.ascontiguousarray(value.T)
        for _ in range(TIMES):
            found += [group.reduce_scatter(op, rows) for op in ("sum", "mean", "product")]
            found.append(group.reduce_scatter("sum", rows, sizes=[0, 30, 1, 19]))
            found += group.reduce_scatter("mean", {"one": rows, "other": rows[:2, 0]}).values()
        return [np.asarray(one).tobytes() for one in found]

    by_segment = two_workers.run(4, body)
    monkeypatch.setenv("COLLECTIVED_TRANSPORT", "grpc")
    assert two_workers.run(4, body) == by_segment


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 0, 1), (1, 0, 0, 1)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_a_reduce_scatter_gives_each_rank_its_rows_wherever_it_is(
    two_workers: Any, placement: tuple[int, ...], dtype: Any
) -> None:
    """Where the rows of a worker's ranks stand side by side, and where they do not."""

    def body(rank: int) -> list[str]:
        wrong = []
        with (
            cd.connect(two_workers.addresses[placement[rank]]) as session,
            session.join(f"rows-{placement}-{np.dtype(dtype)}", 4, rank=rank, timeout=30) as group,
        ):
            for step in range(2 * TIMES):
                rows = 5 + step // TIMES
                values = [(np.arange(rows * 3).reshape(rows, 3) % 7 + one + step).astype(dtype) for one in range(4)]
                found = group.reduce_scatter("sum", values[rank])
                large = group.reduce_scatter("sum", np.repeat(values[rank], 20_000, axis=1))
                wanted = np.array_split(np.sum(values, axis=0, dtype=dtype), 4)[rank]
                wrong += [f"{step}: {found}"] * (found.tolist() != wanted.tolist())
                wrong += [f"{step}: the large one"] * (not np.array_equal(large[:, ::20_000], wanted))
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(body, range(4))) == [[]] * 4


def test_ranks_of_which_one_goes_the_other_way_are_told_that_they_differ(two_workers: Any) -> None:
    def body(group: cd.Group) -> str:
        group.barrier()
        with pytest.raises(cd.errors.InvalidArgumentError) as raised:
            group.all_reduce("sum", np.ones(LARGE if group.rank == 1 else SMALL), timeout=30)
        return str(raised.value)

    told = two_workers.run(4, body)
    assert len(set(told)) == 1 and "1200000" in told[0] and "1000" in told[0]


def test_threads_that_start_both_ways_at_once_do_not_mix_them_up(two_workers: Any) -> None:
    """Of two groups, each with a thread of its own."""

    def body(session: cd.Session, group: cd.Group) -> list[float]:
        found: list[float] = []
        with session.join(f"{group.name}-other", rank=group.rank, size=group.size) as other:

            def reduce() -> None:
                for step in range(100):
                    found.append(float(other.all_reduce("sum", float(step))))

            thread = threading.Thread(target=reduce)
            thread.start()
            for step in range(100):
                assert np.all(group.all_gather(np.full(600_000, step)) == step)  # over the doorbell
                assert group.all_reduce("sum", np.full(1, step))[0] == 4 * step
            thread.join()
        return found

    assert two_workers.run_sessions(4, body) == [[4.0 * step for step in range(100)]] * 4


def test_a_deadline_behind_small_reductions_holds(two_workers: Any, delays: Any) -> None:
    """What waits for its turn over the doorbell ends by its own deadline, and names who is missing."""

    def story() -> None:
        done = threading.Event()

        def body(group: cd.Group) -> tuple[float, set[int]] | None:
            if group.rank == 3:
                done.wait(60)
                return None
            for _ in range(3):
                group.all_reduce("sum", 1.0, async_op=True, timeout=50)
            begun = time.monotonic()
            with pytest.raises(cd.errors.DeadlineExceededError) as raised:
                group.all_gather(np.ones(1_200_000), timeout=1.0 if group.rank == 0 else 50)
            if group.rank == 0:
                done.set()
            return time.monotonic() - begun, {member.rank for member in raised.value.missing}

        found = two_workers.run(4, body)
        assert all(one is None or (one[1] == {3} and one[0] < 1.25 + 0.25 + delays.room) for one in found), found

    delays.hold(story)
