"""Versions, as far as doctor compares them: numbers between dots, and what a package demands of another."""

from __future__ import annotations

import re

_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|~=|>|<)\s*([0-9][^\s,]*)\s*")


def parse_version(version: str) -> tuple[int, ...]:
    """`1.85.1` as (1, 85, 1); text behind the numbers, such as rc1, is ignored."""
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version is what `>=6.31.1,<8` asks for; a clause that is none we know is passed over."""
    return all(
        _satisfies_clause(version, found[1], found[2]) for found in map(_CLAUSE.fullmatch, wanted.split(",")) if found
    )


def _satisfies_clause(version: str, relation: str, wanted: str) -> bool:
    if wanted.endswith(".*"):
        prefix = parse_version(wanted)
        return (parse_version(version)[: len(prefix)] == prefix) is (relation == "==")
    length = max(len(parse_version(version)), len(parse_version(wanted)))
    one, other = (parse_version(text) + (0,) * (length - len(parse_version(text))) for text in (version, wanted))
    match relation:
        case ">=":
            return one >= other
        case "<=":
            return one <= other
        case ">":
            return one > other
        case "<":
            return one < other
        case "!=":
            return one != other
        case "~=":
            kept = len(parse_version(wanted)) - 1
            return one >= other and one[:kept] == other[:kept]
        case _:
            return one == other


def parse_requirement(text: str) -> tuple[str, str] | None:
    """`grpcio>=1.74` as ("grpcio", ">=1.74"); None for what only an extra asks for."""
    said, _, condition = text.partition(";")
    if "extra" in condition:
        return None
    found = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*\(?([^)]*)\)?\s*$", said)
    return (found[1], found[2].strip()) if found else None


def release_distance(one: str, other: str) -> int:
    """How far two releases of collectived are apart: 0 where they may talk (`1.2.x`), 1 for neighbours, else 2."""
    (major, minor, *_), (other_major, other_minor, *_) = ((*parse_version(text), 0, 0) for text in (one, other))
    if major != other_major:
        return 2
    return min(2, abs(minor - other_minor))
