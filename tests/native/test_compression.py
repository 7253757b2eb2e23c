"""Compressed blocks of the native core: errors within their bounds, and the same bits on every processor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from collectived_native import core

Array = NDArray[Any]

BFLOAT16, FLOAT8, INT8 = 1, 2, 3  # as on the wire
BLOCK = core.BLOCK_VALUES
LARGEST_CODE = {FLOAT8: 448, INT8: 127}
VARIANTS = [name for name in ("baseline", "avx2") if core.choose_arithmetic(name)]
FORMATS = pytest.mark.parametrize("format", [BFLOAT16, FLOAT8, INT8])
SCALED = pytest.mark.parametrize("format", [FLOAT8, INT8])
LEAST_SCALE = float(np.finfo(np.float32).smallest_normal)

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
blocks = arrays(np.float32, BLOCK, elements=finite, fill=st.just(np.float32(0)))


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    assert core.choose_arithmetic(request.param)
    yield request.param
    core.choose_arithmetic(VARIANTS[-1])


def compress(format: int, values: Array) -> Array:
    out = np.empty((len(values) // BLOCK, core.block_bytes(format)), np.uint8)
    core.compress(format, out, values)
    return out


def expand(format: int, compressed: Array) -> Array:
    out = np.empty(len(compressed) * BLOCK, np.float32)
    core.expand(format, out, compressed)
    return out


def bound(format: int, values: Array) -> Array:
    """The largest error that is promised of each value of a block."""
    exact: Array = np.abs(values.astype(np.float64))
    if format == BFLOAT16:
        return exact / 256 + 2.0**-134
    scale = max(exact.max() / LARGEST_CODE[format], LEAST_SCALE) * (1 + 2.0**-20)
    if format == INT8:
        return np.full(len(values), scale * (0.5 + 2.0**-14))
    largest: Array = np.maximum(exact / 16, scale / 1024)
    return largest * (1 + 2.0**-14)


def test_a_block_has_the_bytes_that_are_promised() -> None:
    assert [core.block_bytes(format) for format in range(5)] == [0, 2 * BLOCK, BLOCK + 4, BLOCK + 4, 0]


@FORMATS
@settings(max_examples=200, deadline=None)
@given(values=blocks)
def test_every_error_is_within_its_bound(format: int, values: Array) -> None:
    if format == BFLOAT16:  # the largest one; beyond it lies infinity
        values = np.clip(values, np.float32(-3.3895314e38), np.float32(3.3895314e38))
    error = np.abs(expand(format, compress(format, values)) - values.astype(np.float64))
    assert np.all(error <= bound(format, values))


@FORMATS
@settings(max_examples=200, deadline=None)
@given(values=blocks)
def test_what_has_been_compressed_before_comes_back_as_it_is_to_the_last_bit_but_one(
    format: int, values: Array
) -> None:
    once = expand(format, compress(format, values))
    again = expand(format, compress(format, once))
    np.testing.assert_allclose(again, once, rtol=2.0**-22, atol=LEAST_SCALE)


@pytest.mark.parametrize("power", range(-149, 128, 7))
@FORMATS
def test_every_magnitude_that_float32_has_is_taken(format: int, power: int) -> None:
    random = np.random.default_rng(power + 200)
    values = (random.uniform(-1, 1, BLOCK) * 2.0**power).astype(np.float32)
    assert np.all(np.abs(expand(format, compress(format, values)) - values.astype(np.float64)) <= bound(format, values))


@SCALED
def test_the_largest_finite_value_stays_finite(format: int) -> None:
    largest = float(np.finfo(np.float32).max)
    for step in range(200):
        values = np.full(BLOCK, np.float32(largest) * np.float32(1 - step / 1000), np.float32)
        assert np.all(np.isfinite(expand(format, compress(format, values))))


def test_int8_codes_are_the_nearest_multiples_of_the_scale(variant: str) -> None:
    values = np.random.default_rng(1).standard_normal(BLOCK).astype(np.float32)
    (block,) = compress(INT8, values)
    scale = block[:4].view(np.float32)[0]
    assert scale == np.float32(np.abs(values).max() / np.float32(127))
    np.testing.assert_array_equal(block[4:].view(np.int8), np.rint(values * (np.float32(1) / scale)).astype(np.int8))


def test_float8_codes_are_those_of_ml_dtypes(variant: str) -> None:
    values = np.random.default_rng(1).standard_normal(BLOCK).astype(np.float32)
    values[:64] *= np.float32(2.0) ** -np.arange(64, dtype=np.float32)  # down to subnormals of float8 and to nothing
    (block,) = compress(FLOAT8, values)
    scale = block[:4].view(np.float32)[0]
    expected = (values * (np.float32(1) / scale)).astype(ml_dtypes.float8_e4m3fn)
    assert block[4:].tobytes() == expected.tobytes()
    np.testing.assert_array_equal(expand(FLOAT8, block[None]), expected.astype(np.float32) * scale)


def test_every_code_of_float8_expands_as_in_ml_dtypes(variant: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    codes[0x7F], codes[0xFF] = 0, 0  # NaN, which a block of finite values never has
    block = np.zeros((2, BLOCK + 4), np.uint8)
    block[:, :4] = np.float32(1).reshape(1).view(np.uint8)
    block[:, 4:] = codes.reshape(2, BLOCK)
    np.testing.assert_array_equal(expand(FLOAT8, block), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_bfloat16_is_that_of_ml_dtypes(variant: str) -> None:
    values = np.random.default_rng(1).standard_normal(2 * BLOCK).astype(np.float32)
    values[:4] = [np.inf, -np.inf, 3.4e38, 1e-40]
    assert compress(BFLOAT16, values).tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()


@FORMATS
@settings(max_examples=100, deadline=None)
@given(values=blocks, places=st.dictionaries(st.integers(0, BLOCK - 1), st.sampled_from([np.nan, np.inf, -np.inf])))
def test_values_that_are_not_finite_come_back_and_spare_the_others(
    format: int, values: Array, places: dict[int, float]
) -> None:
    values = np.clip(values, -1e38, 1e38)
    tainted = values.copy()
    for place, value in places.items():
        tainted[place] = value
    found = expand(format, compress(format, tainted))
    special = ~np.isfinite(tainted)
    np.testing.assert_array_equal(found[special], tainted[special])
    remaining = np.where(special, 0, tainted)
    # One code less is left for them.
    assert np.all(np.abs(found - remaining.astype(np.float64))[~special] <= 1.1 * bound(format, remaining)[~special])


@FORMATS
def test_nothing_but_infinities_and_nans(format: int, variant: str) -> None:
    values = np.tile(np.array([np.nan, np.inf, -np.inf, np.inf], np.float32), BLOCK // 4)
    np.testing.assert_array_equal(expand(format, compress(format, values)), values)


@FORMATS
def test_zeros_stay_zeros(format: int, variant: str) -> None:
    assert not expand(format, compress(format, np.zeros(BLOCK, np.float32))).any()


@FORMATS
def test_adding_is_expanding_and_adding(format: int, variant: str) -> None:
    random = np.random.default_rng(3)
    values, mine = random.standard_normal((2, 5 * BLOCK)).astype(np.float32)
    values[[3, 200]] = np.inf, np.nan
    compressed = compress(format, values)
    expected = mine + expand(format, compressed)
    out = np.empty_like(mine)
    core.add_expanded(format, out, mine, compressed)
    assert out.tobytes() == expected.tobytes()
    core.add_expanded(format, mine, mine, compressed)
    assert mine.tobytes() == expected.tobytes()


@FORMATS
def test_all_processors_give_the_same_bits_at_any_address(format: int) -> None:
    random = np.random.default_rng(4)
    values = (random.standard_normal(33 * BLOCK) * 2.0 ** random.integers(-60, 60, 33 * BLOCK)).astype(np.float32)
    values[::1000] = np.inf
    found = []
    for name in VARIANTS:
        core.choose_arithmetic(name)
        for shift in (0, 1, 3):
            memory = np.empty(values.nbytes + shift, np.uint8)
            memory[shift:] = values.view(np.uint8)
            compressed = np.empty(33 * core.block_bytes(format) + shift, np.uint8)
            core.compress(format, compressed[shift:], memory[shift:])
            expanded = np.empty(values.nbytes + shift, np.uint8)
            core.expand(format, expanded[shift:], compressed[shift:])
            found.append((compressed[shift:].tobytes(), expanded[shift:].tobytes()))
    core.choose_arithmetic(VARIANTS[-1])
    assert len(set(found)) == 1


def test_sizes_are_checked() -> None:
    values, out = np.zeros(BLOCK, np.float32), np.zeros(BLOCK + 4, np.uint8)
    with pytest.raises(ValueError, match="9 is no format of compressed blocks"):
        core.compress(9, out, values)
    with pytest.raises(ValueError, match="buffer 1 has 508 bytes, expected whole blocks of 512"):
        core.compress(INT8, out, values[1:])
    with pytest.raises(ValueError, match="buffer 0 has 131 bytes, expected whole blocks of 132"):
        core.compress(INT8, out[1:], values)
    with pytest.raises(ValueError, match="buffer 2 has 0 bytes"):
        core.add_expanded(INT8, values, values, out[:0])
    with pytest.raises(TypeError, match="a format and 2 buffers"):
        core.expand(INT8, values)  # type: ignore[call-arg]
    with pytest.raises((BufferError, ValueError)):
        core.expand(INT8, values.tobytes(), out)
