"""Collectives that cut values along an axis or join them, and those of ranks that take what comes."""

from __future__ import annotations

import gc
from collections import OrderedDict, namedtuple
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import collectived as cd
from collectived_proto.ipc import messages
from collectived_proto.types import (
    AllGather,
    AllToAll,
    Broadcast,
    Gather,
    Packing,
    Recv,
    ReduceScatter,
    Scatter,
    Tier,
)

Point = namedtuple("Point", "x y")
EVERY = [bool, np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.complex64, np.complex128] + [
    np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
]
BOTH = pytest.mark.parametrize("apart", [False, True], ids=["in one piece", "in several"])


@BOTH
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_all_gather_joins_along_the_axis(make: Any, axis: int, apart: bool) -> None:
    setting = make(size=3)
    setting.far.apart = apart
    value = np.arange(6.0).reshape(2, 3)
    result = setting.group.all_gather(value, axis)
    assert np.array_equal(result, np.concatenate([value] * 3, axis))
    assert result.flags.c_contiguous and result.flags.writeable
    collective, layout = setting.far.prepared[1]
    assert collective.operation == AllGather(axis % 2)
    assert collective.leaves[0].shape == ((2, 3) if axis == 0 else (3, 2))
    assert len(layout.packs) == 1


@pytest.mark.parametrize("dtype", EVERY, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype_is_gathered(make: Any, dtype: Any) -> None:
    value = np.arange(4).astype(dtype)
    result = make(size=2).group.all_gather(value)
    assert result.dtype == dtype and np.array_equal(result, np.concatenate([value, value]))


def test_a_nest_is_gathered_leaf_by_leaf(make: Any) -> None:
    value = {"b": np.ones((2, 3)), "a": [np.arange(3), None], "c": Point(np.zeros((0, 2)), ())}
    result = make(size=2).group.all_gather(value)
    assert list(result) == ["b", "a", "c"] and result["a"][1] is None
    assert result["b"].shape == (4, 3) and result["a"][0].tolist() == [0, 1, 2] * 2
    assert type(result["c"]) is Point and result["c"].x.shape == (0, 2)
    assert make(size=2).group.all_gather([None, {}]) == [None, {}]


def test_only_the_root_of_a_gather_gets_the_result(make: Any) -> None:
    root, other = make(size=2, rank=1), make(size=2, rank=0)
    assert root.group.gather(np.ones((1, 2)), root=1, axis=-1).tolist() == [[1, 1, 1, 1]]
    assert other.group.gather(np.ones((1, 2)), root=1, axis=-1) is None
    assert other.far.prepared[1][0].operation == Gather(1, 1)


def test_the_root_of_a_scatter_gets_its_piece(make: Any) -> None:
    setting = make(size=3, rank=1)
    value = {"w": np.arange(10).reshape(5, 2), "b": np.arange(4)}
    result = setting.group.scatter(value, root=1)
    assert result["w"].tolist() == [[4, 5], [6, 7]] and result["b"].tolist() == [2]
    other = setting.group.scatter(np.arange(6).reshape(1, 6), root=1, axis=-1, sizes=[1, 4, 1])
    assert other.tolist() == [[1, 2, 3, 4]]
    operations = [collective.operation for collective, _ in setting.far.prepared.values()]
    assert operations == [Scatter(1, 0), Scatter(1, -1, (1, 4, 1))]
    assert not any(collective.open for collective, _ in setting.far.prepared.values())


def test_off_root_a_scatter_takes_its_piece_and_does_not_look_at_the_value(make: Any) -> None:
    setting = make(size=2, rank=1)
    setting.far.comes = {"w": np.arange(10).reshape(2, 5), "b": [np.zeros((3, 0), bool)]}
    result = setting.group.scatter("not looked at", root=0, axis=1, sizes=object())
    assert result["w"].tolist() == [[3, 4], [8, 9]] and result["b"][0].shape == (3, 0)
    assert result["w"].flags.c_contiguous and result["w"].flags.writeable
    collective, _ = setting.far.prepared[1]
    assert (collective.operation, collective.structure, collective.leaves) == (Scatter(0, 1), "", ())
    assert collective.open and setting.far.rings[0].addresses == ()


@BOTH
def test_reduce_scatter_gives_my_rows_of_the_sum(make: Any, apart: bool) -> None:
    setting = make(size=2, rank=0)
    setting.far.apart = apart
    group = setting.group
    assert group.reduce_scatter("sum", np.arange(5)).tolist() == [0, 2, 4]
    assert group.reduce_scatter("sum", np.arange(5), sizes=[1, 4]).tolist() == [0]
    assert group.reduce_scatter("sum", np.ones((2, 3)), axis=1).tolist() == [[2, 2], [2, 2]]
    assert setting.far.prepared[2][0].operation == ReduceScatter(cd.ReduceOp.SUM, 0, (1, 4))
    mean = group.reduce_scatter("mean", np.arange(4, dtype=np.int16))
    assert mean.dtype == np.float64 and mean.tolist() == [0, 1]  # the far end makes every mean float64


@BOTH
def test_all_to_all_joins_by_sender(make: Any, apart: bool) -> None:
    setting = make(size=2, rank=1)
    setting.far.apart = apart
    group = setting.group
    assert group.all_to_all(np.arange(5)).tolist() == [3, 4, 3, 4]
    assert group.all_to_all(np.arange(5), sizes=[4, 1]).tolist() == [4, 4]
    assert group.all_to_all(np.arange(4).reshape(2, 2), axis=1).tolist() == [[1, 1], [3, 3]]
    assert setting.far.prepared[2][0].operation == AllToAll(0, (4, 1))


def test_numbers_and_0d_arrays_are_refused_with_their_path(make: Any) -> None:
    setting = make()
    with pytest.raises(ValueError, match=r"all_to_all\(axis=0\): \['a'\]\[1\] is 0-d") as caught:
        setting.group.all_to_all({"a": [np.ones(1), 3]})
    assert not isinstance(caught.value, cd.errors.CollectiveError), "the others are told nothing"
    with pytest.raises(ValueError, match=r"sum, axis=2\): the value has the shape \[2\], and no axis 2"):
        setting.group.reduce_scatter("sum", np.ones(2), axis=2)
    with pytest.raises(ValueError, match=r"3 rows along axis 0, but sizes \[1, 1\] add up to 2"):
        setting.group.scatter(np.ones(3), sizes=[1, 1])
    with pytest.raises(TypeError, match="has dtype bool, which sum does not take"):
        setting.group.reduce_scatter("sum", np.ones(2, bool))
    with pytest.raises(TypeError, match="complex64, which max does not take"):
        setting.group.reduce_scatter("max", np.ones(2, np.complex64))
    assert setting.far.rings == []


def test_a_leaf_in_worker_memory_goes_in_where_it_lies_and_comes_back_as_a_view(make: Any) -> None:
    setting = make(size=2)
    value = setting.memory.empty((4, 4), np.dtype(np.float32))
    value[:] = 1
    result = setting.group.all_gather(value)
    assert not setting.far.rings[0].staged and not result.flags.writeable
    assert result.shape == (8, 4) and np.all(result == 1)
    part = result[5:].reshape(-1)
    del result
    setting.group.barrier()
    assert setting.far.released == []
    del part
    gc.collect()
    setting.group.barrier()
    assert setting.far.released == [5000]


def test_results_that_do_not_lie_as_wanted_are_copied(make: Any) -> None:
    setting = make(size=2)
    value = setting.memory.empty((5, 1), np.dtype(np.int64))
    value[:, 0] = range(5)
    along = setting.group.all_gather(value, axis=1)
    assert not setting.far.rings[0].staged, "rows of a single column lie side by side"
    assert along.flags.writeable and along.tolist() == [[n, n] for n in range(5)]
    setting.far.apart = True
    assert setting.group.all_gather(value).flags.writeable
    whole = setting.memory.empty((2, 3), np.dtype(np.int64))
    whole[:] = [[1, 2, 3], [4, 5, 6]]
    assert setting.group.all_gather(whole, axis=1).tolist() == [[1, 2, 3] * 2, [4, 5, 6] * 2]
    assert setting.far.rings[-1].staged, "columns of several rows do not"
    empty = setting.memory.empty((0, 3), np.dtype(np.int64))
    setting.far.apart = False
    assert setting.group.all_gather(empty).shape == (0, 3)


def test_a_mixed_value_is_staged_and_its_results_are_shared_where_the_input_lay_there(make: Any) -> None:
    setting = make(size=2)
    own = setting.memory.empty((2,), np.dtype(np.float64))
    own[:] = 3
    first, second = setting.group.all_gather([own, np.ones(2)])
    assert setting.far.rings[0].staged
    assert not first.flags.writeable and second.flags.writeable
    assert first.tolist() == [3] * 4 and second.tolist() == [1] * 4
    assert not np.shares_memory(first, second)


def test_a_rank_that_holds_a_quarter_of_the_results_gets_copies(make: Any) -> None:
    setting = make(size=1, result_bytes=1 << 16)
    value = setting.memory.empty((1 << 12,), np.dtype(np.uint8))
    held = [setting.group.all_gather(value) for _ in range(6)]
    assert [result.flags.writeable for result in held] == [False] * 3 + [True] * 3
    assert setting.group.all_gather([value, value])[1].flags.writeable


def test_inputs_may_be_overwritten_and_results_never_alias(make: Any) -> None:
    group = make(size=2).group
    value = np.ones((2, 2))
    results = [
        group.all_gather(value),
        group.all_gather(value),
        group.gather(value),
        group.scatter(value),
        group.reduce_scatter("sum", value),
        group.all_to_all(value),
        *group.all_gather([value, value]),
    ]
    value[:] = 7
    for number, result in enumerate(results):
        result[:] = -1
        others = [other for other in results[number + 1 :] if other.size]
        assert all(np.all(other > 0) for other in others), "as it was"
    assert np.all(value == 7)


def test_broadcast_to_who_has_no_template_brings_whatever_comes(make: Any) -> None:
    setting = make(size=2, rank=1)
    setting.far.comes = OrderedDict(
        b=Point(np.arange(6, dtype=np.int16).reshape(2, 3), None), a=[1.5, True, np.array(4), (np.zeros((0, 2)),)]
    )
    result = setting.group.broadcast(None)
    assert list(result) == ["a", "b"], "dicts by sorted key: the caller's order is not told"
    assert result["b"].x.dtype == np.int16 and result["b"].x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert result["b"].y is None and type(result["b"]).__name__ == "Point"
    assert result["a"][:3] == [1.5, True, 4] and [type(leaf) for leaf in result["a"][:3]] == [
        np.float64,
        np.bool_,
        np.int64,
    ]
    assert result["a"][3][0].shape == (0, 2)
    assert result["b"].x.flags.writeable and result["b"].x.flags.c_contiguous
    collective, _ = setting.far.prepared[1]
    assert collective.operation == Broadcast(0) and collective.open


def test_the_root_may_broadcast_none(make: Any) -> None:
    root, other = make(size=2, rank=0), make(size=2, rank=1)
    assert root.group.broadcast(None) is None
    assert not root.far.prepared[1][0].open and root.far.prepared[1][0].structure == "None"
    other.far.comes = None
    assert other.group.broadcast(None) is None
    other.far.comes = []
    assert other.group.broadcast(None) == []


def test_what_comes_may_differ_from_call_to_call(make: Any) -> None:
    setting = make(size=2, rank=1)
    found = []
    for value in (1, [np.ones(3)], None, {"x": 2}):
        setting.far.comes = value
        found.append(setting.group.broadcast(None))
    assert found[0] == 1 and found[1][0].tolist() == [1, 1, 1] and found[2:] == [None, {"x": 2}]
    assert len(setting.far.prepared) == 1


def test_a_value_that_cannot_be_rebuilt_says_so(make: Any) -> None:
    class Odd(str):
        def __repr__(self) -> str:
            return "<odd>"

    setting = make(size=2, rank=1)
    setting.far.comes = {Odd("a"): 1}
    with pytest.raises(ValueError, match=r"broadcast\(root=0\): .*'<odd>.*as a template") as caught:
        setting.group.broadcast(None)
    assert not isinstance(caught.value, cd.errors.CollectiveError), "it went well on the others"
    setting.far.comes = 2
    assert setting.group.broadcast(None) == 2, "the group goes on"


def test_a_completion_without_a_result_or_with_a_wrong_one_is_a_lost_worker(make: Any) -> None:
    for name, value, result, says in [
        ("broadcast", None, False, r"broadcast\(root=0\) without a result"),
        ("all_gather", np.ones(1), False, r"all_gather\(axis=0\) without a result"),
        ("all_gather", np.ones(1), True, "unexpected"),
    ]:
        setting = make(rank=1)
        done = messages.Completion(0, 0, True, bool(result), 1000, 0, 1).encode()
        setting.far.answer = lambda ring, done=done: [done]
        with pytest.raises(cd.errors.UnavailableError, match=str(says)):
            getattr(setting.group, str(name))(value)


def test_work_of_gathers_yields_leaves_last_first(make: Any) -> None:
    setting = make(size=2)
    far = setting.far
    far.answer = lambda ring: far.complete(ring)[:1]
    work = setting.group.all_gather({"a": np.zeros(1), "b": np.ones(2)}, async_op=True)
    arriving = work.as_completed()
    path, leaf = next(arriving)
    assert path == ("b",) and leaf.tolist() == [1, 1, 1, 1] and not work.done()
    far.doorbell.send(messages.Completion(0, 1, True, True, 1000, 0, 5000).encode())
    assert [path for path, _ in arriving] == [("a",)]
    assert work.result()["b"] is leaf


def test_what_comes_is_yielded_together_when_all_of_it_has_come(make: Any) -> None:
    setting = make(size=2, rank=1)
    far = setting.far
    far.comes = {"a": np.zeros(1), "b": [np.ones(2)]}
    held: list[bytes] = []

    def first(ring: messages.Submit) -> list[bytes]:
        held.extend(far.complete(ring))
        return held[:1]

    far.answer = first
    work = setting.group.broadcast(None, async_op=True)
    far.until(lambda: len(held) == 2)
    assert not work.done()
    far.doorbell.send(held[1])
    arrived = list(work.as_completed())
    assert [path for path, _ in arrived] == [("b", 0), ("a",)]
    assert work.result()["b"][0] is arrived[0][1]
    assert [path for path, _ in work.as_completed()] == [("b", 0), ("a",)], "and again, as often as wanted"


def test_a_collected_work_releases_its_slot_though_it_is_kept(make: Any) -> None:
    setting = make(size=2, rank=1)
    setting.far.comes = np.ones(3)
    works = [setting.group.broadcast(None, async_op=True), setting.group.all_gather(np.ones(2), async_op=True)]
    cd.wait(works)
    setting.group.barrier()
    assert setting.far.released == [5000, 5001]


@pytest.mark.parametrize("name", ["all_gather", "gather", "scatter", "all_to_all"])
def test_arguments_are_checked_by_name(make: Any, name: str) -> None:
    setting = make(size=2)
    call = getattr(setting.group, name)
    with pytest.raises(TypeError, match="axis must be an axis of the arrays"):
        call(np.ones(2), axis="0")
    with pytest.raises(ValueError, match="both given"):
        call(np.ones(2), options=cd.CommunicationOptions(), experimental_hints=cd.CommunicationOptions())
    if name in ("gather", "scatter"):
        with pytest.raises(ValueError, match="root must be a rank of this group, 0 to 1, got 2"):
            call(np.ones(2), root=2)
    assert setting.far.rings == []


def test_all_reduce_by_a_chosen_algorithm_is_another_signature(make: Any) -> None:
    setting = make(size=2)
    spec, packing = (Tier("xring", 2, -1),), Packing(2)

    def step(**special: Any) -> Any:
        return setting.group._all_reduce_packed("sum", np.ones(2), cd.CommunicationOptions(), **special)

    for _ in range(2):
        for special in ({}, {"all_reduce_spec": spec}, {"packing": packing}):
            assert step(**special).tolist() == [2, 2]
    described = [collective for collective, _ in setting.far.prepared.values()]
    assert [(one.all_reduce_spec, one.packing) for one in described] == [((), None), (spec, None), ((), packing)]
    assert step(async_op=True).result().tolist() == [2, 2]


def test_recv_is_described_as_open(make: Any) -> None:
    setting = make(size=2)
    setting.far.comes = [3]
    assert setting.group.recv(1, tag=5) == [3]
    collective, _ = setting.far.prepared[1]
    assert collective.operation == Recv(1, 5) and collective.open
