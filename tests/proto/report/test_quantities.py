"""Sizes, times and rates in words."""

from __future__ import annotations

import pytest

from collectived_proto.report.quantities import (
    format_bytes,
    format_link_rate,
    format_measured_rate,
    format_measured_time,
    format_memory,
    format_round_bytes,
    format_tick_rate,
    format_tick_time,
)


def test_sizes_are_told_as_people_read_them() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1023.7, 1536, 5 << 30, 3 << 50)] == [
        "0 B",
        "1023 B",
        "1024 B",
        "1.5 KiB",
        "5.0 GiB",
        "3072.0 TiB",
    ]
    assert [format_round_bytes(n) for n in (4, 1 << 16, 3 << 19, 1 << 30)] == ["4 B", "64 KiB", "1.5 MiB", "1 GiB"]
    assert [format_memory(n) for n in (1 << 18, 512 << 20, 8 << 30, 64 << 30)] == [
        "0 MiB",
        "512 MiB",
        "8192 MiB",
        "64 GiB",
    ]


def test_an_axis_has_no_more_digits_than_it_needs() -> None:
    assert [format_tick_time(s) for s in (1e-5, 1e-3, 0.1, 10)] == ["10 µs", "1 ms", "100 ms", "10 s"]
    assert [format_tick_rate(r) for r in (0, 1e5, 1e8, 1e10)] == ["0 kB/s", "100 kB/s", "100 MB/s", "10 GB/s"]


def test_links_are_told_as_vendors_do() -> None:
    assert [format_link_rate(r) for r in (0, 5e5, 117.5e6, 1.25e9)] == [
        "0.0 MB/s",
        "0.5 MB/s",
        "117.5 MB/s",
        "1.25 GB/s",
    ]


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
    assert format_measured_time(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0.00 kB/s"), (1.2345e9, "1.23 GB/s"), (999.7e6, "1.00 GB/s")])
def test_rates_have_three_digits(value: float, text: str) -> None:
    assert format_measured_rate(value) == text
