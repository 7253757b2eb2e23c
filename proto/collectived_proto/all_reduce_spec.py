"""`all_reduce_spec`: which algorithm carries tensors of which size.

A *tier* is (algorithm, shards, limit): tensors of at most `limit` bytes that no earlier tier took; -1 takes the rest.
A specification is one algorithm, one tier, or a list of tiers in order of size, as in tf.contrib.distribute.
"""

from __future__ import annotations

import operator
from typing import Any

from collectived_proto.types import Tier

ALGORITHMS = ("nccl", "nccl/xring", "nccl/rechd", "nccl/pscpu", "xring", "pscpu", "psgpu", "pscpu/pscpu")
"""The algorithms that a specification may name."""

UNLIMITED = -1
MAX_SHARDS = 4096
_MAX_LIMIT = (1 << 63) - 1  # that a message can name


def parse_all_reduce_spec(spec: object) -> tuple[Tier, ...]:
    """The tiers of an `all_reduce_spec`: a string, a tuple of one to three entries, or a list of such tuples.

    Raises:
        ValueError: neither of these, an entry of the wrong type (the text names it), an unknown algorithm, shards below
            1 or above 4096, limits that do not increase, do not end with -1 or are 2**63 and more.
    """
    match spec:
        case str():
            return (_parse_tier((spec,), "all_reduce_spec"),)
        case tuple():
            entries = {"all_reduce_spec": spec}
        case list():
            entries = {f"all_reduce_spec[{number}]": entry for number, entry in enumerate(spec)}
        case _:
            raise ValueError(f"all_reduce_spec must be a string, a tuple or a list of tuples, got {spec!r}")
    tiers = {name: _parse_tier(entry, name) for name, entry in entries.items()}
    _check_limits(tiers)
    return tuple(tiers.values())


def _parse_tier(entry: object, name: str) -> Tier:
    if not isinstance(entry, tuple):
        raise ValueError(f"{name} must be a tuple (algorithm, shards, limit), got {entry!r}")
    if not 1 <= len(entry) <= 3:
        raise ValueError(f"{name} = {entry!r} must have one to three entries: algorithm, shards, limit")
    values: list[Any] = [*entry, *(1, UNLIMITED)[len(entry) - 1 :]]
    algorithm, shards, limit = values
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{name} = {entry!r}: unknown algorithm {algorithm!r}, expected {', '.join(ALGORITHMS)}")
    shards, limit = (_check_int(value, what, entry, name) for what, value in (("shards", shards), ("limit", limit)))
    if shards < 1:
        raise ValueError(f"{name} = {entry!r}: shards must be at least 1, got {shards}")
    if shards > MAX_SHARDS:
        raise ValueError(f"{name} = {entry!r}: shards must be at most {MAX_SHARDS}, got {shards}")
    if limit < UNLIMITED:
        raise ValueError(f"{name} = {entry!r}: limit must be bytes, or -1 for the rest, got {limit}")
    if limit > _MAX_LIMIT:
        raise ValueError(f"{name} = {entry!r}: limit must be at most {_MAX_LIMIT} bytes, or -1 for the rest")
    return Tier(algorithm, shards, limit)


def _check_int(value: Any, what: str, entry: object, name: str) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ValueError(f"{name} = {entry!r}: {what} must be an int, got {value!r}")


def _check_limits(tiers: dict[str, Tier]) -> None:
    if not tiers:
        raise ValueError("all_reduce_spec is empty: at least one (algorithm, shards, limit) is needed")
    before = UNLIMITED
    for number, (name, tier) in enumerate(tiers.items(), 1):
        last = number == len(tiers)
        if last != (tier.limit == UNLIMITED):
            raise ValueError(f"{name}: the last limit, and no other, must be -1, got {tier.limit}")
        if not last and tier.limit <= before:
            raise ValueError(f"{name}: limits must increase, got {tier.limit} after {before}")
        before = tier.limit
