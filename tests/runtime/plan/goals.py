"""Goals of other collectives than all_reduce, which tests alone ask the verifier for."""

from __future__ import annotations

from collections.abc import Sequence

from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.spans import hull
from collectived_runtime.plan.verify.postconditions import Goal


def reduce_goal(members: Sequence[int], span: Span, root: int) -> Goal:
    return Goal(dict.fromkeys(members, (span,)), ((span, tuple(members)),), {root: (span,)})


def broadcast_goal(members: Sequence[int], span: Span, root: int) -> Goal:
    return Goal({root: (span,)}, ((span, (root,)),), dict.fromkeys(members, (span,)))


def reduce_scatter_goal(members: Sequence[int], shares: Sequence[Span]) -> Goal:
    span = hull(shares)
    return Goal(dict.fromkeys(members, (span,)), ((span, tuple(members)),), _each(members, shares))


def all_gather_goal(members: Sequence[int], shares: Sequence[Span]) -> Goal:
    return Goal(_each(members, shares), _own(members, shares), dict.fromkeys(members, (hull(shares),)))


def gather_goal(members: Sequence[int], shares: Sequence[Span], root: int) -> Goal:
    return Goal(_each(members, shares), _own(members, shares), {root: (hull(shares),)})


def scatter_goal(members: Sequence[int], shares: Sequence[Span], root: int) -> Goal:
    return Goal({root: (hull(shares),)}, ((hull(shares), (root,)),), _each(members, shares))


def all_to_all_goal(members: Sequence[int], table: Sequence[Sequence[Span]]) -> Goal:
    """`table[i][j]` goes from member i to member j; rows are neighbours of each other."""
    rows = [hull(row) for row in table]
    columns = [tuple(row[j] for row in table) for j in range(len(members))]
    return Goal(_each(members, rows), _own(members, rows), dict(zip(members, columns, strict=True)))


def _each(members: Sequence[int], shares: Sequence[Span]) -> dict[int, tuple[Span, ...]]:
    return {member: (share,) for member, share in zip(members, shares, strict=True)}


def _own(members: Sequence[int], shares: Sequence[Span]) -> tuple[tuple[Span, tuple[int, ...]], ...]:
    return tuple((share, (member,)) for member, share in zip(members, shares, strict=True))
