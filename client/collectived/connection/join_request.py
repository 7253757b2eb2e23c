"""The requests of a client that joins, rejoins or splits a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from collectived.arguments import check_integer, escape_surrogates
from collectived.connection import environment
from collectived_proto.deadline import Deadline
from collectived_proto.options import to_seconds
from collectived_proto.report.phrases import find_control_character

_MAX_RANKS = 1 << 20  # more is a mistake: no program has so many ranks


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A size of (n, n) is fixed; `last_instance` is what this process finished in the generation before.

    `deadline` was made of `timeout` when the caller gave it. `parent` is the group that is split and this process's
    rank there: where that group fails, the wait ends.
    """

    name: str
    size: tuple[int, int]
    rank: int | None
    device: str
    settle: float
    timeout: float | None
    idle: bool = False
    last_instance: int | None = None
    parent: tuple[int, int] | None = None
    deadline: Deadline = field(default_factory=Deadline)


def make_join_request(
    name: str | None,
    size: int | tuple[int, int] | None,
    rank: int | None,
    device: str,
    settle: float,
    timeout: float | timedelta | None,
    idle: bool,
) -> JoinRequest:
    """Values that are not given come from the environment.

    Raises:
        TypeError, ValueError: it is wrong, or is missing there too.
    """
    name = environment.group_name() if name is None else name
    if not isinstance(name, str) or not name or name != escape_surrogates(name):
        raise ValueError(f"name must be a text that is not empty and fits in UTF-8, got {name!r}")
    if steering := find_control_character(name):
        raise ValueError(f"name must have no control characters, got {name!r} with {steering!r}")
    least, most = _parse_size(environment.group_size() if size is None else size)
    if rank is None:
        rank = environment.rank(most)
    if rank is not None:
        rank = check_integer(rank, "rank", 0, most - 1, f"from 0 to {most - 1} in a group of {most}")
    if not (settle >= 0 and math.isfinite(settle)):
        raise ValueError(f"settle must be seconds, not negative, got {settle!r}")
    limit = to_seconds(timeout, "timeout")
    deadline = Deadline.after(limit)
    return JoinRequest(name, (least, most), rank, device, float(settle), limit, bool(idle), deadline=deadline)


def make_split_request(
    generation: str, key: int, rank: int, told: Sequence[Sequence[int]], device: str, timeout: float | None
) -> JoinRequest:
    """The wish of a rank for its part of a group that is split.

    Args:
        generation: the name of that generation of the group, whose key is `key`; `rank` is this rank's in it.
        told: what each rank has given: its color, its place among those of that color, and how often it has split.
    """
    color = told[rank][0]
    same = sorted((one[1], other) for other, one in enumerate(told) if one[0] == color)
    place = [other for _, other in same].index(rank)
    name = f"{generation}.{told[0][2]}.{color}"  # as rank 0 has counted, on all of them
    deadline = Deadline.after(timeout)
    sizes = (len(same), len(same))
    return JoinRequest(name, sizes, place, device, 0.0, timeout, parent=(key, rank), deadline=deadline)


def make_rejoin_request(
    before: JoinRequest, size: int | tuple[int, int] | None, timeout: float | timedelta | None
) -> JoinRequest:
    """The wish for the next generation. A rank that was asked for is asked for again where the size allows it."""
    sizes = before.size if size is None else _parse_size(size)
    rank = None if before.rank is None or before.rank >= sizes[1] else before.rank
    limit = to_seconds(timeout, "timeout")
    deadline = Deadline.after(limit)
    return replace(before, size=sizes, rank=rank, timeout=limit, last_instance=None, deadline=deadline)


def _parse_size(size: int | tuple[int, int]) -> tuple[int, int]:
    expected = f"a whole number from 1 to {_MAX_RANKS}, or (least, most) of such"
    given = size if isinstance(size, tuple) and len(size) == 2 else (size, size)
    least, most = (check_integer(number, "size", 1, _MAX_RANKS, expected) for number in given)
    if least > most:
        raise ValueError(f"size must be {expected}, got {size!r}")
    return least, most
