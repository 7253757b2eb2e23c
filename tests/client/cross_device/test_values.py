"""Values with a component per replica: their devices, and how nests of them are taken apart and put together."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived.cross_device.values import regroup, select

Pair = collections.namedtuple("Pair", "left right")
DEVICES = ["CPU:0", "CPU:1"]


@pytest.mark.parametrize("kind", [cd.DistributedValues, cd.PerReplica, cd.Mirrored])
def test_components_keep_their_order_and_are_what_was_given(kind: Any) -> None:
    arrays = [np.ones(2), np.zeros(2), np.ones(3)]
    value = kind(arrays, ["CPU:2", "/gpu:1", "/job:worker/task:3/cpu:0"])
    assert isinstance(value, cd.DistributedValues)
    assert all(found is given for found, given in zip(value.values, arrays, strict=True))
    assert value.primary is arrays[0]
    assert value.devices == ("CPU:2", "GPU:1", "/job:worker/replica:0/task:3/device:CPU:0")


def test_host_arrays_without_devices_are_on_the_cpus_in_order() -> None:
    assert cd.PerReplica([np.ones(1), 2.0, cd.IndexedSlices([1.0], [0])]).devices == ("CPU:0", "CPU:1", "CPU:2")


class OnDevice:
    """An array that says where it is, as one of a library does."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.shape, self.dtype = (1,), np.dtype(np.float32)


class TorchDevice:
    def __init__(self, type: str, index: int | None) -> None:
        self.type, self.index = type, index


class JaxDevice:
    def __init__(self, platform: str, id: int) -> None:
        self.platform, self.id = platform, id


class CupyArray(OnDevice):
    __cuda_array_interface__: dict[str, Any] = {}


class CupyDevice:
    id = 3


@pytest.mark.parametrize(
    ("array", "device"),
    [
        (OnDevice(TorchDevice("cuda", 1)), "GPU:1"),
        (OnDevice(TorchDevice("cuda", None)), "GPU:0"),
        (OnDevice(TorchDevice("cpu", None)), "CPU:0"),
        (OnDevice(JaxDevice("gpu", 2)), "GPU:2"),
        (OnDevice(JaxDevice("cpu", 2)), "CPU:0"),
        (CupyArray(CupyDevice()), "GPU:3"),
        (OnDevice("cpu"), "CPU:0"),
    ],
)
def test_arrays_that_know_their_gpu_say_it(array: Any, device: str) -> None:
    assert cd.PerReplica([array]).devices == (device,)
    assert cd.PerReplica([cd.IndexedSlices(array, [0])]).devices == (device,)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((np.ones(3),), TypeError, "values must be a list or tuple of components, one per replica, got ndarray"),
        (([1], "CPU:0"), TypeError, "devices must be a list or tuple"),
        (([1, 2], ["CPU:0"]), ValueError, "1 for 2 components"),
        (([1], ["TPU:0"]), ValueError, "'TPU:0' is not a device name"),
        (([1], [0]), ValueError, "0 is not a device name"),
    ],
)
def test_wrong_arguments_are_told(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cd.PerReplica(*arguments)


def test_a_value_without_components_has_no_primary_one() -> None:
    assert cd.PerReplica([]).values == ()
    with pytest.raises(ValueError, match="no components"):
        _ = cd.PerReplica([]).primary


def test_values_cannot_be_changed_and_show_their_components() -> None:
    value = cd.Mirrored([1, 2])
    with pytest.raises(AttributeError):
        value.values = (3,)  # type: ignore[misc]
    assert repr(value) == "Mirrored(\n  CPU:0: 1\n  CPU:1: 2)"


def test_nests_are_regrouped_by_structure() -> None:
    def returned(replica: int) -> Any:
        return {"a": [replica, None], "b": Pair(np.full(2, replica), (float(replica),))}

    found = regroup([returned(0), returned(1)], DEVICES)
    assert list(found) == ["a", "b"] and found["a"][1] is None and isinstance(found["b"], Pair)
    assert isinstance(found["a"][0], cd.PerReplica) and found["a"][0].values == (0, 1)
    assert found["b"].left.values[1].tolist() == [1, 1] and found["b"].left.devices == ("CPU:0", "CPU:1")
    assert found["b"].right[0].values == (0.0, 1.0)


def test_one_object_everywhere_is_bare_but_equal_numbers_are_not() -> None:
    shared = np.ones(3)
    array, number = regroup([(shared, 1), (shared, 1)], DEVICES)
    assert array is shared and number.values == (1, 1)


def test_leaves_of_one_replica_are_bare() -> None:
    assert regroup([[5, None]], ["CPU:0"]) == [5, None]


@pytest.mark.parametrize("other", [[1], [1, [2]], {"a": 1}, [1, None]])
def test_different_structures_are_an_error(other: Any) -> None:
    with pytest.raises(ValueError, match=r"replica 1 returned .*, replica 0 \[\*, \*\]"):
        regroup([[1, 2], other], DEVICES)


def test_each_replica_sees_its_components() -> None:
    value = cd.PerReplica([10, 20])
    nest = {"x": [value, 1], "y": Pair(value, "text"), 3: (value,)}
    assert select(nest, 1) == {"x": [20, 1], "y": Pair(20, "text"), 3: (20,)}


def test_what_holds_no_components_is_passed_as_it_is() -> None:
    nest = [1, {"a": (2, 3)}]
    assert select(nest, 1) is nest
