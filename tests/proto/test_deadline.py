"""How long a drain may last, and how long another process is waited for that may be as late as this one."""

from __future__ import annotations

import math

import pytest

from collectived_proto.deadline import MAX_DRAIN_SECONDS, Patience, check_drain_timeout
from collectived_proto.errors import InvalidArgumentError


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 30.0, MAX_DRAIN_SECONDS])
def test_a_drain_may_last_what_a_clock_can_count_to(seconds: float) -> None:
    check_drain_timeout(seconds)


@pytest.mark.parametrize("seconds", [-5e-324, -1.0, MAX_DRAIN_SECONDS + 1, 1e300, math.inf, -math.inf, math.nan])
def test_another_time_is_refused_and_named(seconds: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"from 0 to 31536000 \(a year\), got ") as caught:
        check_drain_timeout(seconds)
    assert str(caught.value).endswith(f"got {seconds!r}")


@pytest.mark.parametrize("late", [0.0, 0.5, 3.0])
def test_a_step_counts_once_however_late_its_end_is_seen(late: float) -> None:
    patience, now = Patience(1.0, begin=10.0, steps=4), 10.0
    while not patience.is_over(now):
        now = patience.at + late
    assert now == 10.0 + 1.0 + 4 * late


def test_looking_more_often_than_steps_end_makes_no_difference() -> None:
    patience, looks = Patience(1.0, begin=0.0, steps=4), [i / 64 for i in range(128)]
    assert next(now for now in looks if patience.is_over(now)) == 1.0
    assert patience.is_over(0.0)


def test_what_has_passed_before_anybody_was_to_look_has_passed() -> None:
    patience = Patience(1.0, begin=0.0, steps=4)
    patience.skip(0.6)
    assert (patience.at, patience.end) == (0.75, 1.0) and not patience.is_over(0.6)
    patience.skip(7.0)
    assert patience.at <= 7.0 and not patience.is_ending, "somebody is to look before it is over"
    assert not patience.is_over(7.0) and patience.is_ending and patience.is_over(7.25)


def test_the_end_of_a_wait_moves_by_what_a_step_was_seen_late() -> None:
    patience = Patience(1.0, begin=0.0, steps=4)
    assert patience.end == 1.0 and not patience.is_over(0.375)
    assert patience.end == 1.125
