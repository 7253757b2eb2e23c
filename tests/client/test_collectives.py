"""Collectives of one rank, from the caller's value to the ring and from the completion to the result."""

from __future__ import annotations

import collections
import gc
import random
from dataclasses import replace
from datetime import timedelta
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import collectived as cd
from collectived.calls import prepare
from collectived_proto.ipc import messages
from collectived_proto.types import Broadcast, CommunicationImplementation, Reduce

Pair = collections.namedtuple("Pair", "left right")
NUMBERS = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16] + [
    np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
]


@pytest.mark.parametrize("dtype", NUMBERS, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype_of_numbers_is_summed(make: Any, dtype: Any) -> None:
    group = make(size=3).group
    result = group.all_reduce("sum", np.arange(5).astype(dtype))
    assert result.dtype == dtype
    assert result.tolist() == [0, 3, 6, 9, 12]


def test_a_nest_comes_back_with_its_kinds_and_order(make: Any) -> None:
    value = {"b": np.ones((2, 3)), "a": [1, 2.5, None, (np.float32(3),)], "c": Pair(np.array(4), [])}
    result = make(size=2).group.all_reduce("sum", value)
    assert list(result) == ["b", "a", "c"]
    assert np.array_equal(result["b"], np.full((2, 3), 2.0))
    assert result["a"] == [2, 5.0, None, (np.float32(6),)]
    assert [type(leaf) for leaf in result["a"]] == [int, float, type(None), tuple]
    assert isinstance(result["a"][3][0], np.float32)
    assert isinstance(result["c"].left, np.ndarray) and result["c"].left.shape == () and result["c"].left == 8
    assert result["c"].right == []


def test_the_mean_of_integers_is_floating(make: Any) -> None:
    group = make().group
    result, number = group.all_reduce("mean", [np.arange(3), 5])
    assert result.dtype == np.float64 and type(number) is float


@pytest.mark.parametrize("shape", [(0,), (0, 3), (), (1,), (5, 7)], ids=str)
@pytest.mark.parametrize("own", [True, False], ids=["ordinary", "worker memory"])
def test_any_shape_passes(make: Any, shape: tuple[int, ...], own: bool) -> None:
    setting = make()
    value = np.empty(shape) if own else setting.memory.empty(shape, np.dtype(np.float64))
    value[...] = 2
    result = setting.group.all_reduce("sum", value)
    assert result.shape == shape and np.all(result == 4)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(10.0)[::2],
        np.arange(6.0).reshape(2, 3).T,
        np.arange(4, dtype=">f4"),
        np.broadcast_to(np.float32(1), (2, 2)),
        np.frombuffer(bytes(range(9)), np.uint8)[1:].view(np.uint32),
    ],
    ids=["strided", "transposed", "big-endian", "broadcast", "unaligned"],
)
def test_arrays_of_any_layout_are_copied_in_order(make: Any, value: Any) -> None:
    result = make(size=2).group.all_reduce("sum", value)
    assert np.array_equal(result, value * 2)
    assert result.dtype.isnative and result.flags.c_contiguous and result.flags.writeable


def test_ordinary_results_are_writable_and_never_alias(make: Any) -> None:
    group = make().group
    value = np.ones(3)
    first, second = group.all_reduce("sum", value), group.all_reduce("sum", value)
    first[:] = 9
    assert second.tolist() == [2, 2, 2] and value.tolist() == [1, 1, 1]


def test_worker_memory_goes_in_where_it_lies_and_comes_back_as_a_view(make: Any) -> None:
    setting = make()
    value = setting.memory.empty((4, 4), np.dtype(np.float32))
    value[:] = 1
    whole = setting.group.all_reduce("sum", value)
    part = setting.group.all_reduce("sum", value[1:3].reshape(-1).view(np.int32).view(np.float32))
    assert [ring.staged for ring in setting.far.rings] == [False, False]
    (arena, start), (same, offset) = (ring.addresses[0] for ring in setting.far.rings)
    assert same == arena and offset == start + 16
    assert np.all(whole == 2) and np.all(part == 2)
    assert not whole.flags.writeable
    with pytest.raises(ValueError):
        whole.flags.writeable = True
    with pytest.raises(ValueError):
        whole[0] = 1


def test_the_slot_of_a_view_is_released_with_its_last_view(make: Any) -> None:
    setting = make()
    value = setting.memory.empty((8,), np.dtype(np.float64))
    value[:] = 3
    whole = setting.group.all_reduce("sum", value)
    corner = whole.reshape(2, 4)[1:, 2:]
    del whole
    setting.group.barrier()
    assert setting.far.released == []
    assert corner.tolist() == [[6, 6]]
    del corner
    gc.collect()
    setting.group.barrier()
    assert setting.far.released == [5000]


def test_the_slot_of_a_copied_result_is_released_with_the_next_ring(make: Any) -> None:
    setting = make()
    for _ in range(3):
        setting.group.all_reduce("sum", np.ones(3))
    assert setting.far.released == [5000, 5001]


def test_a_rank_that_holds_a_quarter_of_the_results_gets_copies(make: Any) -> None:
    setting = make(result_bytes=1 << 16)
    value = setting.memory.empty((1 << 12,), np.dtype(np.uint8))
    value[:] = 1
    held = [setting.group.all_reduce("sum", value) for _ in range(6)]
    assert [result.flags.writeable for result in held] == [False] * 4 + [True] * 2
    del held[0]
    setting.group.barrier()
    assert not setting.group.all_reduce("sum", value).flags.writeable


def test_a_mixed_value_is_staged_and_each_leaf_comes_back_as_its_kind(make: Any) -> None:
    setting = make()
    inside = setting.memory.empty((2,), np.dtype(np.float64))
    inside[:] = 1
    result = setting.group.all_reduce("sum", [inside, np.ones(2)])
    assert setting.far.rings[0].staged
    assert [leaf.flags.writeable for leaf in result] == [False, True]
    assert [leaf.tolist() for leaf in result] == [[2, 2], [2, 2]]


def test_results_are_copied_into_out(make: Any) -> None:
    group = make().group
    value = {"w": np.ones(3), "b": np.zeros(1)}
    assert group.all_reduce("sum", value, out=value) is not None
    assert value["w"].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("out", "error", "says"),
    [
        ([np.ones(3)], ValueError, r"structure \[\*\], expected \*"),
        (np.ones(4), ValueError, r"out is float64\[4\], the result is float64\[3\]"),
        (np.ones(3, np.float32), ValueError, "out is float32"),
        (1.0, TypeError, "out is a float: expected a NumPy array"),
        (np.broadcast_to(1.0, 3), ValueError, "cannot be written"),
    ],
    ids=["structure", "shape", "dtype", "kind", "read-only"],
)
def test_an_out_that_does_not_fit_is_refused_before_anything_is_sent(
    make: Any, out: Any, error: type[Exception], says: str
) -> None:
    setting = make()
    with pytest.raises(error, match=says):
        setting.group.all_reduce("sum", np.ones(3), out=out)
    assert setting.far.rings == []


def test_only_the_root_of_a_reduce_gets_the_result(make: Any) -> None:
    root, other = make(size=2, rank=1), make(size=2, rank=0)
    assert root.group.reduce("sum", np.ones(2), root=1).tolist() == [2, 2]
    assert other.group.reduce("sum", np.ones(2), root=1) is None
    assert other.far.prepared[1][0].operation == Reduce(cd.ReduceOp.SUM, 1)


def test_a_completion_without_the_result_is_a_worker_that_talks_nonsense(make: Any) -> None:
    setting = make(size=2, rank=1)
    setting.far.answer = lambda ring: [messages.Completion(ring.instance, 0, True, False).encode()]
    with pytest.raises(cd.errors.UnavailableError, match=r"unexpected \(broadcast.* without a result\)"):
        setting.group.broadcast(np.arange(3), root=0)
    assert setting.far.prepared[1][0].operation == Broadcast(0)


def test_a_value_without_leaves_passes(make: Any) -> None:
    group = make().group
    assert group.all_reduce("sum", {"a": None, "b": []}) == {"a": None, "b": []}
    assert group.barrier() is None


def test_a_signature_is_described_once(make: Any) -> None:
    setting = make()
    for length in (3, 3, 4, 3):
        setting.group.all_reduce("sum", np.ones(length))
    assert len(setting.far.prepared) == 2
    collective = setting.far.prepared[1][0]
    assert collective.site.startswith("test_collectives.py:")


def test_of_many_signatures_the_latest_are_kept(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "MAX_SIGNATURES", 2)
    setting = make()
    far, group = setting.far, setting.group

    def start(length: int) -> cd.Work[Any]:
        work: cd.Work[Any] = group.all_reduce("sum", np.ones(length), async_op=True)
        return work

    far.answer = lambda ring: []
    first = start(1)
    for length in (2, 3, 2, 3, 1):
        start(length)
    far.until(lambda: len(far.rings) == 6)
    assert [ring.prepared for ring in far.rings] == [1, 2, 3, 2, 3, 4]
    for ring in far.rings:
        for answer in far.complete(ring):
            far.doorbell.send(answer)
    assert first.wait().tolist() == [2]
    kept = {known.id for known in setting.memory._spare_staging}
    assert 1 not in kept and kept <= {3, 4}, "staging slots of what is not found again are given back"


def test_text_that_is_no_utf_8_travels_readable(make: Any) -> None:
    class Key(str):
        def __repr__(self) -> str:
            return "k\udcff"

    setting = make()
    setting.group.all_reduce("sum", {Key("a"): 1})
    leaf = setting.far.prepared[1][0].leaves[0]
    assert leaf.path == r"[k\udcff]"
    assert setting.far.prepared[1][0].structure == r"{k\udcff: *}"


def test_a_layout_that_does_not_fit_is_the_workers_defect(make: Any) -> None:
    setting = make()
    describe = setting.far.describe
    setting.group._prepared_calls._describe = lambda collective, deadline: describe(
        replace(collective, leaves=()), None
    )
    with pytest.raises(cd.errors.InternalError, match="layout does not fit"):
        setting.group.all_reduce("sum", 1)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [1, "x"]}, r"\['a'\]\[1\] is a str: text"),
        ((n for n in range(3)), "the value is a generator: .*make a list"),
        ([{1, 2}], r"\[0\] is a set: .*sorted list"),
        (np.array([None]), "the value has dtype object"),
        ([np.array(["a"])], r"\[0\] has dtype <U1"),
        (object(), "the value is a builtins.object: expected NumPy arrays"),
        (np.ma.masked_array([1, 2]), "mask would be lost"),
        ([np.zeros(2, bool)], r"\[0\] has dtype bool, which sum does not take"),
        (True, "the value has dtype bool"),
        (np.zeros(2, "datetime64[s]"), "datetime64"),
        (np.zeros(2, np.longdouble), "expected one of bool, int8"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_collectives_do_not_carry_is_refused_with_its_path(make: Any, value: Any, says: str) -> None:
    setting = make()
    with pytest.raises(TypeError, match=says):
        setting.group.all_reduce("sum", value)
    assert setting.far.rings == []


def test_booleans_are_broadcast(make: Any) -> None:
    assert make().group.broadcast([True, np.array([False, True])])[0] is True


def test_an_integer_beyond_int64_is_refused_with_its_path(make: Any) -> None:
    with pytest.raises(ValueError, match=r"\['n'\] is 1267650600228229401496703205376 .*int64"):
        make().group.all_reduce("sum", {"n": 2**100})


@pytest.mark.parametrize("tensor", [np.ones(3), 2.0, [1.0], {"a": 1}], ids=str)
def test_swapped_arguments_are_told_so(make: Any, tensor: Any) -> None:
    with pytest.raises(TypeError, match=r'the reduce op comes first: all_reduce\("sum", tensor\)'):
        make().group.all_reduce(tensor, "sum")


def test_bad_arguments_are_refused_by_name(make: Any) -> None:
    group = make(size=2).group
    with pytest.raises(ValueError, match="unknown reduce op 'summ'"):
        group.all_reduce("summ", 1)
    with pytest.raises(ValueError, match="root must be a rank of this group, 0 to 1, got 2"):
        group.broadcast(1, root=2)
    with pytest.raises(ValueError, match="root must be"):
        group.reduce("sum", 1, root=-1)
    with pytest.raises(TypeError, match="root must be a rank of this group, 0 to 1, got '0', a str"):
        group.broadcast(1, root="0")
    with pytest.raises(TypeError, match="options must be CommunicationOptions or None, got dict"):
        group.all_reduce("sum", 1, {"timeout_seconds": 3})
    with pytest.raises(ValueError, match="both given"):
        hints = cd.CommunicationOptions(bytes_per_pack=1)
        group.all_reduce("sum", 1, cd.CommunicationOptions(), experimental_hints=hints)


def test_the_timeout_comes_from_the_call_then_the_group_then_the_environment(make: Any) -> None:
    setting = make(options=cd.CommunicationOptions(), timeout=30.0)
    setting.group.barrier()
    setting.group.barrier(cd.CommunicationOptions(timeout_seconds=0))
    setting.group.barrier(cd.CommunicationOptions(timeout_seconds=timedelta(seconds=5)))  # type: ignore[arg-type]
    grouped = make(options=cd.CommunicationOptions(timeout_seconds=7), timeout=30.0)
    grouped.group.barrier()
    remaining = [ring.remaining for ring in setting.far.rings + grouped.far.rings]
    assert remaining[1] == 0
    for seen, said in zip(remaining, [30, 0, 5, 7], strict=True):
        assert said - 1 <= seen <= said


def test_options_of_call_and_group_are_merged_into_the_contract(make: Any) -> None:
    setting = make(options=cd.CommunicationOptions(bytes_per_pack=100))
    setting.group.all_reduce("sum", 1, cd.CommunicationOptions(implementation="ring"))  # type: ignore[arg-type]
    collective = setting.far.prepared[1][0]
    assert collective.bytes_per_pack == 100
    assert collective.implementation is CommunicationImplementation.RING


def test_random_nests_are_summed_leaf_by_leaf(make: Any) -> None:
    rng = random.Random(5)

    def build(depth: int) -> Any:
        kind = rng.choice("ldat" if depth else "a")
        if kind == "a":
            return np.asarray(np.random.default_rng(rng.randrange(99)).normal(size=rng.choice([(), (3,), (2, 5)])))
        parts = [build(depth - 1) for _ in range(rng.randrange(4))]
        return {f"k{9 - i}": part for i, part in enumerate(parts)} if kind == "d" else parts

    def doubled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: doubled(part) for key, part in value.items()}
        return [doubled(part) for part in value] if isinstance(value, list) else value * 2

    group = make(size=2).group
    for _ in range(50):
        value = build(3)
        np.testing.assert_equal(group.all_reduce("sum", value), doubled(value))


def test_results_are_put_into_the_callers_own_kind_of_dict(make: Any) -> None:
    group = make().group
    factories: list[Any] = [list, int]
    for factory in factories:
        for result in (
            group.all_reduce("sum", collections.defaultdict(factory, a=1)),
            group.all_reduce("sum", collections.defaultdict(factory, a=1), async_op=True).result(),
        ):
            assert result == {"a": 2} and type(result) is collections.defaultdict
            assert result.default_factory is factory


class Whole(tuple[int, ...]):
    def __new__(cls, numbers: Any) -> Whole:
        return super().__new__(cls, [number.__index__() for number in numbers])


class Config(dict[str, Any]):
    def __init__(self, name: str, items: Any) -> None:
        super().__init__(items)


@pytest.mark.parametrize(
    ("op", "value", "says"),
    [
        ("sum", {"c": Config("x", {"a": 1})}, r"\['c'\] is a Config, which cannot be made of the results in it"),
        ("mean", [Whole([1, 2])], r"\[0\] is a Whole, which cannot be made of the results in it: .*__index__"),
        ("mean", [Whole([1]), cd.IndexedSlices(np.ones((1, 1)), [0])], r"\[0\] is a Whole, which cannot be made"),
    ],
    ids=["constructor", "elements", "beside sparse ones"],
)
def test_containers_that_could_not_hold_the_result_are_refused_before_anything_is_sent(
    make: Any, op: str, value: Any, says: str
) -> None:
    setting = make()
    for async_op in (False, True):
        with pytest.raises(TypeError, match=says):
            setting.group.all_reduce(op, value, async_op=async_op)
    assert setting.far.rings == []
    assert setting.group.all_reduce("sum", Whole([1, 2])) == (2, 4)
    assert setting.group.all_reduce("sum", [Whole([1]), cd.IndexedSlices(np.ones((1, 1)), [0])])[0] == (2,)
    assert setting.group.send(value, 1) is None


@pytest.mark.parametrize("swapped", ["value", "out", "both"])
def test_out_may_have_another_byte_order(make: Any, swapped: str) -> None:
    value = np.arange(3, dtype="<f4" if swapped == "out" else ">f4")
    out = value if swapped == "both" else np.zeros(3, ">f4" if swapped == "out" else "<f4")
    setting = make()
    assert setting.group.all_reduce("sum", value, out=out) is out and out.tolist() == [0, 2, 4]
    setting.far.comes = np.arange(3, dtype="<f4")
    assert setting.group.recv(1, out=out) is out and out.tolist() == [0, 1, 2]


def test_out_itself_is_returned(make: Any) -> None:
    group = make().group
    out: dict[str, Any] = {"w": [np.zeros(3)], "n": None}
    assert group.all_reduce("sum", {"w": [np.ones(3)], "n": None}, out=out) is out
    assert out["w"][0].tolist() == [2, 2, 2]


def test_what_the_worker_says_can_mean_nothing_is_no_word_for_all_ranks(make: Any) -> None:
    setting = make()

    def refuse(*_: Any) -> Any:
        raise cd.errors.InvalidArgumentError("9000 packs, and 4096 can travel at once")

    setting.group._prepared_calls._describe = refuse
    with pytest.raises(ValueError, match="9000 packs") as caught:
        setting.group.all_reduce("sum", 1)
    assert not isinstance(caught.value, cd.errors.CollectiveError)
