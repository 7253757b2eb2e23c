"""Sizes, times and rates in words, for people; exact sizes, which can be read back, are `config.units`' matter."""

from __future__ import annotations

from collections.abc import Sequence

_SIZES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
_TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
_RATES = (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))
_ROUNDS_UP = 0.9995  # a number that rounds to 1000 of a unit belongs to the next one


def format_bytes(count: float) -> str:
    """`1.5 MiB`, `17 B`"""
    return _in_units(count, _SIZES, "{:.1f}" if count >= 1024 else "{:.0f}")


def format_round_bytes(count: int) -> str:
    """`64 KiB`, `1.5 MiB`: no more digits than it has."""
    return _in_units(count, _SIZES[1:], "{:.4g}")


def format_memory(count: int) -> str:
    """`512 MiB`, `64 GiB`: what a host has, without fractions."""
    return _in_units(count, _SIZES[1:3], "{:.0f}", reach=10.0)


def format_measured_time(seconds: float) -> str:
    """Three digits: `12.3 ms`."""
    return _in_units(seconds, _TIMES, None, _ROUNDS_UP)


def format_tick_time(seconds: float) -> str:
    """For an axis: `10 ms`."""
    return _in_units(seconds, _TIMES, "{:g}")


def format_measured_rate(bytes_per_second: float) -> str:
    """Three digits: `1.05 GB/s`."""
    return _in_units(bytes_per_second, _RATES, None, _ROUNDS_UP)


def format_tick_rate(bytes_per_second: float) -> str:
    """For an axis: `10 GB/s`."""
    return _in_units(bytes_per_second, _RATES, "{:g}")


def format_link_rate(bytes_per_second: float) -> str:
    """`1.25 GB/s`, `117.5 MB/s`; a thousand bytes are a kB, as vendors of networks count."""
    return _in_units(bytes_per_second, _RATES[:2], "{:.2f}" if bytes_per_second >= 1e9 else "{:.1f}")


def _in_units(value: float, units: Sequence[tuple[str, float]], digits: str | None, reach: float = 1.0) -> str:
    """In the largest unit of which there are `reach`, or else the last; `digits` None: three of them."""
    unit, worth = next((one for one in units if value >= reach * one[1]), units[-1])
    return f"{(digits or _three_digits(value / worth)).format(value / worth)} {unit}"


def _three_digits(value: float) -> str:
    return "{:.0f}" if value >= 99.95 else "{:.1f}" if value >= 9.995 else "{:.2f}"
