"""What the benchmark of compressed sums makes of its figures."""

from __future__ import annotations

from benchmarks.compression import speedup, table

FOUND = {"none": [0.010, 0.012, 0.5], "bfloat16": [0.005, 0.012, 0.25], "float8": [0.004] * 3, "int8": [0.005] * 3}


def test_the_speedup_is_the_median_of_the_rounds() -> None:
    assert speedup(FOUND, "bfloat16") == 2.0
    assert speedup(FOUND, "int8") == 0.012 / 0.005


def test_only_a_goal_that_is_missed_is_bold() -> None:
    lines = table({1 << 18: FOUND, 1 << 20: FOUND}).splitlines()
    assert lines[2] == "| 256 KiB | 12 ms | 12 ms (2.00) | 4 ms (3.00) | 5 ms (2.40) |"
    assert lines[3] == "| 1 MiB | 12 ms | 12 ms (2.00) | 4 ms (3.00) | 5 ms (**2.40**) |"
