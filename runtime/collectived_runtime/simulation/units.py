"""Sizes, times and rates in words, and sizes out of words."""

from __future__ import annotations

from collectived_proto.config.units import format_size, parse_size

__all__ = ["parse_size", "duration", "rate", "format_size"]


def duration(seconds: float) -> str:
    """Three digits with their unit: `12.3 ms`."""
    for unit, worth in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        # What rounds to 1000 of a unit belongs to the next one.
        if seconds >= 0.9995 * worth or unit == "µs":
            return f"{_three(seconds / worth)} {unit}"
    raise AssertionError("the last unit takes everything")


def rate(bytes_per_second: float) -> str:
    """Three digits with their unit: `1.05 GB/s`."""
    for unit, worth in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_second >= 0.9995 * worth or unit == "kB/s":
            return f"{_three(bytes_per_second / worth)} {unit}"
    raise AssertionError("the last unit takes everything")


def _three(value: float) -> str:
    """Three digits, and no more of them after the point than needed."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
