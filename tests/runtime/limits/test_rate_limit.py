"""Pace: who asks too often waits, for so long and no longer, and nobody else does."""

from __future__ import annotations

import pytest

from collectived_runtime.limits.rate_limit import MAX_DELAY_SECONDS, Rate, RateLimiter


def test_a_burst_goes_through_and_what_follows_keeps_the_rate() -> None:
    pace = RateLimiter(Rate(10, 5))
    delays = [pace.reserve("a", 100.0) for _ in range(8)]
    assert delays == pytest.approx([0, 0, 0, 0, 0, 0.1, 0.2, 0.3])


def test_who_is_quiet_may_burst_again_but_no_more_than_that() -> None:
    pace = RateLimiter(Rate(10, 5))
    for _ in range(5):
        pace.reserve("a", 100.0)
    assert pace.reserve("a", 100.1) == pytest.approx(0)
    assert pace.reserve("a", 100.1) == pytest.approx(0.1)
    assert [pace.reserve("a", 900.0) for _ in range(6)] == pytest.approx([0, 0, 0, 0, 0, 0.1])


def test_callers_do_not_wait_for_each_other() -> None:
    pace = RateLimiter(Rate(10, 1))
    assert [pace.reserve("a", 1.0) for _ in range(3)][-1] > 0
    assert pace.reserve("b", 1.0) == 0


def test_nobody_waits_longer_because_another_gave_up() -> None:
    pace = RateLimiter(Rate(1, 1))
    assert max(pace.reserve("a", 1.0) for _ in range(1000)) == MAX_DELAY_SECONDS
    assert pace.reserve("a", 1.0 + MAX_DELAY_SECONDS) == pytest.approx(1.0)


def test_what_costs_more_waits_for_more() -> None:
    pace = RateLimiter(Rate(10, 5))
    assert pace.reserve("a", 1.0, cost=5) == 0
    assert pace.reserve("a", 1.0, cost=3) == pytest.approx(0.3)


def test_so_many_callers_are_remembered_and_no_more() -> None:
    pace = RateLimiter(Rate(1, 1), most=3)
    for caller in range(1000):
        pace.reserve(caller, 1.0)
    assert len(pace) == 3
