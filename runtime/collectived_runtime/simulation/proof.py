"""The proof: all participants' plans run in memory, and each ends with every contribution exactly once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.verify import postconditions
from collectived_runtime.plan.verify.verifier import PlanTraffic, verify_plans
from collectived_runtime.simulation.algorithms import make_plan, participants
from collectived_runtime.simulation.study import ITEMSIZE, SimulationSpec

MAX_ROUND_MOVES = 1 << 21
"""Moves of one round, of all participants together, that are held at once: about 0.6 KB each."""


class RoundTooLarge(Exception):
    """A round of this algorithm has too many moves to hold them all."""


@dataclass(frozen=True, slots=True)
class Proof:
    """`messages` and `nbytes` are what the busiest participant sends; `seconds` is how long the proof took."""

    algorithm: str
    participants: int
    nbytes: int
    rounds: int
    messages: int
    sent: int
    seconds: float


def select_cases(question: SimulationSpec) -> Iterator[tuple[str, int]]:
    """The cases to prove: each algorithm at the smallest size, where pieces are empty, and at the largest."""
    sizes = sorted({min(question.sizes), max(question.sizes)})
    return ((name, nbytes) for name in question.algorithms for nbytes in sizes)


def count_moves(question: SimulationSpec, name: str, nbytes: int) -> int:
    """How many moves there are to check, as the first participant's plan says.

    Raises:
        RoundTooLarge: the algorithm has rounds of more moves than fit.
    """
    hosts = participants(question.hosts)
    span = Span(0, nbytes // ITEMSIZE)
    devices = sum(question.hosts)
    widths = [len(moves) for moves in make_plan(name, hosts, 0, span)]
    if (widest := max(widths) * devices) > MAX_ROUND_MOVES:
        raise RoundTooLarge(
            f"a round of {name} has {widest:,} moves on {devices:,} devices, which are held at once: "
            f"expected at most {MAX_ROUND_MOVES:,}; choose fewer workers or other algorithms"
        )
    return sum(widths) * devices


def prove(question: SimulationSpec, name: str, nbytes: int) -> Proof:
    """Check the plans of every participant, shard by shard.

    Raises:
        PlanError: a plan is wrong; the text says where.
    """
    begun = time.perf_counter()
    traffic = [_check_shard(question, name, part) for part in Span(0, nbytes // ITEMSIZE).split(question.shards)]
    seconds = time.perf_counter() - begun
    everybody = range(sum(question.hosts))
    return Proof(
        name,
        len(everybody),
        nbytes,
        max(shard.rounds for shard in traffic),
        max(sum(shard.messages[me] for shard in traffic) for me in everybody),
        max(sum(shard.elements[me] for shard in traffic) for me in everybody) * ITEMSIZE,
        seconds,
    )


def _check_shard(question: SimulationSpec, name: str, span: Span) -> PlanTraffic:
    hosts = participants(question.hosts)
    everybody = range(sum(question.hosts))
    return verify_plans(
        {me: make_plan(name, hosts, me, span) for me in everybody}, postconditions.all_reduce_goal(everybody, span)
    )
