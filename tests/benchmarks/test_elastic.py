"""What the benchmark of joining makes of its figures."""

from __future__ import annotations

from benchmarks.elastic import STEPS, Steps, elapsed, lines


def test_a_step_lasts_from_the_last_call_to_the_last_return() -> None:
    assert elapsed([(1.0, 9.5), (8.0, 9.0), (2.0, 8.5)]) == 1.5


def test_the_first_sum_has_no_goal_and_links_are_bounded() -> None:
    alone = Steps({step: [0.3, 0.6, 0.4] for step in STEPS}, {step: [0.7, 0.6, 0.9] for step in STEPS}, 12)
    many = Steps({step: [3.0] for step in STEPS}, {step: [1.0] for step in STEPS}, 40)
    found = lines(64, 1024, alone, many)
    assert [line.measured for line in found] == [0.4] * 4 + [40]
    assert [line.met for line in found] == [True] * 4 + [False]
    assert {line.note for line in found[:-1]} == {"0.70 s of processor time"}
    assert found[-1].note == "they joined in 3.00 s"
    assert not any("first sum" in line.what for line in found)
