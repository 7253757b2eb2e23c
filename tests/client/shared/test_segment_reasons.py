"""What a rank says of the end of its generation where its worker does not: whom the segment names, and nobody else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from collectived.calls.rank_state import RankState
from collectived.shared.segment_reasons import word_end
from collectived_native import core
from collectived_proto.cause import Cause
from collectived_proto.types import GroupInfo, Member

MEMBERS = tuple(Member(rank, "CPU:0", 0, "host0", 70 + rank) for rank in range(3))
PREPARED = SimpleNamespace(op="barrier()", is_p2p=False, site="train.py:3")
CALL: Any = SimpleNamespace(
    prepared=PREPARED, instance=4, display_number="instance 4", generation=100, timeout=2.0, cutoff=2.0
)


def worded(reason: int, culprit: int) -> tuple[Cause, list[int], int | None, str]:
    """What rank 0 says."""
    state = RankState(GroupInfo("train", 7, 100, MEMBERS), 0)
    verdict = word_end(state, CALL, reason, culprit, "worker 0")
    assert verdict.decided_by == "rank 0" and verdict.instance == 4
    return verdict.cause, [member.rank for member in verdict.missing], verdict.origin, verdict.message


@pytest.mark.parametrize(
    ("reason", "cause", "says"),
    [
        (core.LOST, Cause.LOST_RANK, "rank 2 is lost"),
        (core.LEFT, Cause.LEFT, "rank 2 has left"),
        (core.NONSENSE, Cause.LOST_RANK, "rank 2 has written nonsense"),
        (core.ABORTED, Cause.ABORTED, "rank 2 has aborted"),
        (core.INTERRUPTED, Cause.ABORTED, "interrupted on rank 2"),
    ],
)
def test_who_has_ended_it_is_named_and_not_who_says_so(reason: int, cause: Cause, says: str) -> None:
    found, missing, origin, text = worded(reason, 2)
    assert (found, missing) == (cause, [2]) and says in text
    assert origin == (2 if cause is Cause.ABORTED else None)


def test_of_two_that_differ_nobody_is_named() -> None:
    assert worded(core.MISMATCH, 2)[:3] == (Cause.MISMATCH, [], None)


@pytest.mark.parametrize("culprit", [core.WORKER_SEAT, 3])
def test_an_end_by_the_worker_names_no_rank(culprit: int) -> None:
    cause, missing, origin, text = worded(core.STOPPED, culprit)
    assert (cause, missing, origin) == (Cause.ABORTED, [], None) and "its worker has ended it" in text


def test_a_worker_that_says_nothing_by_the_deadline_is_told_of() -> None:
    cause, missing, _, text = worded(core.DEADLINE, 1)
    assert (cause, missing) == (Cause.DEADLINE, [0]) and "worker 0 has not answered" in text
