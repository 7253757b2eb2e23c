"""Lists of arrays in calls that the core remembers: taken as they are, or nothing is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.native.ranks import Array, as_threads, make_plan
from tests.native.test_repeats import ABSENT, F32, I64, Ours

from collectived_native import core

SHAPES = ((2, 3), (), (5,), (4,))  # the last one of whole numbers
ORDER = (2, 1, 0, 3)  # in which they travel


def make_values(start: float = 1.0) -> list[Array]:
    kinds = (np.float32,) * 3 + (np.int64,)
    return [np.full(shape, start + at, kind) for at, (shape, kind) in enumerate(zip(SHAPES, kinds, strict=True))]


def list_parts(values: list[Array]) -> tuple[core.Part, ...]:
    return tuple((at, values[at].dtype, values[at].shape, values[at].nbytes) for at in ORDER)


def list_plan(engine: core.Engine, has_result: bool = True) -> core.Plan:
    floats, numbers = (5, 1, 6), (4,)
    phases = [(F32, (12,), floats, floats), (I64, (4,), numbers, numbers)]
    if has_result:
        return make_plan(engine, core.ALL_REDUCE, tuple(phases), reduce_op=1)
    given = tuple((dtype, counts, leaves, ()) for dtype, counts, leaves, _ in phases)
    return make_plan(engine, core.REDUCE, given, reduce_op=1, root=1)


def remember(ours: Ours, has_result: bool = True) -> None:
    values = make_values()
    parts = list_parts(values)
    ours.add(values, list_plan(ours.engine, has_result), None, parts=(parts, parts if has_result else (), ()))


def as_one(body: Callable[[Ours], None]) -> None:
    def run(engine: core.Engine, rank: int) -> None:
        ours = Ours(engine)
        remember(ours)
        body(ours)

    as_threads(1, run)


def spell(values: Any) -> list[Any]:
    return [value.tolist() for value in values]


def test_a_list_is_reduced_into_new_arrays_into_out_and_in_place() -> None:
    def body(ours: Ours) -> None:
        values, out = make_values(), make_values(0)
        wanted = spell(values)
        made = ours.run(values)
        assert spell(made) == wanted and [one.dtype for one in made] == [one.dtype for one in values]
        assert ours.made == [SHAPES[at] for at in ORDER]
        assert ours.run(values, out) is out and spell(out) == wanted
        assert ours.run(values, values) is values and spell(values) == wanted
        assert len(ours.made) == 4

    as_one(body)


def test_arrays_are_taken_as_they_are_or_nothing_is_done() -> None:
    def replaced(at: int, array: Array) -> list[Array]:
        return [array if number == at else one for number, one in enumerate(make_values(0))]

    def body(ours: Ours) -> None:
        values = make_values()
        fixed, memory = np.zeros(5, np.float32), np.zeros(16, np.float32)
        fixed.flags.writeable = False
        results: list[Any] = [
            tuple(make_values(0)),
            make_values(0)[:3],
            [*make_values(0), np.zeros(1)],
            replaced(2, fixed),
            replaced(2, np.zeros(10, np.float32)[::2]),
            replaced(2, np.zeros(5, np.float64)),
            replaced(2, np.zeros((5, 1), np.float32)),
            replaced(1, values[2][1:2].reshape(())),  # amid another value
            replaced(0, memory[:6].reshape(2, 3))[:2] + [memory[5:10], make_values(0)[3]],  # one result amid another
            replaced(2, values[2][::-1]),
        ]
        for out in results:
            before = spell(out)
            assert ours.run(values, out) is ABSENT
            assert spell(out) == before
        inputs: list[Any] = [
            make_values()[:3],
            tuple(make_values()),
            [*make_values()[:3], np.zeros(4, np.int32)],
            [*make_values()[:3], [1, 2, 3, 4]],
            [np.zeros((3, 2), np.float32), *make_values()[1:]],
            [np.zeros((3, 2), np.float32).T, *make_values()[1:]],
        ]
        assert [ours.run(value) for value in inputs] == [ABSENT] * len(inputs)
        assert spell(ours.run(values)) == spell(make_values())

    as_one(body)


def test_lists_of_one_length_are_remembered_beside_each_other() -> None:
    def run(engine: core.Engine, rank: int) -> None:
        ours = Ours(engine)
        for count in (3, 4, 5):
            pair = [np.ones(count, np.float32), np.ones(2, np.float32)]
            parts = tuple((at, one.dtype, one.shape, one.nbytes) for at, one in enumerate(pair))
            plan = make_plan(engine, core.ALL_REDUCE, ((F32, (count + 2,), (count, 2), (count, 2)),), reduce_op=1)
            ours.add(pair, plan, None, parts=(parts, parts, ()))
        for count in (3, 4, 5, 3):
            assert spell(ours.run([np.ones(count, np.float32), np.ones(2, np.float32)])) == [[1.0] * count, [1.0] * 2]
        made = len(ours.made)
        assert ours.run([np.ones(6, np.float32), np.ones(2, np.float32)]) is ABSENT
        assert len(ours.made) == made

    as_threads(1, run)


def test_results_that_change_places_with_values_go_the_long_way() -> None:
    def run(engine: core.Engine, rank: int) -> None:
        ours, pair = Ours(engine), [np.ones(4, np.float32), np.zeros(4, np.float32)]
        parts = tuple((at, one.dtype, one.shape, one.nbytes) for at, one in enumerate(pair))
        plan = make_plan(engine, core.ALL_REDUCE, ((F32, (8,), (4, 4), (4, 4)),), reduce_op=1)
        ours.add(pair, plan, None, parts=(parts, parts, ()))
        assert ours.run(pair, pair[::-1]) is ABSENT
        assert ours.run(pair, [pair[0], pair[0]]) is ABSENT
        assert ours.run(pair, pair) is pair

    as_threads(1, run)


def test_the_same_array_may_be_given_twice_but_not_written_over() -> None:
    def run(engine: core.Engine, rank: int) -> None:
        ours, one = Ours(engine), np.ones(4, np.float32)
        parts = tuple((at, one.dtype, one.shape, one.nbytes) for at in range(2))
        plan = make_plan(engine, core.ALL_REDUCE, ((F32, (8,), (4, 4), (4, 4)),), reduce_op=1)
        ours.add([one, one], plan, None, parts=(parts, parts, ()))
        assert spell(ours.run([one, one])) == [[1.0] * 4] * 2
        assert ours.run([one, one], [one, np.zeros(4, np.float32)]) is ABSENT

    as_threads(1, run)


def test_a_rank_without_a_result_gets_none() -> None:
    def run(engine: core.Engine, rank: int) -> Any:
        ours = Ours(engine)
        if rank == 0:
            remember(ours, has_result=False)
            return ours.take(make_values())
        values, parts = make_values(), list_parts(make_values())
        floats, numbers = (5, 1, 6), (4,)
        phases = (F32, (12,), floats, floats), (I64, (4,), numbers, numbers)
        ours.add(values, make_plan(engine, core.REDUCE, phases, reduce_op=1, root=1), None, parts=(parts, parts, ()))
        return spell(ours.take(values))

    assert as_threads(2, run) == [None, [(2 * one).tolist() for one in make_values()]]


def test_arrays_that_say_what_comes_are_compared_and_not_read() -> None:
    """As of a rank that gets a broadcast."""

    def run(engine: core.Engine, rank: int) -> Any:
        ours, values = Ours(engine), make_values(rank)
        parts = list_parts(values)
        floats, numbers = (5, 1, 6), (4,)
        leaves = [(floats, numbers), ((), ())][:: 1 if rank == 1 else -1]
        phases = tuple(
            (dtype, (count,), leaves[0][number], leaves[1][number])
            for number, (dtype, count) in enumerate([(F32, 12), (I64, 4)])
        )
        plan = make_plan(engine, core.BROADCAST, phases, root=1)
        ours.add(values, plan, None, parts=(parts, (), ()) if rank == 1 else ((), parts, parts))
        if rank == 0:
            others = [np.zeros((3, 2), np.float32), *values[1:]]
            assert ours.run(others) is ABSENT and ours.run(values[:3]) is ABSENT
        return ours.take(values)

    got, sent = as_threads(2, run)
    assert spell(got) == spell(make_values(1)) and sent is None


def test_what_waits_is_handed_over_with_the_lists() -> None:
    pair = make_values(0), make_values(1)

    def run(engine: core.Engine, rank: int) -> bool:
        ours = Ours(engine)
        remember(ours)
        if rank == 1:
            time.sleep(0.1)  # beyond what the core waits by itself
        out = make_values(0)
        found = ours.take(make_values(rank), out)
        same = found is out or all(one is other for one, other in zip(found, out, strict=True))
        return same and spell(out) == [(one + other).tolist() for one, other in zip(*pair, strict=True)]

    assert as_threads(2, run) == [True, True]


@pytest.mark.parametrize("change", ["fewer", "bytes", "axes"])
def test_parts_that_do_not_fit_the_plan_are_refused(change: str) -> None:
    def body(ours: Ours) -> None:
        values = make_values()
        parts = list(list_parts(values))
        at, dtype, shape, nbytes = parts.pop()
        if change != "fewer":
            parts.append((at, dtype, (1,) * 17 if change == "axes" else shape, nbytes + 8 * (change == "bytes")))
        with pytest.raises(ValueError, match="leaves|bytes|part"):
            ours.add(values, list_plan(ours.engine), None, parts=(tuple(parts), list_parts(values), ()))
        assert spell(ours.run(values)) == spell(values)  # as remembered before

    as_one(body)
