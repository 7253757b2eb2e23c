"""Quantities with units, out of words and back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectived_proto.config import units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("2.5", 2.5), ("250ms", 0.25), ("30s", 30), ("2 min", 120), ("2m", 120), ("1h", 3600), ("1e-3", 0.001)],
)
def test_times(text: str, seconds: float) -> None:
    assert units.parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1", "-1s", "nan", "inf", "1e999", "3 days", "1,5", "1 2", "٤"])
def test_what_is_no_time_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time: expected a number of seconds") as raised:
        units.parse_seconds(text)
    assert repr(text) in str(raised.value)


@given(st.floats(min_value=0, allow_infinity=False, allow_nan=False))
def test_a_time_in_words_is_the_same_time(seconds: float) -> None:
    assert math.isclose(units.parse_seconds(units.format_time(seconds)), seconds, rel_tol=1e-15)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_size_in_words_is_the_same_size(nbytes: int) -> None:
    assert units.parse_size(units.format_exact_size(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4", 4), ("4B", 4), ("64KiB", 65536), ("64K", 65536), (" 1 MiB ", 1 << 20), ("16GiB", 16 << 30), ("0B", 0)],
)
def test_a_size_is_read(text: str, nbytes: int) -> None:
    assert units.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ("", "KiB", "-1B", "1.5MiB", "64KB", "64 kib", "1e3", "٤"))
def test_what_is_no_size_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: expected a number with B, KiB, MiB, GiB or TiB"):
        units.parse_size(text)


@given(st.integers(1, 1023), st.sampled_from((0, 10, 20, 30)))
def test_whole_units_survive_both_ways(number: int, exponent: int) -> None:
    assert units.parse_size(units.format_size(number << exponent)) == number << exponent
