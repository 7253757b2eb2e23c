"""Sizes, times and rates, in words and out of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectived_runtime.simulation.units import duration, format_size, parse_size, rate


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4", 4), ("4B", 4), ("64KiB", 65536), (" 1 MiB ", 1 << 20), ("16GiB", 16 << 30), ("0B", 0)]
)
def test_a_size_is_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ("", "KiB", "-1B", "1.5MiB", "64KB", "64 kib", "1e3", "٤"))
def test_what_is_no_size_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: expected a number with B, KiB, MiB, GiB or TiB"):
        parse_size(text)


@given(st.integers(1, 1023), st.sampled_from((0, 10, 20, 30)))
def test_whole_units_survive_both_ways(number: int, exponent: int) -> None:
    assert parse_size(format_size(number << exponent)) == number << exponent


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 µs"),
        (30e-6, "30.0 µs"),
        (999.4e-6, "999 µs"),
        (999.6e-6, "1.00 ms"),
        (12.34e-3, "12.3 ms"),
        (99.96e-3, "100 ms"),
        (219.9, "220 s"),
    ],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0.00 kB/s"), (1.2345e9, "1.23 GB/s"), (999.7e6, "1.00 GB/s")])
def test_rates_have_three_digits(value: float, text: str) -> None:
    assert rate(value) == text
