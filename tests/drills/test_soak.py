"""A soak is part of `make drills`; here a few seconds of it, and that it finds what it looks for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.drills.limits import Limit
from tests.drills.processes import RankProcess
from tests.drills.soak import judge, soak
from tests.drills.soak_steps import CALLS, make_differing_step, make_step


def test_some_seconds_of_random_faults_leave_no_wrong_result_and_one_verdict_each() -> None:
    result = soak(4.0, seed=1)
    assert result.violations == [] and result.right > 0 and result.faults.total() > 0


def test_every_call_is_played_alike_on_all_ranks_and_a_differing_one_is_none_of_them() -> None:
    steps = [make_step("a", number, 3) for number in range(200)]
    assert {step.call for step in steps} == set(CALLS)
    assert steps == [make_step("a", number, 3) for number in range(200)]
    assert not {make_differing_step(step) for step in steps} & set(steps)


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "all_to_all", "scatter"])
def test_a_wrong_result_is_seen(call: str) -> None:
    step = next(step for step in (make_step("b", number, 2) for number in range(200)) if step.call == call)
    right = step._expect(1)
    assert right is not None and step.is_right(1, right)
    assert not step.is_right(1, right + 1) and not step.is_right(1, np.concatenate([right, right]))
    assert not step.is_right(1, None)


def failed(
    cause: str, missing: list[int], differing: list[int], by: str = "coordinator", instance: int = 7, number: int = 7
) -> dict[str, Any]:
    failure = {"code": cause, "cause": cause, "missing": missing, "differing": differing, "instance": instance}
    failure["number"] = number
    return {"failures": [failure | {"decided_by": by, "text": ""}]}


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("kill", {0: failed("LOST_RANK", [0, 1], []), 2: failed("LOST_RANK", [0, 1], [])}),
        ("kill", {0: failed("LOST_RANK", [1], []), 2: failed("ABORTED", [1], [])}),
        ("kill", {0: failed("LOST_RANK", [1], []), 2: failed("LOST_RANK", [1], [], instance=8, number=7)}),
        ("kill", {0: failed("LOST_RANK", [1], [], number=8), 2: failed("LOST_RANK", [1], [], instance=8, number=8)}),
        ("kill", {0: failed("DEADLINE", [1], [], "rank 0"), 2: failed("DEADLINE", [1], [], "rank 2")}),
        ("nothing", {0: failed("DEADLINE", [], [], "rank 0")}),
        ("stop", {0: failed("DEADLINE", [0], []), 2: failed("DEADLINE", [0], [])}),
        ("stop", {0: failed("DEADLINE", [], [], "rank 0"), 2: {"failures": []}}),
        ("differ", {rank: failed("MISMATCH", [], [2]) for rank in range(3)}),
        ("kill of a worker", {2: failed("LOST_WORKER", [1, 2], [])}),
        ("abort", {rank: {"failures": []} for rank in range(3)}),
    ],
)
def test_wrong_blame_freezes_and_two_verdicts_are_seen_on_a_late_machine_too(fault: str, told: Any) -> None:
    assert judge(fault, 1, (0, 0, 2), told, is_late=True).complaints


def test_what_was_promised_is_no_complaint() -> None:
    told = {0: failed("DEADLINE", [1], []), 1: failed("DEADLINE", [], [], "rank 1"), 2: failed("DEADLINE", [1], [])}
    assert judge("stop", 1, (0, 0, 2), told, is_late=True) == ([], True, 1)
    told = {rank: failed("MISMATCH", [], [1]) for rank in range(3)}
    assert judge("differ", 1, (0, 0, 2), told, is_late=False) == ([], True, 0)
    told = {
        0: failed("LOST_RANK", [1], [], instance=7, number=7),  # it reaches further back than was known at first
        2: failed("LOST_RANK", [1], [], instance=8, number=9),
    }
    assert judge("kill", 1, (0, 0, 2), told, is_late=False) == ([], True, 0)
    told = {2: failed("LOST_WORKER", [0, 1], [])}
    assert judge("kill of a worker", 1, (0, 0, 2), told, is_late=False) == ([], True, 0)


def test_of_a_rank_that_does_not_answer_the_stacks_are_shown() -> None:
    rank = RankProcess(0, 0)
    assert rank.ask("leave").value(Limit(30)) is None and not rank.owes_answer
    rank.ask("connect", worker="unix:/nowhere/worker.sock", timeout=60)
    assert rank.owes_answer
    told = rank.end_with_stacks()
    rank.close()
    assert "Fatal Python error: Aborted" in told and "rank.py" in told and not rank.alive
