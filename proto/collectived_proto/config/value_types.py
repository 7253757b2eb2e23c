"""The kinds of values that keys have: how each is read from words or from TOML, and written again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectived_proto.addresses import parse_address, parse_http_address
from collectived_proto.config import units
from collectived_proto.config.rules import RULE_EXPECTED, Rule

_TRUE_WORDS, _FALSE_WORDS = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class ValueType:
    """A kind of values.

    name: as documentation calls it. expected: what a value looks like, for messages.
    parse: the value, from words or from what TOML gave; raises ValueError or TypeError. to_toml: its TOML.
    """

    name: str
    expected: str
    parse: Callable[[Any], Any]
    to_toml: Callable[[Any], str]

    @property
    def is_repeated(self) -> bool:
        """Whether several may be given."""
        return self in (ADDRESSES, NAMES, RULES)

    @property
    def is_boolean(self) -> bool:
        return self is BOOLEAN


def _parse_text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError
    return value


def _parse_path(value: Any) -> Path | None:
    return Path(_parse_text(value)).expanduser() if value else None


def _parse_boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = _parse_text(value).lower()
    if word not in (*_TRUE_WORDS, *_FALSE_WORDS):
        raise ValueError
    return word in _TRUE_WORDS


def _parse_seconds(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return units.parse_seconds(str(value))


def _parse_positive_seconds(value: Any) -> float:
    seconds = _parse_seconds(value)
    if not seconds:
        raise ValueError
    return seconds


def _parse_size(value: Any) -> int:
    if isinstance(value, (bool, float)):
        raise ValueError
    return units.parse_size(str(value))


def _parse_number(value: Any) -> int:
    if isinstance(value, (bool, float)) or not str(value).strip().isdecimal():
        raise ValueError
    return int(value)


def _parse_address(value: Any) -> str:
    text = _parse_text(value)
    if text and not text.startswith("unix:"):
        parse_address(text)
    return text


def _parse_host_port(value: Any) -> str:
    """Parse `[HOST:]PORT`; '' is nowhere."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else _parse_text(value)
    if text:
        parse_http_address(text)
    return text


def _parse_addresses(value: Any) -> tuple[str, ...]:
    parts = value if isinstance(value, (list, tuple)) else _parse_text(value).split(",")
    found = tuple(_parse_address(_parse_text(part).strip()) for part in parts)
    if not all(found):
        raise ValueError
    return found


def _parse_names(value: Any) -> tuple[str, ...]:
    parts = value if isinstance(value, (list, tuple)) else str(value).split(",")
    if any(isinstance(part, (bool, float)) for part in parts):
        raise ValueError
    found = tuple(name for part in parts for name in _parse_text(str(part)).replace(",", " ").split())
    if not found and value:
        raise ValueError
    return found


def _parse_rules(value: Any) -> tuple[Rule, ...]:
    parts = value if isinstance(value, (list, tuple)) else _parse_text(value).split(",")
    return tuple(Rule.parse(_parse_text(part)) for part in parts)


def _format_list(values: Any) -> str:
    return f"[{', '.join(map(_format_string, values))}]"


def _format_string(value: Any) -> str:
    return json.dumps("" if value is None else str(value), ensure_ascii=False)


TEXT = ValueType("text", "a line of text", _parse_text, _format_string)
PATH = ValueType("path", "a path", _parse_path, _format_string)
BOOLEAN = ValueType("true or false", "true or false", _parse_boolean, lambda value: "true" if value else "false")
SECONDS = ValueType(
    "time", units.SECONDS_EXPECTED, _parse_seconds, lambda value: _format_string(units.format_time(value))
)
POSITIVE_SECONDS = ValueType("time", "a time above 0, such as 2.5 or 250ms", _parse_positive_seconds, SECONDS.to_toml)
SIZE = ValueType("size", units.SIZE_EXPECTED, _parse_size, lambda value: _format_string(units.format_exact_size(value)))
NUMBER = ValueType("whole number", "a whole number, 0 or more", _parse_number, str)
OPTIONAL_NUMBER = ValueType(
    NUMBER.name, NUMBER.expected, _parse_number, lambda value: '""' if value is None else str(value)
)
ADDRESS = ValueType("address", "unix:/path or host:port", _parse_address, _format_string)
HOST_PORT = ValueType("[host:]port", "a port, or host:port", _parse_host_port, _format_string)
ADDRESSES = ValueType(
    "addresses",
    "unix:/path or host:port, or several of them",
    _parse_addresses,
    _format_list,
)
NAMES = ValueType("names", "a name or a number, or several of them", _parse_names, _format_list)
RULES = ValueType("rules", f"{RULE_EXPECTED}, or several such rules", _parse_rules, _format_list)


def one_of(*words: str) -> ValueType:
    """One of a few words, in any case."""

    def read(value: Any) -> str:
        word = _parse_text(value).lower()
        if word not in words:
            raise ValueError
        return word

    return ValueType(" / ".join(f"`{word}`" for word in words), f"one of {', '.join(words)}", read, _format_string)
