"""What endurance cells judge by: a line through all samples, not one early sample and one late one."""

from __future__ import annotations

import pytest
from tests.drills.cells.endurance import GROWTH, trend

TIMES = (20, 40, 60, 80, 100)


@pytest.mark.parametrize("values", [(10, 10, 10, 10, 10), (9, 10, 10, 10, 10), (10, 11, 9, 11, 10)])
def test_a_moment_that_differs_is_no_growth(values: tuple[int, ...]) -> None:
    assert trend(TIMES, values) < GROWTH["threads"]


@pytest.mark.parametrize("values", [(10, 11, 12, 13, 14), (10, 10, 11, 11, 12), (11, 30, 50, 70, 12)])
def test_what_is_kept_of_each_generation_is_growth_however_the_last_sample_falls(values: tuple[int, ...]) -> None:
    assert trend(TIMES, values) >= GROWTH["threads"]


def test_a_connection_more_or_less_is_no_growth_and_one_of_every_tenth_generation_is() -> None:
    assert trend(TIMES, (4, 4, 5, 5, 5)) < GROWTH["connections"] <= trend(TIMES, (4, 6, 8, 10, 12))
