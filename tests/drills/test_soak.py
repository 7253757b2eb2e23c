"""A soak is part of `make drills`; here a few seconds of it, and that it finds what it looks for."""

from __future__ import annotations

import numpy as np
import pytest
from tests.drills.soak import soak
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
