from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from collectived_launcher.__main__ import collectived
from collectived_launcher.quantities import ByteCount, Time


def options(command: click.Command) -> Iterator[click.Option]:
    yield from (one for one in command.params if isinstance(one, click.Option))
    for part in command.commands.values() if isinstance(command, click.Group) else ():
        yield from options(part)


def test_every_option_that_takes_seconds_takes_them_with_a_unit() -> None:
    found = list(options(collectived))
    assert {"--timeout", "--grace", "--watch", "--interval", "--last", "--within", "--host-timeout"} == {
        option.opts[0] for option in found if isinstance(option.type, Time)
    }
    assert not [option.opts for option in found if isinstance(option.type, click.types.FloatParamType)]


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30.0), ("500ms", 0.5), ("2", 2.0), ("1.5m", 90.0), ("1h", 3600.0), ("0", 0.0)]
)
def test_a_time_is_a_number_with_a_unit(text: str, seconds: float) -> None:
    assert Time().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "-1s", "nan", "inf", "3 days", "s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a time: expected a number of seconds"):
        Time().convert(text, None, None)


def test_a_time_below_the_minimum_is_refused() -> None:
    assert Time(0.2).convert("200ms", None, None) == 0.2
    with pytest.raises(click.BadParameter, match="'0.1s' is too short: expected 200ms or more"):
        Time(0.2).convert("0.1s", None, None)


def test_a_byte_count_is_at_least_one() -> None:
    assert [ByteCount().convert(text, None, None) for text in ("1", "64K", "64KiB", "2M")] == [1, 65536, 65536, 2 << 20]
    with pytest.raises(click.BadParameter, match="'0' is nothing: expected at least 1"):
        ByteCount().convert("0", None, None)
    with pytest.raises(click.BadParameter, match="'64KB' is not a size: expected a number with B, KiB, MiB"):
        ByteCount().convert("64KB", None, None)
