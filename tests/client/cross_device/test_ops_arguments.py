"""What cross-device operations refuse before anybody is asked: no worker runs here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import collectived as cd

OPS: list[Callable[[], cd.CrossDeviceOps]] = [
    cd.NcclAllReduce,
    cd.HierarchicalCopyAllReduce,
    cd.ReductionToOneDevice,
    lambda: cd.MultiWorkerAllReduce(["/job:worker/task:0"], 0),
    cd.AllReduceCrossDeviceOps,
]
VALUE = cd.PerReplica([np.ones(2), np.ones(2)])


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVED_WORKER", "unix:/nowhere")


@pytest.fixture(params=OPS, ids=lambda make: type(make()).__name__)
def ops(request: pytest.FixtureRequest) -> cd.CrossDeviceOps:
    made: cd.CrossDeviceOps = request.param()
    return made


def test_making_one_asks_nobody_but_using_it_does(ops: cd.CrossDeviceOps) -> None:
    with pytest.raises(cd.errors.UnavailableError, match="no worker answers at unix:/nowhere"):
        ops.reduce("sum", VALUE, "CPU:0")
    with pytest.raises(cd.errors.UnavailableError, match="no worker answers at unix:/nowhere"):
        ops.broadcast(np.ones(2), "CPU:0")


@pytest.mark.parametrize(
    ("op", "error", "text"),
    [
        ("min", ValueError, "sum and mean, got min"),
        (cd.ReduceOp.BXOR, ValueError, "sum and mean, got bxor"),
        ("total", ValueError, "unknown reduce op 'total'"),
        (VALUE, TypeError, "expected a reduce op"),
        (None, TypeError, "expected a reduce op"),
    ],
)
def test_only_sum_and_mean(ops: cd.CrossDeviceOps, op: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ops.reduce(op, VALUE, "CPU:0")
    with pytest.raises(error, match=text):
        ops.batch_reduce(op, [])


@pytest.mark.parametrize("op", ["sum", "SUM", "Mean", cd.ReduceOp.SUM, "average"])
def test_an_empty_batch_is_an_empty_list(ops: cd.CrossDeviceOps, op: Any) -> None:
    assert ops.batch_reduce(op, []) == [] and ops.batch_reduce(op, iter(())) == []


@pytest.mark.parametrize(
    ("destinations", "text"),
    [
        (["CPU:0"], "destinations must be .*, got list"),
        (("CPU:0",), "destinations must be .*, got tuple"),
        (3, "destinations must be .*, got int: 3"),
        (None, "destinations must be .*, got NoneType"),
        ("", "destinations must not be empty"),
        (cd.PerReplica([]), "destinations must not be empty"),
        ("TPU:0", "'TPU:0' is not a device name"),
        ("/job:ps/cpu:0", "is not a device name"),
    ],
)
def test_destinations_of_another_kind_or_without_devices(ops: cd.CrossDeviceOps, destinations: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ops.reduce("sum", VALUE, destinations)
    with pytest.raises(ValueError, match=text):
        ops.batch_reduce("sum", [(VALUE, destinations)])
    with pytest.raises(ValueError, match=text):
        ops.broadcast(np.ones(2), destinations)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ([np.ones(2)], ValueError, "got list; .* give PerReplica"),
        ((np.ones(2),), ValueError, "got tuple"),
        (None, ValueError, "got NoneType"),
        ("text", ValueError, "got str"),
        (cd.PerReplica([]), ValueError, "has no components"),
        (cd.PerReplica([np.ones(2), "x"]), TypeError, "component 1 of the value.* is a str"),
        (cd.PerReplica([np.ones(2, bool)]), TypeError, "component 0 of the value.* has dtype bool"),
        (cd.PerReplica([np.array([None])]), TypeError, "has dtype object"),
        (object(), TypeError, "component 0 of the value.* is a builtins.object"),
    ],
)
def test_values_of_another_kind(ops: cd.CrossDeviceOps, value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ops.reduce("sum", value, "CPU:0")
    with pytest.raises(error, match=text.replace("the value", "the value of pair 1")):
        ops.batch_reduce("sum", [(VALUE, VALUE), (value, "CPU:0")])


@pytest.mark.parametrize("pair", [[VALUE, "CPU:0"], (VALUE,), (VALUE, "CPU:0", 1), VALUE, "CPU:0"])
def test_pairs_are_tuples_of_two(ops: cd.CrossDeviceOps, pair: Any) -> None:
    with pytest.raises(ValueError, match="pair 0 must be a tuple"):
        ops.batch_reduce("sum", [pair])


def test_options_by_one_name_only(ops: cd.CrossDeviceOps) -> None:
    options: Any = cd.CommunicationOptions()
    calls: list[Callable[..., Any]] = [
        functools.partial(ops.reduce, "sum", VALUE, "CPU:0"),
        functools.partial(ops.batch_reduce, "sum", []),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="both given"):
            call(options, experimental_hints=options)
        with pytest.raises(TypeError, match="options must be CommunicationOptions or None, got int"):
            call(50)


def test_a_value_of_several_components_is_not_broadcast(ops: cd.CrossDeviceOps) -> None:
    with pytest.raises(ValueError, match="a PerReplica cannot be broadcast"):
        ops.broadcast(VALUE, "CPU:0")
    with pytest.raises(TypeError, match="the value is a str"):
        ops.broadcast("text", "CPU:0")


@pytest.mark.parametrize("kind", [cd.NcclAllReduce, cd.HierarchicalCopyAllReduce])
def test_packs_are_counted_from_0(kind: Any) -> None:
    kind(0), kind(num_packs=3)
    with pytest.raises(ValueError, match="num_packs must be a whole number, not negative, got -1"):
        kind(num_packs=-1)
    with pytest.raises(TypeError, match="num_packs must be a whole number"):
        kind(num_packs=1.5)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("shuffle",), ValueError, "all_reduce_alg must be one of nccl, hierarchical_copy, got 'shuffle'"),
        (("nccl", -1), ValueError, "num_packs"),
        (("nccl", 0, -1), ValueError, "agg_small_grads_max_bytes"),
        (("nccl", 0, 1, -1), ValueError, "agg_small_grads_max_group"),
    ],
)
def test_arguments_of_the_base_of_all_reduces(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cd.AllReduceCrossDeviceOps(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("TPU:0",), ValueError, "not a device name"),
        ((3,), ValueError, "not a device name"),
        ((None, 3), TypeError, "accumulation_fn must be a function"),
    ],
)
def test_arguments_of_reduction_to_one_device(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cd.ReductionToOneDevice(*arguments)


WORKERS = ["/job:worker/replica:0/task:0", "/job:worker/replica:0/task:1"]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("/job:worker/task:0", 2), TypeError, "worker_devices must be a list"),
        (([3], 2), TypeError, "got 3 in it"),
        (([], 2), ValueError, "at least one"),
        ((WORKERS * 2, 2), ValueError, "each once"),
        ((["/job:ps/task:0"], 2), ValueError, "got '/job:ps/task:0' in it"),
        ((WORKERS, -1), ValueError, "num_gpus_per_worker"),
        ((WORKERS, "2"), TypeError, "num_gpus_per_worker"),
        ((WORKERS, 2, "gossip"), ValueError, "unknown algorithm 'gossip'"),
        ((WORKERS, 2, ()), ValueError, "one to three entries"),
        ((WORKERS, 2, ("nccl", 1, -1, 0)), ValueError, "one to three entries"),
        ((WORKERS, 2, ("nccl", 0)), ValueError, "shards must be at least 1"),
        ((WORKERS, 2, [["nccl", 1]]), ValueError, r"all_reduce_spec\[0\] must be a tuple"),
        ((WORKERS, 2, 3), ValueError, "all_reduce_spec must be"),
        ((WORKERS, 2, []), ValueError, "all_reduce_spec is empty"),
        ((WORKERS, 2, [("xring", 1, 100), ("nccl", 1, 50), ("nccl", 1, -1)]), ValueError, "limits must increase"),
        ((WORKERS, 2, ("xring", 1, 100)), ValueError, "must be -1"),
        ((WORKERS, 2, "xring", -1), ValueError, "num_packs"),
        ((WORKERS, 2, "xring", 0, -1), ValueError, "agg_small_grads_max_bytes"),
        ((WORKERS, 2, "xring", 0, 0, -1), ValueError, "agg_small_grads_max_group"),
    ],
)
def test_arguments_of_multi_worker_all_reduce(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cd.MultiWorkerAllReduce(*arguments)


def test_forms_of_a_specification_that_are_understood() -> None:
    specs: list[Any] = ["nccl", ("nccl",), ("pscpu", 2), ("pscpu/pscpu", 2, -1), [("xring", 2, 4096), ("nccl", 1, -1)]]
    for spec in specs:
        cd.MultiWorkerAllReduce([f"{worker}/device:GPU:0" for worker in WORKERS], 2, spec)


def test_sessions_are_what_connect_returns(ops: cd.CrossDeviceOps) -> None:
    with pytest.raises(TypeError, match=r"session must be what cd.connect\(\) returned"):
        cd.NcclAllReduce(session="unix:/nowhere")  # type: ignore[arg-type]


def test_a_class_of_ones_own_must_say_how_it_reduces() -> None:
    with pytest.raises(NotImplementedError, match="reduce_implementation"):
        cd.CrossDeviceOps().reduce_implementation(cd.ReduceOp.SUM, VALUE, "CPU:0", cd.CommunicationOptions())


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([],), ValueError, "devices is empty"),
        (("CPU:0",), TypeError, "devices must be a list"),
        ((["TPU:0"],), ValueError, "not a device name"),
        ((None, "nccl"), TypeError, "cross_device_ops must be one such as"),
    ],
)
def test_arguments_of_a_strategy(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cd.MirroredStrategy(*arguments)
