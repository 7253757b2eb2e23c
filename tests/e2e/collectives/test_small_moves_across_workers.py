"""Small values that are only moved between workers go by the segment, too, and soon without Python: the same results.

Larger ones, and those of which not every rank knows how large they are, end as they always did.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import collectived as cd
from collectived.shared.results import MappedResults

TIMES = 6  # the third time, and from then on, the native core has a part in it
SMALL, LARGE = 100, 1_200_000  # elements of float32: in one tick of a segment, and not
LARGE_BYTES = LARGE * 4
LARGE_TIMES = 4  # these never become small ones
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.complex128, np.bool_]
SPREADS = {"2 alone": (2, 2), "2 workers, 4 ranks": (2, 4), "3 workers, 5 ranks": (3, 5)}
Run = Callable[[Callable[[cd.Group], Any]], list[Any]]


def on(spread: str, request: pytest.FixtureRequest) -> Run:
    """Runs a body as the ranks of such a group."""
    workers, size = SPREADS[spread]
    cluster = request.getfixturevalue({2: "two_workers", 3: "three_workers"}[workers])
    return lambda body: cluster.run(size, body)


@pytest.fixture(params=SPREADS)
def run(request: pytest.FixtureRequest) -> Run:
    return on(request.param, request)


def pair_up(dtypes: list[Any]) -> list[Any]:
    """The first type on every spread, and each other one on one of them: the ways of bytes do not depend on it."""
    spreads = list(SPREADS)
    pairs = [(spread, dtypes[0]) for spread in spreads]
    pairs += [(spreads[number % len(spreads)], dtype) for number, dtype in enumerate(dtypes[1:])]
    return [pytest.param(*pair, id=f"{pair[0]}, {np.dtype(pair[1]).name}") for pair in pairs]


def how_often(count: int) -> int:
    return LARGE_TIMES if count >= LARGE else TIMES


@functools.lru_cache(16)  # every rank makes the same
def make(dtype: Any, count: int, seed: int) -> Any:
    """Random numbers, which a long value repeats: a prime number of them, so that no part of it is like another."""
    return np.resize(np.random.default_rng(seed).integers(0, 100, min(count, 9973)).astype(dtype), count)


def expect(found: Any, wanted: Any) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    ours, theirs = (np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in (found, wanted))
    assert np.array_equal(ours, theirs), f"other bytes than wanted: {wanted.dtype} of shape {wanted.shape}"


def spell(value: Any) -> Any:
    """A nest that can be compared."""
    if isinstance(value, dict):
        return {key: spell(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return type(value)(map(spell, value))
    return None if value is None else (np.asarray(value).dtype, np.asarray(value).tolist())


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize(("spread", "dtype"), pair_up(DTYPES))
def test_broadcast_brings_the_value_of_its_root(
    spread: str, dtype: Any, size: str, request: pytest.FixtureRequest
) -> None:
    counts = (0, 1, SMALL) if size == "small" else (LARGE_BYTES // np.dtype(dtype).itemsize,)

    def body(group: cd.Group) -> None:
        for count, step, root in itertools.product(counts, range(how_often(max(counts))), (0, group.size - 1)):
            wanted = make(dtype, count, 10 * step + root)
            mine = wanted if group.rank == root else np.zeros_like(wanted)
            expect(group.broadcast(mine, root=root), wanted)
            into = np.zeros_like(wanted)
            assert group.broadcast(mine, root=root, out=into) is into
            expect(into, wanted)
            group.broadcast(mine, root=root, out=mine)
            expect(mine, wanted)

    on(spread, request)(body)


@pytest.mark.parametrize("count", [0, 1, SMALL, LARGE])
def test_ranks_that_take_what_comes_get_it_beside_others_that_know(run: Any, count: int) -> None:
    """All but the root, or some of them, on any worker; the value's length changes under way."""

    def body(group: cd.Group) -> None:
        times = how_often(count)
        for step in range(2 * times):
            for who in ("all", "odd", "even"):
                root = step % group.size
                takes = {"all": True, "odd": group.rank % 2, "even": group.rank % 2 == 0}[who]
                wanted = make(np.float32, count + (step == times), step)
                mine = wanted if group.rank == root else None if takes else np.zeros_like(wanted)
                expect(group.broadcast(mine, root=root), wanted)
                work = group.broadcast(mine, root=root, async_op=True)
                assert group.all_reduce("sum", 1.0) == group.size
                expect(work.result(), wanted)

    run(body)


def cut(value: Any, size: int) -> list[Any]:
    ends = np.cumsum([len(value) // size + (rank < len(value) % size) for rank in range(size)])
    return np.split(value, ends[:-1])


@pytest.mark.parametrize(("spread", "dtype"), pair_up([np.float32, ml_dtypes.bfloat16, np.int8, np.bool_]))
def test_what_is_cut_or_joined_is_what_its_definition_says(
    spread: str, dtype: Any, request: pytest.FixtureRequest
) -> None:
    def body(group: cd.Group) -> None:
        for rows, step in itertools.product((0, 1, 7, 40_000), range(TIMES)):
            root = (step // 2) % group.size
            values = [make(dtype, 3 * rows, 100 * step + rank).reshape(rows, 3) for rank in range(group.size)]
            mine, joined = values[group.rank], np.concatenate(values)
            expect(group.all_gather(mine), joined)
            into = np.zeros_like(joined)
            assert group.all_gather(mine, out=into) is into
            expect(into, joined)
            gathered = group.gather(mine, root=root)
            assert gathered is None if group.rank != root else np.asarray(gathered).tobytes() == joined.tobytes()
            for takes in (False, True):
                given = joined if group.rank == root else None if takes else np.zeros_like(joined)
                expect(group.scatter(given, root=root), cut(joined, group.size)[group.rank])
            whole = [cut(np.roll(joined, rank, 0), group.size) for rank in range(group.size)]
            given = np.roll(joined, group.rank, 0)
            expect(group.all_to_all(given), np.concatenate([one[group.rank] for one in whole]))
            expect(group.all_gather(mine.T, axis=1), joined.T)

    on(spread, request)(body)


@pytest.mark.parametrize("lengths", ["equal, then not", "not", "large for one", "large for one at times"])
def test_lengths_that_differ_are_joined(run: Any, lengths: str) -> None:
    def count(rank: int, step: int) -> int:
        if lengths.startswith("large"):
            return LARGE if rank == 1 and (step % 2 or not lengths.endswith("times")) else 2
        return 2 + rank * (lengths == "not" or step >= TIMES)

    def body(group: cd.Group) -> None:
        for step in range(2 * how_often(max(count(1, 0), count(1, 1)))):
            values = [make(np.float32, count(rank, step), 100 * step + rank) for rank in range(group.size)]
            mine, joined = values[group.rank], np.concatenate(values)
            expect(group.all_gather(mine), joined)
            gathered = group.gather(mine, root=1)
            assert gathered is None if group.rank != 1 else np.asarray(gathered).tobytes() == joined.tobytes()
            work = group.all_gather(mine, async_op=True)
            assert group.all_reduce("sum", 1.0) == group.size
            expect(work.result(), joined)

    run(body)


def test_nests_are_joined_and_what_has_no_axis_is_refused(run: Any) -> None:
    def body(group: cd.Group) -> None:
        for step in range(TIMES):
            value = {"a": np.full((2, 2), group.rank + step), "b": [np.full(1, group.rank, np.float32)]}
            found: Any = group.all_gather(value)
            assert found["b"][0].tolist() == list(range(group.size)) and found["a"].shape == (2 * group.size, 2)
            with pytest.raises(cd.errors.InvalidArgumentError, match="axis|0-d"):
                group.all_gather(1.0)

    run(body)


def test_nests_scalars_and_values_without_arrays_are_broadcast(run: Any) -> None:
    def body(group: cd.Group) -> None:
        for step in range(TIMES):
            nest = {"b": [np.arange(5) + step, step], "a": (np.float32(step), None), "c": []}
            for value in (nest, step, {}, None, [], np.array(step), [np.zeros(0), np.zeros((3, 0), np.int8)]):
                for template in (value, None):
                    found = group.broadcast(value if group.rank == 1 else template, root=1)
                    assert spell(found) == spell(value)

    run(body)


def test_many_in_flight_keep_their_order(run: Any) -> None:
    def body(group: cd.Group) -> None:
        works: list[tuple[Any, cd.Work[Any]]] = []
        for step in range(60):
            root = step % group.size
            count = LARGE if step % 9 == 8 else SMALL
            wanted = make(np.float64, count, step)
            value = wanted if group.rank == root else None if step % 3 == 0 else np.zeros_like(wanted)
            works.append((wanted, group.broadcast(value, root=root, async_op=True)))
            if step % 4 == 0:
                works.append((np.full(1, group.size * step), group.all_reduce("sum", np.full(1, step), async_op=True)))
        for wanted, work in works:
            expect(work.result(), wanted)

    run(body)


def test_results_come_pack_by_pack_and_leaf_by_leaf(run: Any) -> None:
    def body(group: cd.Group) -> None:
        value = [np.full(3, 1.0), np.full(2, 2, np.int8), np.full(1, 3.0)]
        for mine in (value, value if group.rank == 0 else None):
            for _ in range(TIMES):
                found = dict(group.broadcast(mine, async_op=True).as_completed())
                assert {path: leaf.tolist() for path, leaf in found.items()} == {
                    (0,): [1.0] * 3,
                    (1,): [2] * 2,
                    (2,): [3.0],
                }

    run(body)


def test_the_place_of_a_large_result_is_given_back_before_the_next_comes(
    two_workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the worker takes, and clears, another one for each."""
    places: list[tuple[int, int]] = []
    open_slot = MappedResults.open_slot

    def note(self: MappedResults, told: Any) -> Any:
        places.append((told.arena, told.offset))
        return open_slot(self, told)

    def body(group: cd.Group) -> None:
        for step in range(10):
            wanted = make(np.float32, LARGE, step)
            expect(group.broadcast(wanted if group.rank == 0 else None), wanted)
            group.barrier()

    monkeypatch.setattr(MappedResults, "open_slot", note)
    two_workers.run(2, body)
    assert len(places) == 10 and len(set(places)) == 1, places
