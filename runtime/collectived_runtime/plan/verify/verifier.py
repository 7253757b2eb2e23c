"""The checker: runs the plans of all participants in memory, without arithmetic, and refuses a wrong one.

A *value* is what would stand in a span: whose contributions it is made of, and by which *fold tree*; equal trees over
equal inputs give equal bits. The checker walks all plans in lockstep, one round of each at a time, and proves:

- a send and its receive stand in the same round, in the same order for a pair, with equal spans, so that no round can
  wait forever; the participant that would wait is named (`PlanDeadlock`);
- no round reads what it writes, and the three buffers may share memory (`BufferOverwrite`);
- the left operand of a fold is the one with the lowest contribution (`FoldOrderError`);
- each participant that must end with a result has each contribution exactly once everywhere (`ContributionError`), and
  the same fold tree as all others (`FoldDivergence`).

Rounds are taken from iterators and a partial sum is forgotten once it has been handed on, so that memory grows with
the number of participants and not with its square.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from collectived_runtime.plan.errors import PlanDeadlock
from collectived_runtime.plan.verify.buffers import ParticipantBuffers
from collectived_runtime.plan.verify.fold_trees import FoldTrees
from collectived_runtime.plan.verify.participant import PlanParticipant, Posted
from collectived_runtime.plan.verify.postconditions import Goal
from collectived_runtime.plan.wide_moves import NativeMove, WideRound


@dataclass(frozen=True, slots=True)
class PlanTraffic:
    """The traffic of plans: the longest plan's rounds, and the elements and messages that each participant sends."""

    rounds: int
    elements: Mapping[int, int]
    messages: Mapping[int, int]


def verify_plans(plans: Mapping[int, Iterable[WideRound]], goal: Goal) -> PlanTraffic:
    """Run `plans`, one per participant, and prove that they reach `goal`.

    Raises:
        PlanError: they do not; the subclass and the text say how.
    """
    book = FoldTrees(goal, plans)
    walkers = [
        PlanParticipant(participant, plan, ParticipantBuffers(participant, book)) for participant, plan in plans.items()
    ]
    walking = walkers
    rounds = 0
    while walking := [walker for walker in walking if walker.enter_round()]:
        posted: Posted = {}
        busy = [walker for walker in walking if walker.is_busy]
        for walker in busy:
            walker.post_sends(posted)
        waiting = [name for walker in busy for name in walker.receive_posted(posted)]
        waiting += _find_unreceived(posted)
        if waiting:
            more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
            raise PlanDeadlock(f"round {rounds}: {', '.join(waiting[:8])}{more}")
        rounds += 1
    for walker in walkers:
        walker.buffers.check_complete()
    elements = {walker.me: walker.elements_sent for walker in walkers}
    return PlanTraffic(rounds, elements, {walker.me: walker.messages_sent for walker in walkers})


def _find_unreceived(posted: Posted) -> Iterator[str]:
    for (sender, receiver), left in posted.items():
        if left and not isinstance(sender, NativeMove):
            yield f"{sender} waits for {receiver} to take its send"
