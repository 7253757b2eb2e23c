"""Sizes, times and rates in words, and sizes out of words."""

from __future__ import annotations

import re

_UNITS = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30}
_SIZE = re.compile(r"([0-9]+)\s*([KMG]iB|B)?")


def bytes_of(text: str) -> int:
    """`64KiB` as 65536; a bare number is bytes.

    Raises:
        ValueError: not a number with B, KiB, MiB or GiB.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size: expected a number with B, KiB, MiB or GiB, such as 64KiB")
    return int(found[1]) << _UNITS[found[2] or "B"]


def size(nbytes: int) -> str:
    """65536 as `64 KiB`; what `bytes_of` reads, whenever it is a whole number of units."""
    unit = next(unit for unit in reversed(_UNITS) if nbytes >= 1 << _UNITS[unit] or unit == "B")
    return f"{nbytes / (1 << _UNITS[unit]):.4g} {unit}"


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
