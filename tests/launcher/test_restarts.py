"""How long a daemon is waited for before it is started again, and how often it is. Numbers are seconds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectived_launcher.launch.restarts import (
    LONGEST_PAUSE,
    WINDOW,
    Watched,
    ended,
    late,
    pause,
    ready,
    started,
)


def test_the_pause_doubles_from_a_fifth_of_a_second_to_ten_seconds() -> None:
    pauses = [pause(count, chance=0.0) for count in range(1, 9)]
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])


@given(st.integers(1, 10**9), st.floats(0, 1, exclude_max=True))
def test_chance_takes_off_up_to_half_of_the_pause_however_often_it_was(count: int, chance: float) -> None:
    whole = pause(count, 0.0)
    assert whole / 2 <= pause(count, chance) <= whole <= LONGEST_PAUSE


def restarted(*times: float) -> Watched:
    return Watched(restarts=times)


def test_a_daemon_that_ended_is_due_after_the_pause_and_serves_only_when_it_says_so() -> None:
    waiting = ended(Watched(), most=5, chance=0.0, now=100.0)
    assert waiting is not None
    assert (waiting.due, waiting.wakeup, waiting.serves) == (100.2, 100.2, False)
    starting = started(waiting, ready_within=30, now=100.3)
    assert (starting.restarts, starting.wakeup, starting.serves) == ((100.3,), 130.3, False)
    assert ready(starting) == restarted(100.3)
    assert ready(starting).serves and ready(starting).wakeup == math.inf


def test_a_daemon_that_is_late_is_not_killed_twice() -> None:
    killed = late(started(Watched(), ready_within=30, now=1.0))
    assert not killed.serves and killed.wakeup == math.inf
    assert ended(killed, most=5, chance=0.0, now=40.0) is not None


def test_after_so_many_restarts_it_is_not_started_again() -> None:
    assert ended(restarted(1, 2, 3), most=4, chance=0.0, now=5.0) is not None
    assert ended(restarted(1, 2, 3, 4), most=4, chance=0.0, now=5.0) is None
    assert ended(Watched(), most=0, chance=0.0, now=5.0) is None


def test_restarts_before_the_window_are_forgotten_and_the_pause_is_short_again() -> None:
    later = ended(restarted(1, 2, 3, 4), most=4, chance=0.0, now=4.5 + WINDOW)
    assert later is not None and later.restarts == ()
    assert later.due == pytest.approx(4.5 + WINDOW + 0.2)
    assert ended(restarted(1, 2, 3, 4), most=1, chance=0.0, now=3.5 + WINDOW) is None
