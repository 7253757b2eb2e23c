"""The checker: runs the plans of all participants in memory, without arithmetic, and refuses a wrong one.

A *value* is what would stand in a span: whose contributions it is made of, and by which *fold tree*; equal trees over
equal inputs give equal bits. The checker walks all plans in lockstep, one round of each at a time, and proves:

- a send and its receive stand in the same round, in the same order for a pair, with equal spans, so that no round can
  wait for ever; who would wait is named (`Stuck`);
- no round reads what it writes, and the three buffers may share memory (`Overwritten`);
- the left operand of a fold is the one with the lowest contribution (`Misordered`);
- whoever must end with a result has each contribution exactly once everywhere (`Miscounted`), and the same fold tree
  as all others (`Divergent`).

Rounds are taken from iterators and a partial sum is forgotten once it has been handed on, so that memory grows with
the number of participants and not with its square.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from collectived_runtime.plan.book import Book
from collectived_runtime.plan.collect import Native, WideRound
from collectived_runtime.plan.errors import Stuck
from collectived_runtime.plan.goals import Goal
from collectived_runtime.plan.holdings import Holdings
from collectived_runtime.plan.walker import Posted, Walker


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the plans move: the longest plan's rounds, and the elements and messages that each participant sends."""

    rounds: int
    elements: Mapping[int, int]
    messages: Mapping[int, int]


def check(plans: Mapping[int, Iterable[WideRound]], goal: Goal) -> Traffic:
    """Run `plans`, one per participant, and prove that they reach `goal`.

    Raises:
        PlanFault: they do not; the subclass and the text say how.
    """
    book = Book(goal, plans)
    walkers = [Walker(participant, plan, Holdings(participant, book)) for participant, plan in plans.items()]
    walking = walkers
    rounds = 0
    while walking := [walker for walker in walking if walker.enter()]:
        posted: Posted = {}
        busy = [walker for walker in walking if walker.busy]
        for walker in busy:
            walker.post(posted)
        waiting = [name for walker in busy for name in walker.deliver(posted)]
        waiting += _left_over(posted)
        if waiting:
            more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
            raise Stuck(f"round {rounds}: {', '.join(waiting[:8])}{more}")
        rounds += 1
    for walker in walkers:
        walker.held.must_be_complete()
    elements = {walker.me: walker.elements for walker in walkers}
    return Traffic(rounds, elements, {walker.me: walker.messages for walker in walkers})


def _left_over(posted: Posted) -> Iterator[str]:
    for (sender, receiver), left in posted.items():
        if left and not isinstance(sender, Native):
            yield f"{sender} waits for {receiver} to take its send"
