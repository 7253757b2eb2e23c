"""Quantities on the command line, read and refused in the same words by every command."""

from __future__ import annotations

import math
import re

import click

from collectived_proto import viewing


def seconds(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Accepts a finite number of seconds that is not negative."""
    if value is not None and not 0 <= value < math.inf:
        raise click.BadParameter(f"{value!r} is not a number of seconds: expected 0 or more, such as 2.5")
    return value


def http_address(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Accepts `[HOST:]PORT`."""
    if value is not None:
        try:
            viewing.http_address(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    return value


_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def time_span(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Accepts a positive time such as 500ms, 30s, 5m or 1h; without a unit, seconds. Returns seconds."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h|)", value.strip())
    found = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not found:
        raise click.BadParameter(f"{value!r} is not a time: expected a positive one, such as 500ms, 30s, 5m or 1h")
    return found
