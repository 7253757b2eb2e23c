"""Whether two processors are near each other is measured by two processes that end with the one that asks."""

from __future__ import annotations

import os

import pytest
from benchmarks.distance import Distance

TWO = pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="of more processors, or one, nothing is measured")


@TWO
@pytest.mark.timeout(60)
def test_a_value_is_handed_over_and_the_least_time_is_near() -> None:
    with Distance() as distance:
        least = min(distance.measure() for _ in range(5))
        assert 0 < least < 1
        assert distance.is_near_in(least)
        assert not distance.is_near_in(least * 10)


@TWO
@pytest.mark.timeout(60)
def test_waiting_ends_though_the_processors_stay_apart() -> None:
    with Distance() as distance:
        distance.least = 1e-9
        distance.wait()


@pytest.mark.timeout(60)
def test_of_other_numbers_of_processors_nothing_is_measured() -> None:
    with Distance(processors=[0]) as distance:
        assert distance.measure() == 0.0
        assert distance.is_near()
