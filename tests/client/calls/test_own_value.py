"""A rank that needs no result because it is its own value: nothing is copied that need not be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectived as cd


def test_the_root_of_a_broadcast_takes_its_result_from_its_own_value(make: Any) -> None:
    setting = make()
    value: dict[str, Any] = {"w": np.arange(6.0).reshape(2, 3), "n": 3, "b": [np.ones(2, np.float32)]}
    result = setting.group.broadcast(value)
    assert setting.far.rings[0].keeps_own
    assert result["n"] == 3 and np.array_equal(result["w"], value["w"]) and np.array_equal(result["b"][0], np.ones(2))
    assert not np.may_share_memory(result["w"], value["w"]), "the result is the caller's to write"
    assert not setting.far.slot_at, "the worker was asked for no room"


@pytest.mark.parametrize("where", ["the value itself", "elsewhere"])
def test_out_takes_the_own_value_of_the_root(make: Any, where: str) -> None:
    setting = make()
    value = np.arange(6.0)
    out = value if where == "the value itself" else np.zeros(6)
    assert setting.group.broadcast(value, out=out) is out
    assert setting.far.rings[0].keeps_own
    assert out.tolist() == [0, 1, 2, 3, 4, 5]


def test_an_out_that_overlaps_the_value_otherwise_gets_the_value_as_it_was(make: Any) -> None:
    setting = make()
    memory = np.arange(8.0)
    setting.group.broadcast(memory[:6], out=memory[2:])
    assert memory.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    left, right = np.zeros(2), np.ones(2)
    setting.group.broadcast([left, right], out=[right, left])
    assert (left.tolist(), right.tolist()) == ([1, 1], [0, 0])
    assert not any(ring.keeps_own for ring in setting.far.rings)


OWN = {
    "all_gather": (lambda group, value, **more: group.all_gather(value[:3], **more), [1, 2, 3, 1, 2, 3]),
    "gather": (lambda group, value, **more: group.gather(value[:3], **more), [1, 2, 3, 1, 2, 3]),
    "scatter": (lambda group, value, **more: group.scatter(value, **more), [1, 2, 3]),
    "all_to_all": (lambda group, value, **more: group.all_to_all(value, **more), [1, 2, 3, 1, 2, 3]),
}
VALUE = np.arange(1.0, 7.0)


@pytest.mark.parametrize("leaves_own", [True, False])
@pytest.mark.parametrize(("call", "expected"), OWN.values(), ids=list(OWN))
def test_own_rows_of_a_result_need_not_come(make: Any, call: Any, expected: list[float], leaves_own: bool) -> None:
    setting = make()
    setting.far.apart, setting.far.leaves_own = True, leaves_own
    for turn in range(3):  # later the rows are not staged where only this rank needs them, so the far end has old ones
        out = np.full(len(expected), -1.0)
        result = call(setting.group, VALUE + turn, out=out) if turn else call(setting.group, VALUE)
        assert result.shape == (len(expected),)
        assert result[:3].tolist() == [turn + 1, turn + 2, turn + 3]
        assert turn or result.tolist() == expected
    assert all(ring.keeps_own for ring in setting.far.rings)


def test_rows_that_only_their_rank_needs_are_staged_until_the_worker_leaves_them_out(make: Any) -> None:
    setting = make()
    setting.far.apart = setting.far.leaves_own = True
    staged = []
    for turn in range(2):
        setting.group.scatter(VALUE + 10 * turn)
        staged.append(setting.far.given(setting.far.rings[-1], 0).tolist())
    assert staged == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 14, 15, 16]]


def test_a_worker_that_leaves_rows_out_only_sometimes_is_lost_and_gives_no_wrong_result(make: Any) -> None:
    setting = make()
    setting.far.apart = setting.far.leaves_own = True
    calls = iter([True, False])

    def gather() -> Any:
        setting.far.leaves_own = next(calls)
        return setting.group.gather(VALUE)

    def repeat() -> None:
        for _ in range(2):
            gather()

    with pytest.raises(cd.errors.UnavailableError, match="with rows that were not staged"):
        repeat()


def test_an_out_of_which_the_value_is_a_part_gets_all_rows_from_the_worker(make: Any) -> None:
    setting = make()
    setting.far.apart = setting.far.leaves_own = True
    out = np.arange(6.0)
    setting.group.all_gather(out[:3], out=out)
    assert out.tolist() == [0, 1, 2, 0, 1, 2] and not setting.far.rings[0].keeps_own


def test_who_goes_on_before_the_end_gets_what_was_submitted(make: Any) -> None:
    setting = make()
    value = np.ones(3)
    work = setting.group.broadcast(value, async_op=True)
    value[:] = 7
    assert work.result().tolist() == [1, 1, 1]
    assert not setting.far.rings[0].keeps_own


def test_a_value_in_worker_memory_comes_back_in_worker_memory(make: Any) -> None:
    setting = make()
    value = setting.memory.empty((3,), np.dtype(np.float32))
    value[:] = 5
    result = setting.group.broadcast(value)
    assert not setting.far.rings[0].keeps_own
    value[:] = 6
    assert result.tolist() == [5, 5, 5]


@pytest.mark.parametrize("value", [np.arange(6.0)[::2], np.ones((2, 3), order="F"), np.arange(3, dtype=">i4")])
def test_a_value_that_does_not_lie_as_it_travels_comes_back_as_it_travels(make: Any, value: Any) -> None:
    setting = make()
    result = setting.group.broadcast(value)
    assert np.array_equal(result, value) and result.flags.c_contiguous and result.dtype.isnative


def test_a_template_is_not_copied_anywhere(make: Any) -> None:
    setting = make(size=2, rank=1)
    setting.far.comes = np.full(1 << 16, 3.0)
    for _ in range(2):
        assert setting.group.broadcast(np.zeros(1 << 16)).tolist() == setting.far.comes.tolist()
    setting.far.comes = np.full(2, 3.0)
    assert setting.group.scatter(np.zeros(2), async_op=True).result().tolist() == [3.0]
    assert all(ring.addresses == () and not ring.keeps_own for ring in setting.far.rings)
    assert setting.far.asked == [], "no worker memory was needed"


def test_an_error_leaves_out_as_it_was(make: Any) -> None:
    setting = make()
    verdict = setting.far.verdict(cd.errors.Code.ABORTED, "over", 0)
    setting.far.answer = lambda ring: [setting.far.failed(ring.instance, verdict)]
    out = np.zeros(3)
    with pytest.raises(cd.errors.AbortedError) as caught:
        setting.group.broadcast(np.ones(3), out=out)
    assert caught.value.out_intact and not out.any()
