"""What a long run is held to."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.page import between
from benchmarks.steady import lines, resident

CALM = {
    "first": 1e-4,
    "last": 1e-4,
    "worker": 60.0,
    "worker_growth": 0.0,
    "shared_growth": 0.0,
    "client_growth": 0.0,
    "alone": 1e-4,
    "beside": 1.5e-4,
}


def test_a_worker_that_stays_as_it_was_meets_every_goal() -> None:
    assert all(line.met for line in lines(CALM, 1000))


def test_each_figure_that_is_too_large_misses_its_goal() -> None:
    for name in ("last", "worker", "worker_growth", "shared_growth", "client_growth", "beside"):
        found = lines({**CALM, name: CALM[name] * 3 + 100}, 1000)
        assert sum(not line.met for line in found) == 1, name


def test_memory_is_told_apart_into_own_and_shared() -> None:
    found = resident(os.getpid())
    assert found["own"] > 0 and found["shared"] >= 0


def test_the_page_has_a_place_for_it() -> None:
    page = Path(__file__).parents[2] / "docs" / "internals" / "performance.md"
    assert "figures" in between(page.read_text(), "steady", "figures")
