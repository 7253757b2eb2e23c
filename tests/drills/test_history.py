"""The checker of histories: it lets right ones pass, and no wrong one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.drills.history import Event, Gone, Outcome, Submit, check

from collectived_proto.errors import Code

ALLOWANCE = 0.25
GENERATION = 7


def submit(rank: int, instance: int = 0, at: float = 0.0, **more: Any) -> Submit:
    return Submit(f"client {rank}", rank, 3, GENERATION, instance, at, **{"value": rank + 1.0, **more})


def outcome(rank: int, instance: int = 0, at: float = 0.1, code: Code = Code.OK, **more: Any) -> Outcome:
    found = 6.0 if code is Code.OK else None
    more = {"missing": (2,) * (code is not Code.OK), "decided_by": "coordinator", **more}
    return Outcome(f"client {rank}", rank, GENERATION, instance, at, code, **{"value": found, **more})


SUM: list[Event] = [*(submit(rank) for rank in range(3)), *(outcome(rank) for rank in range(3))]
LOST: list[Event] = [
    *SUM,
    *(submit(rank, 1, at=0.2) for rank in (0, 1)),
    Gone("client 2"),
    *(outcome(rank, 1, 0.3, Code.UNAVAILABLE) for rank in (0, 1)),
    *(submit(rank, 2, at=0.4) for rank in (0, 1)),
    *(outcome(rank, 2, 0.4, Code.UNAVAILABLE) for rank in (0, 1)),
]
EXPIRED: list[Event] = [
    submit(0, timeout=1.0),
    submit(1, timeout=60.0),
    outcome(0, at=1.2, code=Code.DEADLINE_EXCEEDED),
    outcome(1, at=1.2, code=Code.DEADLINE_EXCEEDED),
    submit(2, at=5.0, timeout=1.0),
    outcome(2, at=5.1, code=Code.DEADLINE_EXCEEDED),
]


@pytest.mark.parametrize("events", [[], SUM, LOST, EXPIRED, [*SUM, submit(2, 1, at=0.5), Gone("client 2")]])
def test_a_right_history_has_nothing_wrong(events: Sequence[Event]) -> None:
    assert check(events, ALLOWANCE) == []


def without(events: Sequence[Event], *those: Event) -> list[Event]:
    left = [event for event in events if event not in those]
    assert len(left) < len(events)
    return left


WRONG: dict[str, tuple[list[Event], str]] = {
    "a rank that hears nothing": (without(SUM, outcome(1)), "on rank 1 has no outcome"),
    "a killed rank whose neighbour hears nothing": (
        [*without(SUM, outcome(1)), Gone("client 2")],
        "on rank 1 has no outcome",
    ),
    "two outcomes": ([*SUM, outcome(1, at=0.2)], "on rank 1 has two outcomes: OK and OK"),
    "two submissions": ([*SUM, submit(1, at=0.05)], "on rank 1 was submitted twice"),
    "an outcome of nothing": ([*SUM, outcome(1, 1)], "was never submitted"),
    "an outcome before its call": ([*without(SUM, submit(1)), submit(1, at=0.15)], "ended before it was submitted"),
    "an instance left out": ([*SUM, submit(0, 2), outcome(0, 2, code=Code.ABORTED)], "submitted instances [0, 2]"),
    "a wrong sum": ([*without(SUM, outcome(1)), outcome(1, value=5.0)], "on rank 1 is wrong: 5.0 instead of 6.0"),
    "a sum in which elements differ": ([*without(SUM, outcome(1)), outcome(1, value=math.nan)], "is wrong: nan"),
    "a result without everybody": (without(SUM, submit(2), outcome(2)), "although ranks [2] never submitted it"),
    "different codes": (
        [*without(LOST, outcome(1, 1, 0.3, Code.UNAVAILABLE)), outcome(1, 1, 0.3, Code.ABORTED)],
        "failed in different ways: UNAVAILABLE missing [2] on rank 0 #1",
    ),
    "different culprits": (
        [*without(LOST, outcome(1, 1, 0.3, Code.UNAVAILABLE)), outcome(1, 1, 0.3, Code.UNAVAILABLE, missing=(0,))],
        "failed in different ways",
    ),
    "a later instance that fails otherwise": (
        [*without(LOST, outcome(0, 2, 0.4, Code.UNAVAILABLE)), outcome(0, 2, 0.4, Code.ABORTED)],
        "ABORTED missing [2] on rank 0 #2",
    ),
    "a later instance that succeeds": (
        [
            *without(LOST, *(outcome(rank, 2, 0.4, Code.UNAVAILABLE) for rank in (0, 1))),
            submit(2, 1),
            submit(2, 2),
            *(outcome(rank, 2, 0.4) for rank in (0, 1)),
        ],
        "succeeded after instance 1 had failed",
    ),
    "a later call that is not told at once": (
        [*without(LOST, outcome(0, 2, 0.4, Code.UNAVAILABLE)), outcome(0, 2, 2.0, Code.UNAVAILABLE)],
        "took 1.60 s to fail",
    ),
    "a deadline that is not kept": (
        [
            *without(EXPIRED, outcome(1, at=1.2, code=Code.DEADLINE_EXCEEDED)),
            outcome(1, at=1.3, code=Code.DEADLINE_EXCEEDED),
        ],
        "on rank 1 ended 0.300 s after its deadline",
    ),
    "a late caller that is kept waiting": (
        [
            *without(EXPIRED, outcome(2, at=5.1, code=Code.DEADLINE_EXCEEDED)),
            outcome(2, at=5.9, code=Code.DEADLINE_EXCEEDED),
        ],
        "on rank 2 ended 0.900 s after its deadline",
    ),
    "a success after the deadline": (
        [*(submit(rank, timeout=0.5) for rank in range(3)), *(outcome(rank, at=1.0) for rank in range(3))],
        "ended 0.500 s after its deadline",
    ),
}


@pytest.mark.parametrize("events, violation", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_history_is_found_out(events: Sequence[Event], violation: str) -> None:
    found = check(events, ALLOWANCE)
    assert any(violation in sentence for sentence in found), found


def test_an_orphan_may_decide_alone_without_knowing_the_culprit_but_not_with_another_code() -> None:
    told = outcome(1, 1, 0.3, Code.UNAVAILABLE)
    alone = replace(told, missing=(), decided_by="rank 1")
    other = replace(alone, code=Code.ABORTED)
    later = outcome(1, 2, 0.4, Code.UNAVAILABLE)
    rest = without(LOST, told, later)
    assert check([*rest, alone, replace(later, missing=(), decided_by="rank 1")], ALLOWANCE, orphans=[1]) == []
    assert check([*rest, alone, later], ALLOWANCE) != []
    assert check([*rest, other, later], ALLOWANCE, orphans=[1]) != []


def test_a_lazy_caller_finds_its_result_when_it_pleases() -> None:
    events: list[Event] = [submit(0, timeout=1.0, lazy=True), *without(SUM, submit(0), outcome(0)), outcome(0, at=9.0)]
    assert check(events, ALLOWANCE) == []


def test_a_rank_that_only_sends_may_have_returned_before_the_others_came() -> None:
    events: list[Event] = [submit(0, value=None, waits=False), outcome(0, value=None)]
    assert check(events, ALLOWANCE) == []
    assert check([submit(0, value=None), outcome(0, value=None)], ALLOWANCE) != []
