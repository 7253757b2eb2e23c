"""How far two clocks are apart, and how sure that is."""

from __future__ import annotations

import random

import pytest

from collectived_runtime import clocks
from collectived_runtime.clocks import DRIFT, KEPT, OFTEN, SELDOM, Pulse, offset


def test_where_both_ways_take_as_long_the_offset_is_exact() -> None:
    found = offset(sent=100.0, heard=5.25, answered=5.5, returned=100.75)
    assert (found.seconds, found.round_trip, found.at) == (95.0, 0.5, 100.75)


def test_however_the_ways_differ_it_is_wrong_by_half_of_the_round_trip_at_most() -> None:
    draw = random.Random(1)
    for _ in range(1000):
        true, there, back, pause = draw.uniform(-1e5, 1e5), draw.random(), draw.random(), draw.random()
        sent = draw.uniform(0, 1e5)
        heard = sent + there - true
        found = offset(sent, heard, heard + pause, sent + there + pause + back)
        assert abs(found.seconds - true) <= found.error(found.at) + 1e-9
        assert found.error(found.at + 100.0) == pytest.approx(found.error(found.at) + 100.0 * DRIFT)


def test_a_heartbeat_asks_often_at_first_and_seldom_later() -> None:
    pulse = Pulse()
    asked = [bool(pulse.beat(float(beat))) for beat in range(1, 61)]
    assert asked[:OFTEN] == [True] * OFTEN
    assert sum(asked[OFTEN:]) == 60 // SELDOM - OFTEN // SELDOM


def test_the_best_exchange_counts_until_it_is_too_old() -> None:
    pulse = Pulse()
    assert pulse.best(0.0) is None
    for sent, round_trip in ((10.0, 0.4), (20.0, 0.002), (30.0, 0.1)):
        assert pulse.beat(sent) == sent
        pulse.echo(sent, 0.0, sent + round_trip)
    best = pulse.best(31.0)
    assert best is not None and best.round_trip == pytest.approx(0.002)
    for beat in range(KEPT * SELDOM):
        pulse.echo(pulse.beat(40.0 + beat), 0.0, 40.3 + beat)
    best = pulse.best(100.0)
    assert best is not None and best.at > 40.0  # the others have been forgotten


def test_an_echo_of_something_else_is_no_exchange() -> None:
    pulse = Pulse()
    pulse.beat(10.0)
    pulse.echo(9.0, 0.0, 10.1)
    pulse.echo(0.0, 0.0, 10.1)
    assert pulse.best(10.2) is None
    pulse.echo(10.0, 0.0, 10.1)
    assert pulse.best(10.2) is not None
    pulse.forget()
    assert pulse.best(10.3) is None


def test_processes_of_one_machine_read_the_same_clock() -> None:
    assert clocks.name() == clocks.name() != ""
