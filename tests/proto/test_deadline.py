"""How long a drain may last: what a clock can count to, and nothing else."""

from __future__ import annotations

import math

import pytest

from collectived_proto.deadline import MAX_DRAIN_SECONDS, check_drain_timeout
from collectived_proto.errors import InvalidArgumentError


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 30.0, MAX_DRAIN_SECONDS])
def test_a_drain_may_last_what_a_clock_can_count_to(seconds: float) -> None:
    check_drain_timeout(seconds)


@pytest.mark.parametrize("seconds", [-5e-324, -1.0, MAX_DRAIN_SECONDS + 1, 1e300, math.inf, -math.inf, math.nan])
def test_another_time_is_refused_and_named(seconds: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"from 0 to 31536000 \(a year\), got ") as caught:
        check_drain_timeout(seconds)
    assert str(caught.value).endswith(f"got {seconds!r}")
