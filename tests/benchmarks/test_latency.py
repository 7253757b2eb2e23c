"""What a small sum is held to where a loop of calls does not show its cost."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.latency import MPI, OURS, absolute, from_last_arrival, lines, processor_seconds, slowest

FAST = [{"median": 2e-6}] * 19
SLOW = {"median": 1e-3}
CALM = [{"median": 3e-6, "p99": 1e-4}] * 3
LATE = {2: {"clients": 1e-3, "worker": 1e-3}, 4: {"clients": 2e-3, "worker": 1e-3}}


def test_a_call_lasts_from_its_last_begin_to_its_last_end() -> None:
    begins = np.array([[0.0, 10.0, 20.0], [3.0, 11.0, 15.0]])
    ends = np.array([[5.0, 12.0, 21.0], [4.0, 14.0, 22.0]])
    assert from_last_arrival(begins, ends).tolist() == [[2.0, 3.0, 2.0]]


def test_the_slower_rank_counts() -> None:
    found = slowest(np.array([[1.0, 1.0, 9.0], [2.0, 2.0, 2.0]]))
    assert found["median"] == 2.0
    assert found["p99"] > 8.0


def test_the_name_of_a_process_does_not_hide_its_time() -> None:
    stat = "17 (a (b) 9 9) S 1 1 1 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 1 0 100 0 0"
    assert processor_seconds(stat, 100) == 3.0


def test_ranks_that_are_always_fast_meet_every_goal() -> None:
    found = lines({OURS: FAST, MPI: FAST}, CALM, LATE)
    assert len(found) == 5
    assert all(line.met for line in found)


def test_without_open_mpi_nothing_is_compared_with_it() -> None:
    assert not any(MPI in line.what for line in lines({OURS: FAST}, CALM, LATE))


def test_one_slow_start_is_forgiven_and_two_are_not() -> None:
    assert lines({OURS: [*FAST, SLOW]}, CALM, LATE)[0].met
    missed = lines({OURS: [*FAST, SLOW, SLOW]}, CALM, LATE)[0]
    assert not missed.met
    assert missed.measured == 2


def test_a_start_is_not_slow_at_three_times_the_median() -> None:
    assert lines({OURS: [*FAST, {"median": 6e-6}]}, CALM, LATE)[0].measured == 0


def test_each_figure_that_is_too_large_misses_its_goal() -> None:
    jam = {"median": 3e-6, "p99": 5e-3}
    burning = {"clients": 3e-3, "worker": 3e-3}
    for found in (
        lines({OURS: [{"median": 2.1e-6}], MPI: FAST}, CALM, LATE),
        lines({OURS: FAST, MPI: FAST}, [*CALM, jam], LATE),
        lines({OURS: FAST, MPI: FAST}, CALM, {**LATE, 2: burning}),
        lines({OURS: FAST, MPI: FAST}, CALM, {**LATE, 4: burning}),
    ):
        assert sum(not line.met for line in found) == 1


@pytest.mark.parametrize("libraries", [(OURS,), (OURS, MPI)])
def test_what_has_no_goal_is_shown_of_each_library(libraries: tuple[str, ...]) -> None:
    head, _, *rows = absolute({library: CALM for library in libraries}).splitlines()
    assert "goal" not in head
    assert rows == [f"| {library} | 3.00 µs | 100 µs |" for library in libraries]
