"""Checks of what callers give, and text as it may travel."""

from __future__ import annotations

import inspect
import operator
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn, SupportsIndex, TypedDict

from collectived_proto.options import CommunicationOptions, to_seconds

Options = CommunicationOptions | None

# A default of required arguments. Signatures show no default, and an error says what to type where one is left out.
REQUIRED: Any = inspect.Parameter.empty


class Terms(TypedDict, total=False):
    """The keyword arguments of every collective, beside `async_op`."""

    timeout: float | timedelta | None
    experimental_hints: Options


class ResultTerms(Terms, total=False):
    """The same of those that have a result."""

    out: Any


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


def refuse_single(call: str) -> NoReturn:
    """Say what to type where a call was given one argument of the two that it takes.

    Raises:
        TypeError: always.
    """
    raise TypeError(f'{call} takes a reduce op and a value, got one of the two: {call}("sum", tensor)')


def with_timeout(options: Options, timeout: float | timedelta | None) -> Options:
    """The options with the timeout of a call.

    Raises:
        ValueError: both have one, or it is negative or NaN.
    """
    if timeout is None or not isinstance(options, CommunicationOptions | None):  # other errors are raised by `_start`
        return options
    if options is not None and options.timeout_seconds is not None:
        raise ValueError("timeout and options.timeout_seconds were both given: give one of them")
    return replace(options or CommunicationOptions(), timeout_seconds=to_seconds(timeout, "timeout"))
