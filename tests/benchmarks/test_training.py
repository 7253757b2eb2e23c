"""What the benchmark of a training makes of its figures."""

from __future__ import annotations

from benchmarks.training import Training, parse, table


def test_what_the_example_says_at_its_end_is_read() -> None:
    said = "400 steps took 2.87 s\ntest accuracy 0.9694 (at least 0.93)\nweights are the same bits on 2 of 2 ranks\n"
    assert parse(said) == Training(2.87, 0.9694)


def test_the_table_has_medians_and_every_accuracy() -> None:
    found = {
        "none": [Training(3, 0.97), Training(1, 0.97), Training(2, 0.97)],
        "int8": [Training(1, 0.97), Training(1, 0.96)],
    }
    assert table(found).splitlines()[2:] == ["| none | 2.00 s | 0.9700 |", "| int8 | 1.00 s | 0.9600 to 0.9700 |"]
