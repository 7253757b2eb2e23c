"""The kinds of values that keys have: how each is read from words or from TOML, and written again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectived_proto.configuration import quantities
from collectived_proto.configuration.rules import EXPECTED, Rule

_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of values.

    name: as documentation calls it. expected: what a value looks like, for messages.
    read: the value, from words or from what TOML gave; raises ValueError or TypeError. write: its TOML.
    """

    name: str
    expected: str
    read: Callable[[Any], Any]
    write: Callable[[Any], str]

    @property
    def repeats(self) -> bool:
        """Whether several may be given."""
        return self in (ADDRESSES, NAMES, RULES)

    @property
    def yes_or_no(self) -> bool:
        return self is YES_NO


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError
    return value


def _path(value: Any) -> Path | None:
    return Path(_text(value)).expanduser() if value else None


def _yes_no(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = _text(value).lower()
    if word not in (*_YES, *_NO):
        raise ValueError
    return word in _YES


def _seconds(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return quantities.seconds_of(str(value))


def _some_seconds(value: Any) -> float:
    seconds = _seconds(value)
    if not seconds:
        raise ValueError
    return seconds


def _size(value: Any) -> int:
    if isinstance(value, (bool, float)):
        raise ValueError
    return quantities.bytes_of(str(value))


def _number(value: Any) -> int:
    if isinstance(value, (bool, float)) or not str(value).strip().isdecimal():
        raise ValueError
    return int(value)


def _address(value: Any) -> str:
    text = _text(value)
    port = text.rpartition(":")[2]
    if text and not text.startswith("unix:") and not (port.isdecimal() and int(port) <= 65535 and ":" in text):
        raise ValueError
    return text


def _place(value: Any) -> str:
    """`[HOST:]PORT`; '' is nowhere."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else _text(value)
    port = text.rpartition(":")[2]
    if text and not (port.isdecimal() and int(port) <= 65535):
        raise ValueError
    return text


def _addresses(value: Any) -> tuple[str, ...]:
    parts = value if isinstance(value, (list, tuple)) else _text(value).split(",")
    found = tuple(_address(_text(part).strip()) for part in parts)
    if not all(found):
        raise ValueError
    return found


def _names(value: Any) -> tuple[str, ...]:
    parts = value if isinstance(value, (list, tuple)) else str(value).split(",")
    if any(isinstance(part, (bool, float)) for part in parts):
        raise ValueError
    found = tuple(name for part in parts for name in _text(str(part)).replace(",", " ").split())
    if not found and value:
        raise ValueError
    return found


def _rules(value: Any) -> tuple[Rule, ...]:
    parts = value if isinstance(value, (list, tuple)) else _text(value).split(",")
    return tuple(Rule.parse(_text(part)) for part in parts)


def _listed(values: Any) -> str:
    return f"[{', '.join(map(_quoted, values))}]"


def _quoted(value: Any) -> str:
    return json.dumps("" if value is None else str(value), ensure_ascii=False)


TEXT = Kind("text", "a line of text", _text, _quoted)
PATH = Kind("path", "a path", _path, _quoted)
YES_NO = Kind("true or false", "true or false", _yes_no, lambda value: "true" if value else "false")
SECONDS = Kind("time", quantities.SECONDS_EXPECTED, _seconds, lambda value: _quoted(quantities.time(value)))
SOME_SECONDS = Kind("time", "a time above 0, such as 2.5 or 250ms", _some_seconds, SECONDS.write)
SIZE = Kind("size", quantities.SIZE_EXPECTED, _size, lambda value: _quoted(quantities.exact_size(value)))
NUMBER = Kind("whole number", "a whole number, 0 or more", _number, str)
OPTIONAL_NUMBER = Kind(NUMBER.name, NUMBER.expected, _number, lambda value: '""' if value is None else str(value))
ADDRESS = Kind("address", "unix:/path or host:port", _address, _quoted)
PLACE = Kind("[host:]port", "a port, or host:port", _place, _quoted)
ADDRESSES = Kind(
    "addresses",
    "unix:/path or host:port, or several of them",
    _addresses,
    _listed,
)
NAMES = Kind("names", "a name or a number, or several of them", _names, _listed)
RULES = Kind("rules", f"{EXPECTED}, or several such rules", _rules, _listed)


def one_of(*words: str) -> Kind:
    """One of a few words, in any case."""

    def read(value: Any) -> str:
        word = _text(value).lower()
        if word not in words:
            raise ValueError
        return word

    return Kind(" / ".join(f"`{word}`" for word in words), f"one of {', '.join(words)}", read, _quoted)
