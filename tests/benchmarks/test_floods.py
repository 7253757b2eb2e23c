"""What is shown of floods: medians beside each kind of client, and whether the goal is reached."""

from __future__ import annotations

import numpy as np
from benchmarks.floods import ATTACKS, SHOWN, table
from benchmarks.scrape import Times

TIMES = Times(np.array([0.0, 1.0, 2.0, 3.0]), np.array([100e-6, 110e-6, 120e-6, 260e-6]))


def test_every_kind_is_told_in_words() -> None:
    assert SHOWN.keys() == ATTACKS.keys()


def test_medians_are_compared_with_those_beside_a_busy_process() -> None:
    shown = table(TIMES, {"busy": [(0.0, 1.0)], "status": [(1.0, 3.0)], "pings": [(3.0, 4.0)]}).splitlines()
    assert shown[2] == f"| {SHOWN['busy']} | 1 | 100 µs | 100 µs | 1.00 |  |"
    assert shown[3] == f"| {SHOWN['status']} | 2 | 115 µs | 120 µs | 1.15 | ≤ 1.25 |"
    assert shown[4].endswith("| 2.60 | ≤ 1.25, **missed** |")
