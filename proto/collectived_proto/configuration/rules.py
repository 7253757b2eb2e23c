"""Rules: who may have what a pattern names, as `night/* = user:ann group:ml token:ci`."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, cast

Kind = Literal["user", "group", "token"]
_KINDS = ("user", "group", "token")
EXPECTED = "PATTERN = user:NAME group:NAME token:NAME …"


@dataclass(frozen=True, slots=True)
class Rule:
    """`pattern`, with * and ? as shells have them, is for `who` alone; for nobody where that is empty."""

    pattern: str
    who: tuple[tuple[Kind, str], ...]

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Raises ValueError where it is no rule."""
        pattern, equals, rest = text.rpartition("=")
        words = [word.partition(":") for word in rest.split()]
        pattern = pattern.strip()
        if not equals or not pattern or any(kind not in _KINDS or not name for kind, _, name in words):
            raise ValueError(f"{text!r} is no rule: expected {EXPECTED}")
        return cls(pattern, tuple((cast(Kind, kind), name) for kind, _, name in words))

    def fits(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)

    def __str__(self) -> str:
        return " ".join([self.pattern, "=", *(f"{kind}:{name}" for kind, name in self.who)])
