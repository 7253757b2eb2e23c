"""Error feedback: it rounds as the wire does, loses nothing over many steps, and takes nests."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import collectived as cd
from collectived_native import core

FORMATS = {"bfloat16": 1, "float8": 2, "int8": 3}  # as on the wire
NAMES = pytest.mark.parametrize("name", FORMATS)
floats = arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**100), 2.0**100, width=32))


def through_the_wire(name: str, values: Any) -> Any:
    """As the native core compresses and expands them."""
    blocks = np.zeros((-(-len(values) // core.BLOCK_VALUES), core.BLOCK_VALUES), np.float32)
    blocks.reshape(-1)[: len(values)] = values
    compressed = np.empty((len(blocks), core.block_bytes(FORMATS[name])), np.uint8)
    core.compress(FORMATS[name], compressed, blocks)
    core.expand(FORMATS[name], blocks, compressed)
    return blocks.reshape(-1)[: len(values)]


@NAMES
@settings(max_examples=100, deadline=None)
@given(values=floats)
def test_a_first_value_is_rounded_as_on_the_wire(name: str, values: Any) -> None:
    np.testing.assert_array_equal(cd.ErrorFeedback(name).compensate(values), through_the_wire(name, values))


@NAMES
def test_what_is_given_travels_without_another_error(name: str) -> None:
    feedback, random = cd.ErrorFeedback(name), np.random.default_rng(1)
    for _ in range(5):
        given_ = feedback.compensate(random.standard_normal(1000).astype(np.float32))
        np.testing.assert_allclose(through_the_wire(name, given_), given_, rtol=1e-6)


@NAMES
def test_over_many_steps_nothing_is_lost(name: str) -> None:
    feedback, random = cd.ErrorFeedback(name), np.random.default_rng(2)
    values = random.standard_normal(256).astype(np.float32)
    values[1:] *= np.float32(1e-4)  # less than half a step of int8 beside the first
    total = np.zeros(256)
    for _ in range(2000):
        total += feedback.compensate(values)
    assert np.abs(total / 2000 - values).max() < 1e-5


def test_nests_of_both_types_and_any_shape() -> None:
    feedback = cd.ErrorFeedback("int8")
    weights = [np.ones((3, 50), np.float32), np.ones(4, ml_dtypes.bfloat16)]
    value: dict[str, Any] = {"w": weights, "b": np.zeros((), np.float32), "c": None}
    for _ in range(2):
        got = feedback.compensate(value)
        assert got["c"] is None and got["b"].shape == ()
        assert [(one.shape, one.dtype) for one in got["w"]] == [(one.shape, one.dtype) for one in weights]


@NAMES
def test_values_that_are_not_finite_come_through_once(name: str) -> None:
    feedback = cd.ErrorFeedback(name)
    values = np.linspace(-1, 1, 200, dtype=np.float32)
    tainted = values.copy()
    tainted[[3, 50]] = np.inf, np.nan
    found = feedback.compensate(tainted)
    np.testing.assert_array_equal(found, through_the_wire(name, tainted))
    assert np.all(np.isfinite(feedback.compensate(values)))


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ValueError, match="one of 'none', 'bfloat16', 'float8', 'int8', got 'int4'"):
        cd.ErrorFeedback("int4")
    with pytest.raises(ValueError, match="needs a compression"):
        cd.ErrorFeedback("none")
    feedback = cd.ErrorFeedback("int8")
    with pytest.raises(TypeError, match=r"\['n'\] is int64: error feedback is for"):
        feedback.compensate({"n": np.arange(3)})
    with pytest.raises(TypeError, match="value is float: "):
        feedback.compensate(1.0)
    feedback.compensate([np.ones(3, np.float32)])
    with pytest.raises(ValueError, match=r"other shapes than before: call reset\(\) first"):
        feedback.compensate([np.ones(4, np.float32)])
    feedback.reset()
    feedback.compensate([np.ones(4, np.float32)])
