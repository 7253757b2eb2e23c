"""Rules: the principals that may use names which match a pattern, as `night/* = user:ann group:ml token:ci`."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, cast

PrincipalKind = Literal["user", "group", "token"]
_PRINCIPAL_KINDS = ("user", "group", "token")
RULE_EXPECTED = "PATTERN = user:NAME group:NAME token:NAME …"


@dataclass(frozen=True, slots=True)
class Rule:
    """Allow `principals` alone to use names that match `pattern`, with * and ? as in shells.

    Empty: nothing is allowed.
    """

    pattern: str
    principals: tuple[tuple[PrincipalKind, str], ...]

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse one rule; raises ValueError where it is none."""
        pattern, equals, rest = text.rpartition("=")
        words = [word.partition(":") for word in rest.split()]
        pattern = pattern.strip()
        if not equals or not pattern or any(kind not in _PRINCIPAL_KINDS or not name for kind, _, name in words):
            raise ValueError(f"{text!r} is no rule: expected {RULE_EXPECTED}")
        return cls(pattern, tuple((cast(PrincipalKind, kind), name) for kind, _, name in words))

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)

    def __str__(self) -> str:
        return " ".join([self.pattern, "=", *(f"{kind}:{name}" for kind, name in self.principals)])
