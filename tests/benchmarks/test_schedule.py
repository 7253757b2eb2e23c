"""Who is measured when, and for how long."""

from __future__ import annotations

from collections import Counter

from benchmarks.schedule import QUICK, USUAL, round_robin, slowest


def test_everybody_has_one_turn_in_every_round() -> None:
    turns = list(round_robin("abc", 4))
    for number in range(4):
        assert sorted(name for of, name in turns if of == number) == ["a", "b", "c"]


def test_each_round_begins_with_another() -> None:
    firsts = [next(name for of, name in round_robin("abc", 3) if of == number) for number in range(3)]
    assert Counter(firsts) == Counter("abc")


def test_a_turn_has_as_many_calls_as_fit() -> None:
    assert USUAL.calls(1e-9) == USUAL.most
    assert USUAL.calls(10.0) == USUAL.fewest
    assert USUAL.calls(USUAL.seconds / 17.5) == 17
    assert QUICK.calls(0.0) == QUICK.most


def test_there_is_always_a_call_to_get_warm() -> None:
    assert USUAL.warmup(1) == 1
    assert USUAL.warmup(200) == 40


def test_a_call_lasts_as_long_as_on_the_slowest_rank() -> None:
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]
