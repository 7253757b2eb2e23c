"""Sizes, bandwidths and percentiles: the definitions of nccl-tests (doc/PERFORMANCE.md there), as literal numbers."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from collectived.bench.figures import MAX_ITERATIONS, MIN_ITERATIONS, TARGET_SECONDS, choose_iterations, figures
from collectived.bench.operation_kinds import KINDS, Extent, compute_extent, compute_extents, compute_sizes
from collectived_launcher.bench import cli as bench

MIB = 1 << 20


@pytest.mark.parametrize(
    ("operation", "of_two", "of_four", "of_eight"),
    [
        ("all_reduce", 1.0, 1.5, 1.75),
        ("reduce", 1.0, 1.0, 1.0),
        ("broadcast", 1.0, 1.0, 1.0),
        ("send_recv", 1.0, 1.0, 1.0),
        ("all_gather", 0.5, 0.75, 0.875),
        ("reduce_scatter", 0.5, 0.75, 0.875),
        ("all_to_all", 0.5, 0.75, 0.875),
        ("gather", 0.5, 0.75, 0.875),
        ("scatter", 0.5, 0.75, 0.875),
    ],
)
def test_bus_bandwidth_is_algorithm_bandwidth_times_the_factor(
    operation: str, of_two: float, of_four: float, of_eight: float
) -> None:
    for ranks, factor in ((2, of_two), (4, of_four), (8, of_eight)):
        kind = KINDS[operation]
        found = figures(kind, compute_extent(kind, 8 * MIB, 4, ranks), np.full((ranks, 5), 1_000_000))
        assert found.algorithm_bandwidth == pytest.approx(8 * MIB / 1e-3)
        assert found.bus_bandwidth == pytest.approx(factor * 8 * MIB / 1e-3)


def test_one_rank_alone_moves_nothing_over_the_bus() -> None:
    kind = KINDS["all_reduce"]
    assert figures(kind, compute_extent(kind, MIB, 4, 1), np.ones((1, 3), np.int64)).bus_bandwidth == 0


@pytest.mark.parametrize(
    ("operation", "count", "taken", "given"),
    [
        ("all_reduce", 1024, 1024, 1024),
        ("reduce", 1024, 1024, 1024),
        ("broadcast", 1024, 1024, 1024),
        ("send_recv", 1024, 1024, 1024),
        ("all_gather", 256, 256, 1024),
        ("gather", 256, 256, 1024),
        ("scatter", 256, 1024, 256),
        ("reduce_scatter", 256, 1024, 256),
        ("all_to_all", 256, 1024, 1024),
    ],
)
def test_size_is_the_whole_array_and_count_is_one_piece(operation: str, count: int, taken: int, given: int) -> None:
    assert compute_extent(KINDS[operation], 4096, 4, 4) == Extent(4096, count, taken, given)


def test_a_size_is_rounded_down_to_whole_pieces_and_up_to_one_element_of_each() -> None:
    assert compute_extent(KINDS["all_gather"], 4096 + 15, 4, 4).size == 4096
    assert compute_extent(KINDS["all_gather"], 4, 4, 3) == Extent(12, 1, 1, 3)
    assert compute_extent(KINDS["all_reduce"], 1, 8, 3) == Extent(8, 1, 1, 1)


def test_a_barrier_has_times_and_no_bandwidth() -> None:
    kind = KINDS["barrier"]
    (only,) = compute_extents(kind, compute_sizes(4, 4096, 2), 4, 2)
    found = figures(kind, only, np.array([[1000, 3000, 2000]] * 2))
    assert only.size == 0 and found.p50 == pytest.approx(2e-6)
    assert found.algorithm_bandwidth is None and found.bus_bandwidth is None


def test_the_time_of_an_iteration_is_that_of_the_slowest_rank() -> None:
    found = figures(KINDS["reduce"], Extent(10, 1, 1, 1), np.array([[1, 9, 2, 5], [3, 1, 4, 5]]) * 1000)
    assert found.iterations == 4
    assert found.p50 == pytest.approx(4.5e-6) and found.mean == pytest.approx(5.25e-6)
    assert found.p99 == pytest.approx((5 + 0.97 * 4) * 1e-6)


@pytest.mark.parametrize(
    ("first", "last", "factor", "step", "expected"),
    [
        (4, 256, 4, 0, [4, 16, 64, 256]),
        (4, 255, 4, 0, [4, 16, 64]),
        (8, 8, 2, 0, [8]),
        (100, 400, 2, 150, [100, 250, 400]),
    ],
)
def test_sizes_grow_by_a_factor_or_by_steps(first: int, last: int, factor: int, step: int, expected: list[int]) -> None:
    assert compute_sizes(first, last, factor, step) == expected


def test_sizes_that_do_not_grow_are_refused() -> None:
    with pytest.raises(ValueError, match="sizes from 4 by the factor 1 do not grow"):
        compute_sizes(4, 8, 1)


def test_sizes_that_round_to_the_same_are_measured_once() -> None:
    assert [one.size for one in compute_extents(KINDS["all_to_all"], [4, 8, 16, 32], 4, 4)] == [16, 32]


def test_iterations_fill_a_third_of_a_second_within_bounds() -> None:
    assert choose_iterations(TARGET_SECONDS / 100) == 100
    assert (choose_iterations(10.0), choose_iterations(1e-9), choose_iterations(0.0)) == (
        MIN_ITERATIONS,
        MAX_ITERATIONS,
        MAX_ITERATIONS,
    )


def test_the_command_knows_the_same_operations() -> None:
    assert tuple(KINDS) == bench.OPERATIONS
    assert set(bench.REDUCING_OPERATIONS) == {name for name, kind in KINDS.items() if kind.reduces}
    assert set(bench.ROOTED_OPERATIONS) == {name for name, kind in KINDS.items() if kind.has_root}


def test_the_library_does_not_import_the_bench() -> None:
    program = "import sys, collectived; sys.exit('collectived.bench' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 0
