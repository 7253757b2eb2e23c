"""Goals: what a collective must leave in whose OUTPUT, for the checker.

A *contribution* is one participant's INPUT. A goal says which participants contribute where, of whose contributions the
final value of each span is made, and which participants must end with which spans; none may end with more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collectived_runtime.plan.moves import Span


@dataclass(frozen=True, slots=True)
class Goal:
    """`contributors` lists disjoint spans in ascending order, each with those who contribute to its final value."""

    inputs: Mapping[int, tuple[Span, ...]]
    contributors: tuple[tuple[Span, tuple[int, ...]], ...]
    outputs: Mapping[int, tuple[Span, ...]]


def all_reduce_goal(members: Sequence[int], span: Span, servers: Mapping[int, Span] | None = None) -> Goal:
    """`servers` are participants that contribute nothing and end with the span named."""
    everywhere = dict.fromkeys(members, (span,))
    beside = {server: (share,) for server, share in (servers or {}).items()}
    return Goal(everywhere, ((span, tuple(members)),), beside | everywhere)
