"""Checks of what callers give, and text as it may travel."""

from __future__ import annotations

import operator
from typing import SupportsIndex


def check_integer(value: SupportsIndex, name: str, least: int, most: int, expected: str) -> int:
    """`value` as a whole number from `least` to `most`, which `expected` says in words.

    Raises:
        TypeError: the argument `name` is no whole number. ValueError: it is another one.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be {expected}, got {value!r}, a {type(value).__name__}")
    if not least <= number <= most:
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return number


def escape_surrogates(text: str) -> str:
    r"""`text` as UTF-8 can carry it: what is left of undecodable bytes (`os.fsdecode`) is written as `\udcff`."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()
