"""Quantities on the command line, read and refused in the same words by every command."""

from __future__ import annotations

from typing import Any

import click

from collectived_proto.addresses import parse_http_address
from collectived_proto.config.units import format_time, parse_seconds, parse_size


class Time(click.ParamType):  # type: ignore[type-arg]  # not generic in click 8.1
    """A time such as `250ms`, `30s` or `2min`, or a bare number of seconds; converts to seconds.

    Args:
        minimum: in seconds; a shorter time is refused.
    """

    name = "time"

    def __init__(self, minimum: float = 0.0) -> None:
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            found = parse_seconds(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if found < self._minimum:
            self.fail(f"{value!r} is too short: expected {format_time(self._minimum)} or more", param, ctx)
        return found


class ByteCount(click.ParamType):  # type: ignore[type-arg]  # as `Time`
    """A size such as `64KiB` or `64M`, or a bare number of bytes; at least 1."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            found = parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return found or self.fail(f"{value!r} is nothing: expected at least 1", param, ctx)


REFRESH_INTERVAL = Time(minimum=0.2)  # more often, and asking is all that happens


def check_http_address(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Accepts `[HOST:]PORT`."""
    if value is not None:
        try:
            parse_http_address(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    return value
