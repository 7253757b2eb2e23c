"""Quantities on the command line, read and refused in the same words by every command."""

from __future__ import annotations

import math

import click

from collectived_proto.addresses import parse_http_address
from collectived_proto.config.units import parse_seconds, parse_size

MIN_INTERVAL = 0.2  # seconds


def seconds(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Accepts a finite number of seconds that is not negative."""
    if value is not None and not 0 <= value < math.inf:
        raise click.BadParameter(f"{value!r} is not a number of seconds: expected 0 or more, such as 2.5")
    return value


def pace(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Accepts the seconds between questions: not so few that asking is all that happens."""
    if value is not None and not MIN_INTERVAL <= value < math.inf:
        raise click.BadParameter(f"{value!r} is not a pace: expected {MIN_INTERVAL} seconds or more, such as 1")
    return value


def parse_time(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Accepts `250ms`, `30s`, `2min` or a bare number of seconds."""
    try:
        return None if value is None else parse_seconds(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def parse_byte_count(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Accepts `8MiB` or a bare number of bytes; at least 1."""
    try:
        found = None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if found == 0:
        raise click.BadParameter(f"{value!r} is nothing: expected at least 1")
    return found


def check_http_address(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Accepts `[HOST:]PORT`."""
    if value is not None:
        try:
            parse_http_address(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    return value


def parse_time_span(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Accepts a positive time such as 500ms, 30s, 5m or 1h; without a unit, seconds. Returns seconds."""
    if value is None:
        return None
    try:
        found = parse_seconds(value)
    except ValueError:
        found = 0.0
    if not found:
        raise click.BadParameter(f"{value!r} is not a time: expected a positive one, such as 500ms, 30s, 5m or 1h")
    return found
