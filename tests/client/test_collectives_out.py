"""`out=` of every collective: what takes the result, what is refused, and what an error leaves in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived_proto.errors import Code

Start = Callable[..., Any]
CALLS: dict[str, Start] = {  # on rank 0 of 2; the other gives the same, and the results are as below
    "all_reduce": lambda group, **terms: group.all_reduce("sum", value(), **terms),
    "reduce": lambda group, **terms: group.reduce("sum", value(), **terms),
    "broadcast": lambda group, **terms: group.broadcast(value(), **terms),
    "broadcast to a template": lambda group, **terms: group.broadcast(value(), 1, **terms),
    "broadcast to none": lambda group, **terms: group.broadcast(None, 1, **terms),
    "all_gather": lambda group, **terms: group.all_gather(value(), 1, **terms),
    "gather": lambda group, **terms: group.gather(value(), axis=-1, **terms),
    "scatter": lambda group, **terms: group.scatter(value(), **terms),
    "scatter to none": lambda group, **terms: group.scatter(None, 1, 1, **terms),
    "reduce_scatter": lambda group, **terms: group.reduce_scatter("sum", value(), 1, **terms),
    "all_to_all": lambda group, **terms: group.all_to_all(value(), **terms),
    "recv": lambda group, **terms: group.recv(1, **terms),
}
every_call = pytest.mark.parametrize("start", CALLS.values(), ids=list(CALLS))


def value() -> dict[str, Any]:
    return {"w": [np.arange(8.0).reshape(2, 4)], "b": np.arange(6, dtype=np.int32).reshape(2, 3)}


def zeros(like: Any) -> dict[str, Any]:
    return {"w": [np.zeros_like(like["w"][0], order="F")], "b": np.zeros_like(like["b"])}


@every_call
@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("apart", [False, True], ids=["in one piece", "in several"])
def test_out_takes_the_result_and_is_returned(make: Any, start: Start, async_op: bool, apart: bool) -> None:
    setting = make()
    setting.far.comes, setting.far.apart = value(), apart
    plain = start(setting.group)
    out = zeros(plain)
    arrays = [out["w"][0], out["b"]]
    result = start(setting.group, out=out, async_op=async_op)
    assert (result.result() if async_op else result) is out
    assert out["w"][0] is arrays[0] and out["b"] is arrays[1]
    assert np.array_equal(arrays[0], plain["w"][0]) and np.array_equal(arrays[1], plain["b"])


@every_call
@pytest.mark.parametrize("wrong", ["structure", "dtype", "axes", "number", "read-only"])
def test_what_cannot_take_the_result_is_refused_and_left_as_it_was(make: Any, start: Start, wrong: str) -> None:
    setting = make()
    setting.far.comes = value()
    out: dict[str, Any] = zeros(start(setting.group))
    if wrong == "structure":
        del out["b"]
    elif wrong == "number":
        out["b"] = 3
    elif wrong == "read-only":
        out["b"].flags.writeable = False
    else:
        out["b"] = np.zeros(out["b"].shape, np.int64) if wrong == "dtype" else np.zeros((*out["b"].shape, 1), np.int32)
    rings = len(setting.far.rings)
    with pytest.raises((ValueError, TypeError), match="^out") as caught:
        start(setting.group, out=out)
    assert not isinstance(caught.value, cd.errors.CollectiveError)
    known_before = not setting.far.prepared[len(setting.far.prepared)][0].open
    assert (len(setting.far.rings) == rings) is (known_before or wrong in ("number", "read-only"))
    assert not np.any(out["w"][0])
    start(setting.group)


@pytest.mark.parametrize("name", ["all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"])
def test_a_length_that_others_decide_is_compared_when_the_result_has_come(make: Any, name: str) -> None:
    group = make().group
    out = zeros(CALLS[name](group))
    out["b"] = np.zeros([length + 1 for length in out["b"].shape], np.int32)
    out["w"] = [np.zeros((*out["w"][0].shape[:-1], out["w"][0].shape[-1] + 1))]
    for async_op in (False, True):
        with pytest.raises(ValueError, match=r"out\['\w'\](\[0\])? is .*, the result is .*") as caught:
            work = CALLS[name](group, out=out, async_op=async_op)
            list(work.as_completed())
        assert not isinstance(caught.value, cd.errors.CollectiveError)
    assert not np.any(out["b"]) and not np.any(out["w"][0]), "nothing of it is written"
    CALLS[name](group)


@pytest.mark.parametrize("call", ["reduce", "gather"])
def test_where_a_rank_gets_no_result_out_is_not_looked_at(make: Any, call: str) -> None:
    group = make(size=2, rank=1).group
    out = np.zeros(1)
    start = group.gather if call == "gather" else lambda *value, **terms: group.reduce("sum", *value, **terms)
    assert start(np.ones(3), out=out) is None and start(np.ones(3), out="nothing", async_op=True).result() is None
    assert not np.any(out)


def test_the_input_itself_and_its_rows_may_take_the_result(make: Any) -> None:
    group = make().group
    mine = np.arange(8.0).reshape(4, 2)
    assert group.all_to_all(mine, out=mine) is mine
    assert mine.tolist() == [[0, 1], [2, 3]] * 2
    assert group.reduce_scatter("sum", mine, out=mine[1:3]).tolist() == [[0, 2], [4, 6]]
    assert mine.tolist() == [[0, 1], [0, 2], [4, 6], [2, 3]]
    assert group.all_gather(mine[:2], out=mine) is mine
    assert mine.tolist() == [[0, 1], [0, 2]] * 2


def test_arrays_of_other_libraries_take_what_is_gathered(make: Any) -> None:
    torch = pytest.importorskip("torch")
    out = torch.zeros(4, 2)
    assert make().group.all_gather(np.ones((2, 2), np.float32), out=out) is out
    assert out.tolist() == [[1, 1]] * 4


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
def test_an_error_before_anything_is_written_says_that_out_is_intact(make: Any, async_op: bool) -> None:
    setting = make()
    verdict = setting.far.verdict(Code.UNAVAILABLE, "rank 1 is lost", 0)
    setting.far.answer = lambda ring: [setting.far.failed(ring.instance, verdict)]
    out = np.full(3, 7.0)
    with pytest.raises(cd.errors.UnavailableError) as caught:
        work = setting.group.all_reduce("sum", np.ones(3), out=out, async_op=async_op)
        work.result()
    assert caught.value.out_intact and out.tolist() == [7, 7, 7]


def test_an_error_after_a_part_was_written_says_that_out_is_not_intact(make: Any) -> None:
    setting = make()
    verdict = setting.far.verdict(Code.UNAVAILABLE, "rank 1 is lost", 0)
    setting.far.answer = lambda ring: setting.far.complete(ring)[:1] + [setting.far.failed(ring.instance, verdict)]
    out = [np.zeros(2), np.zeros(1, np.int32)]
    work = setting.group.all_reduce("sum", [np.ones(2), np.ones(1, np.int32)], out=out, async_op=True)
    parts = work.as_completed()
    assert next(parts)[1] is out[1] and out[1].tolist() == [2]
    with pytest.raises(cd.errors.UnavailableError) as caught:
        next(parts)
    assert not caught.value.out_intact
    failure = work.exception()
    assert failure is not None and not failure.out_intact
