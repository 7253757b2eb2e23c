"""Options, devices, reduce ops, deadlines and tiers: what is accepted, what is refused, and what they mean."""

from __future__ import annotations

import math
from datetime import timedelta
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from collectived_proto.deadline import Deadline
from collectived_proto.devices import DeviceName
from collectived_proto.numpy_types import from_numpy, to_numpy
from collectived_proto.options import CollectiveHints, CommunicationOptions
from collectived_proto.types import CommunicationImplementation, DType, Tier, select_tier, unscoped_name


def test_options_merge_field_by_field() -> None:
    ours = CommunicationOptions(100, 5.0, CommunicationImplementation.RING)
    assert ours.merge(None) == ours == ours.merge(CommunicationOptions())
    assert ours.merge(CommunicationOptions(bytes_per_pack=7)).bytes_per_pack == 7
    assert ours.merge(CommunicationOptions(timeout_seconds=0)).timeout_seconds == 0
    nccl = CommunicationOptions(implementation=CommunicationImplementation.NCCL)
    assert ours.merge(nccl) == CommunicationOptions(100, 5.0, CommunicationImplementation.NCCL)
    compressed = ours.merge(CommunicationOptions(compression="INT8"))
    assert compressed == CommunicationOptions(100, 5.0, CommunicationImplementation.RING, "int8")
    assert compressed.merge(CommunicationOptions()).compression == "int8"
    assert compressed.merge(CommunicationOptions(compression="none")).compression == "none"


@pytest.mark.parametrize("hint", ["ring", "Ring", "RING"])
def test_a_hint_may_be_a_string_in_any_case(hint: Any) -> None:
    assert CommunicationOptions(implementation=hint).implementation is CommunicationImplementation.RING


@pytest.mark.parametrize(
    ("fields", "error", "word"),
    [
        ({"bytes_per_pack": -1}, ValueError, "-1"),
        ({"bytes_per_pack": 1.5}, TypeError, "float"),
        ({"bytes_per_pack": True}, TypeError, "bool"),
        ({"bytes_per_pack": np.bool_(1)}, TypeError, "bool"),
        ({"bytes_per_pack": np.float64(1)}, TypeError, "bytes_per_pack must be an int, got float64"),
        ({"bytes_per_pack": 1 << 63}, ValueError, "bytes_per_pack must be at most 9223372036854775807"),
        ({"timeout_seconds": 10**400}, ValueError, "timeout_seconds must be seconds that a float can hold"),
        ({"timeout_seconds": True}, TypeError, "bool"),
        ({"timeout_seconds": np.float32(-1)}, ValueError, "timeout_seconds must not be negative"),
        ({"timeout_seconds": -0.1}, ValueError, "-0.1"),
        ({"timeout_seconds": math.nan}, ValueError, "nan"),
        ({"timeout_seconds": "5"}, TypeError, "str"),
        ({"implementation": "gloo"}, ValueError, "AUTO, RING, NCCL"),
        ({"implementation": 3}, ValueError, "3"),
        ({"compression": "int4"}, ValueError, "one of 'none', 'bfloat16', 'float8', 'int8', got 'int4'"),
        ({"compression": 8}, ValueError, "got 8"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(fields: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        CommunicationOptions(**fields)


@pytest.mark.parametrize("number", [np.int64(3), np.uint8(3), np.float32(3), np.float64(3), Fraction(3), 3])
def test_a_timeout_may_be_any_real_number(number: Any) -> None:
    found = CommunicationOptions(timeout_seconds=number).timeout_seconds
    assert found == 3.0 and type(found) is float


@pytest.mark.parametrize("number", [np.int64(3), np.uint8(3), 3])
def test_bytes_per_pack_may_be_any_whole_number(number: Any) -> None:
    found = CommunicationOptions(bytes_per_pack=number)
    assert found == CommunicationOptions(3) and type(found.bytes_per_pack) is int
    assert CommunicationOptions((1 << 63) - 1).bytes_per_pack == (1 << 63) - 1


def test_a_timeout_may_be_a_timedelta() -> None:
    assert CommunicationOptions(timeout_seconds=timedelta(minutes=2)).timeout_seconds == 120.0  # type: ignore[arg-type]


def test_hints_are_options_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="CommunicationOptions"):
        assert CollectiveHints(50, 1) == CommunicationOptions(50, 1.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CPU:3", DeviceName(2, "CPU", 3)),
        ("cpu", DeviceName(2, "CPU", 0)),
        ("/gpu:1", DeviceName(2, "GPU", 1)),
        ("cuda:1", DeviceName(2, "GPU", 1)),
        ("/task:5/device:GPU:0", DeviceName(5, "GPU", 0)),
        ("/job:worker/replica:0/task:10/device:CPU:7", DeviceName(10, "CPU", 7)),
        ("/job:localhost/replica:0/task:0/device:GPU:1", DeviceName(2, "GPU", 1)),
        ("/job:chief/replica:0/task:0/device:CPU:3", DeviceName(0, "CPU", 3)),
    ],
)
def test_device_names_are_completed(text: str, expected: DeviceName) -> None:
    assert DeviceName.parse(text, task=2) == expected
    assert DeviceName.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "TPU:0",
        "GPU:x",
        "/job:ps/task:0/device:CPU:0",
        "/job:chief/task:1/device:CPU:0",
        "/replica:1/device:CPU:0",
        "CPU:0:0",
    ],
)
def test_what_is_no_device_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a device name"):
        DeviceName.parse(text)


def test_devices_are_ordered_as_numbers() -> None:
    names = [DeviceName.parse(f"/task:{task}/device:CPU:{index}") for task in (10, 2) for index in (11, 3)]
    assert [(name.task, name.index) for name in sorted(names)] == [(2, 3), (2, 11), (10, 3), (10, 11)]


@pytest.mark.parametrize("kind", DType, ids=lambda kind: kind.label)
def test_every_element_type_is_known_to_numpy(kind: DType) -> None:
    dtype = to_numpy(kind)
    assert from_numpy(dtype) is kind and dtype.itemsize == kind.itemsize
    assert dtype.name == kind.label


def test_no_deadline_is_for_ever() -> None:
    for none in (None, 0, 0.0):
        assert not Deadline.after(none).is_set and Deadline.after(none).to_wire() == 0.0
    assert 0 < Deadline.after(5).to_wire() <= 5 and Deadline(0.0).remaining() == 0.0 and Deadline(0.0).to_wire() > 0


def test_the_first_tier_that_fits_is_taken() -> None:
    tiers = (Tier("one_shot", limit=10), Tier("ring"))
    assert [select_tier(tiers, size).algorithm for size in (0, 10, 11)] == ["one_shot", "one_shot", "ring"]


def test_names_are_shown_without_the_job() -> None:
    assert [unscoped_name(name) for name in ("job/world", "/shared", "world")] == ["world", "/shared", "world"]
