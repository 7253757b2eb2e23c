"""How long a daemon is waited for before it is started again, and how often it is. Numbers are seconds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectived_launcher.launch.restarts import (
    MAX_BACKOFF,
    WINDOW,
    DaemonRestartState,
    compute_backoff,
    record_exit,
    record_ready,
    record_ready_timeout,
    record_restart,
)


def test_the_pause_doubles_from_a_fifth_of_a_second_to_ten_seconds() -> None:
    pauses = [compute_backoff(count, chance=0.0) for count in range(1, 9)]
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])


@given(st.integers(1, 10**9), st.floats(0, 1, exclude_max=True))
def test_chance_takes_off_up_to_half_of_the_pause_however_often_it_was(count: int, chance: float) -> None:
    whole = compute_backoff(count, 0.0)
    assert whole / 2 <= compute_backoff(count, chance) <= whole <= MAX_BACKOFF


def restarted(*times: float) -> DaemonRestartState:
    return DaemonRestartState(restart_times=times)


def test_a_daemon_that_ended_is_due_after_the_pause_and_serves_only_when_it_says_so() -> None:
    waiting = record_exit(DaemonRestartState(), most=5, chance=0.0, now=100.0)
    assert waiting is not None
    assert (waiting.restart_at, waiting.next_deadline, waiting.is_serving) == (100.2, 100.2, False)
    starting = record_restart(waiting, ready_within=30, now=100.3)
    assert (starting.restart_times, starting.next_deadline, starting.is_serving) == ((100.3,), 130.3, False)
    assert record_ready(starting) == restarted(100.3)
    assert record_ready(starting).is_serving and record_ready(starting).next_deadline == math.inf


def test_a_daemon_that_is_late_is_not_killed_twice() -> None:
    killed = record_ready_timeout(record_restart(DaemonRestartState(), ready_within=30, now=1.0))
    assert not killed.is_serving and killed.next_deadline == math.inf
    assert record_exit(killed, most=5, chance=0.0, now=40.0) is not None


def test_after_so_many_restarts_it_is_not_started_again() -> None:
    assert record_exit(restarted(1, 2, 3), most=4, chance=0.0, now=5.0) is not None
    assert record_exit(restarted(1, 2, 3, 4), most=4, chance=0.0, now=5.0) is None
    assert record_exit(DaemonRestartState(), most=0, chance=0.0, now=5.0) is None


def test_restarts_before_the_window_are_forgotten_and_the_pause_is_short_again() -> None:
    later = record_exit(restarted(1, 2, 3, 4), most=4, chance=0.0, now=4.5 + WINDOW)
    assert later is not None and later.restart_times == ()
    assert later.restart_at == pytest.approx(4.5 + WINDOW + 0.2)
    assert record_exit(restarted(1, 2, 3, 4), most=1, chance=0.0, now=3.5 + WINDOW) is None
