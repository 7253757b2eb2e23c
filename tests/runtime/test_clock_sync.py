"""How far two clocks are apart, and how sure that is."""

from __future__ import annotations

import random

import pytest

from collectived_runtime import clock_sync
from collectived_runtime.clock_sync import (
    DRIFT,
    ECHO_INTERVAL,
    INITIAL_ECHOES,
    MAX_OFFSETS,
    ClockEstimator,
    compute_offset,
)


def test_where_both_ways_take_as_long_the_offset_is_exact() -> None:
    found = compute_offset(sent=100.0, heard=5.25, answered=5.5, returned=100.75)
    assert (found.seconds, found.round_trip, found.measured_at) == (95.0, 0.5, 100.75)


def test_however_the_ways_differ_it_is_wrong_by_half_of_the_round_trip_at_most() -> None:
    draw = random.Random(1)
    for _ in range(1000):
        true, there, back, pause = draw.uniform(-1e5, 1e5), draw.random(), draw.random(), draw.random()
        sent = draw.uniform(0, 1e5)
        heard = sent + there - true
        found = compute_offset(sent, heard, heard + pause, sent + there + pause + back)
        assert abs(found.seconds - true) <= found.error(found.measured_at) + 1e-9
        assert found.error(found.measured_at + 100.0) == pytest.approx(found.error(found.measured_at) + 100.0 * DRIFT)


def test_a_heartbeat_asks_often_at_first_and_seldom_later() -> None:
    pulse = ClockEstimator()
    asked = [bool(pulse.on_heartbeat(float(beat))) for beat in range(1, 61)]
    assert asked[:INITIAL_ECHOES] == [True] * INITIAL_ECHOES
    assert sum(asked[INITIAL_ECHOES:]) == 60 // ECHO_INTERVAL - INITIAL_ECHOES // ECHO_INTERVAL


def test_the_best_exchange_counts_until_it_is_too_old() -> None:
    pulse = ClockEstimator()
    assert pulse.best_offset(0.0) is None
    for sent, round_trip in ((10.0, 0.4), (20.0, 0.002), (30.0, 0.1)):
        assert pulse.on_heartbeat(sent) == sent
        pulse.on_echo(sent, 0.0, sent + round_trip)
    best = pulse.best_offset(31.0)
    assert best is not None and best.round_trip == pytest.approx(0.002)
    for beat in range(MAX_OFFSETS * ECHO_INTERVAL):
        pulse.on_echo(pulse.on_heartbeat(40.0 + beat), 0.0, 40.3 + beat)
    best = pulse.best_offset(100.0)
    assert best is not None and best.measured_at > 40.0  # the others have been forgotten


def test_an_echo_of_something_else_is_no_exchange() -> None:
    pulse = ClockEstimator()
    pulse.on_heartbeat(10.0)
    pulse.on_echo(9.0, 0.0, 10.1)
    pulse.on_echo(0.0, 0.0, 10.1)
    assert pulse.best_offset(10.2) is None
    pulse.on_echo(10.0, 0.0, 10.1)
    assert pulse.best_offset(10.2) is not None
    pulse.forget()
    assert pulse.best_offset(10.3) is None


def test_processes_of_one_machine_read_the_same_clock() -> None:
    assert clock_sync.clock_id() == clock_sync.clock_id() != ""
