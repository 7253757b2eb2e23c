"""Quantities with their units, out of words and into words: `64MiB`, `250ms`."""

from __future__ import annotations

import math
import re

_SIZES = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_SIZE = re.compile(r"([0-9]+)\s*(?:([KMGT])(?:iB)?|B)?")
_TIMES = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*(ms|s|min|m|h)?")

SIZE_EXPECTED = "a number with B, KiB, MiB, GiB or TiB, such as 64KiB"
SECONDS_EXPECTED = "a number of seconds that is not negative, or one with ms, s, min or h, such as 2.5 or 250ms"


def parse_size(text: str) -> int:
    """`64KiB` and `64K` as 65536; a bare number is bytes.

    Raises:
        ValueError: not a number with B, KiB, MiB, GiB or TiB.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size: expected {SIZE_EXPECTED}")
    return int(found[1]) << _SIZES[f"{found[2]}iB" if found[2] else "B"]


def format_size(nbytes: int) -> str:
    """65536 as `64 KiB`, which `parse_size` reads, if it is a whole number of units."""
    unit = next(unit for unit in reversed(_SIZES) if nbytes >= 1 << _SIZES[unit] or unit == "B")
    return f"{nbytes / (1 << _SIZES[unit]):.4g} {unit}"


def format_exact_size(nbytes: int) -> str:
    """65536 as `64KiB`, 65537 as `65537B`: what `parse_size` reads back as the same number."""
    unit = next(unit for unit in reversed(_SIZES) if nbytes and not nbytes % (1 << _SIZES[unit]) or unit == "B")
    return f"{nbytes >> _SIZES[unit]}{unit}"


def parse_seconds(text: str) -> float:
    """`250ms` as 0.25; a bare number is seconds.

    Raises:
        ValueError: not a finite number, not negative, with ms, s, min or h.
    """
    found = _TIME.fullmatch(text.strip())
    value = float(found[1]) * _TIMES[found[2] or "s"] if found else math.inf
    if value == math.inf:
        raise ValueError(f"{text!r} is not a time: expected {SECONDS_EXPECTED}")
    return value


def format_time(seconds: float) -> str:
    """0.25 as `250ms`, 30.0 as `30s`: what `parse_seconds` reads back as the same number."""
    thousandths = f"{seconds * 1000:g}ms"
    if 0 < seconds < 1 and parse_seconds(thousandths) == seconds:
        return thousandths
    return f"{seconds:g}s" if float(f"{seconds:g}") == seconds else f"{seconds!r}s"
