"""What a run is held to."""

from __future__ import annotations

import pytest
from benchmarks import contestants as who
from benchmarks.cases import ALL, MANY, SIZES, parse
from benchmarks.goals import TCP, lines, worst_of
from benchmarks.peers import ORDINARY, OWNED
from benchmarks.record import REJOIN, Cell
from benchmarks.tables import duration, others, times, together
from benchmarks.verdicts import Line, number, table, worst


def everything(ours: float, theirs: float) -> dict[Cell, float]:
    """A run in which we always take `ours`, and everybody else `theirs` seconds."""
    seconds = {}
    for ranks in (2, 4):
        for case in ALL:
            for contestant in who.ALL:
                for variant in contestant.variants_of(case):
                    value = ours if contestant.key == "ours" else theirs
                    seconds[Cell(ranks, contestant.name, variant, str(case))] = value
        seconds[Cell(ranks, who.HOST.name, "", REJOIN)] = ours
    return seconds


def test_who_is_a_hundred_times_as_fast_as_everybody_meets_all_goals() -> None:
    found = lines(everything(1e-6, 1e-4))
    assert [line.what for line in found if not line.met] == []
    assert len(found) == len({line.what for line in found}) == 76


def test_who_is_as_slow_as_everybody_misses_what_is_to_be_faster() -> None:
    missed = [line.what for line in lines(everything(1.0, 1.0)) if not line.met]
    assert any("Gloo at 4 B" in what for what in missed)
    assert any("TensorFlow" in what for what in missed)
    assert not any("plain sockets" in what for what in missed)


def test_a_ratio_is_that_of_the_size_where_it_is_least() -> None:
    seconds = everything(1e-5, 1e-4)
    seconds[Cell(2, who.MPICH.name, "", "64 KiB")] = 3e-5
    line = next(line for line in lines(seconds) if "ordinary arrays: best MPI, 1 KiB to 1 MiB" in line.what)
    assert line.measured == pytest.approx(3.0)
    assert line.note == "64 KiB"


def test_of_two_libraries_of_mpi_the_faster_counts() -> None:
    seconds = everything(1e-5, 1e-4)
    seconds[Cell(4, who.MPICH.name, "", "64 MiB")] = 2e-5
    line = next(line for line in lines(seconds) if "4 ranks, one host, ordinary arrays: best MPI, from" in line.what)
    assert line.measured == pytest.approx(2.0)


def test_every_operation_has_goals_of_its_own() -> None:
    seconds = everything(1e-6, 1e-4)
    seconds[Cell(4, who.GLOO.name, "", "all_to_all 16 MiB")] = 5e-7
    missed = {(line.what, line.note) for line in lines(seconds) if not line.met}
    assert missed == {
        ("4 ranks, one host, ordinary arrays: best MPI or Gloo, all_to_all from 64 KiB / ours", "16 MiB"),
        ("4 ranks, loopback TCP: Gloo, all_to_all from 16 MiB / ours", "16 MiB"),
    }


def test_what_was_not_measured_is_held_to_nothing() -> None:
    assert lines({}) == []
    seconds = {cell: value for cell, value in everything(1e-5, 1e-4).items() if cell.name != who.TENSORFLOW.name}
    assert not any("TensorFlow" in line.what for line in lines(seconds))


def test_of_several_runs_the_worst_counts() -> None:
    found = worst_of([everything(1e-5, 1e-4), everything(1e-5, 2e-5), everything(1e-5, 1e-3)])
    gloo = next(line for line in found if line.what == "2 ranks, one host, session.empty: Gloo at 4 B / ours")
    assert gloo.measured == pytest.approx(2.0)


def test_the_worst_of_what_is_to_be_small_is_the_largest() -> None:
    assert worst([Line("x", 1.0, "≤", 2.0), Line("x", 3.0, "≤", 2.0)]).measured == 3.0
    assert worst([Line("x", 1.0, "≥", 2.0), Line("x", 3.0, "≥", 2.0)]).measured == 1.0


@pytest.mark.parametrize(
    ("relation", "measured", "met"),
    [("≥", 2.0, True), ("≥", 1.9, False), ("≤", 2.0, True), ("≤", 2.1, False), ("<", 2.0, False), ("<", 1.9, True)],
)
def test_a_goal_is_met_or_not(relation: str, measured: float, met: bool) -> None:
    assert Line("x", measured, relation, 2.0).met is met


def test_a_missed_goal_stands_out() -> None:
    shown = table([Line("speed", 1.5, "≥", 2.0, "GB/s", "64 MiB")])
    assert shown.splitlines()[-1] == "| speed | ≥ 2.00 GB/s | 1.50 GB/s (64 MiB) | **no** |"


def test_the_median_of_runs_is_taken_cell_by_cell() -> None:
    cell, other = Cell(2, "a", "", "4 B"), Cell(2, "b", "", "4 B")
    assert together([{cell: 1.0}, {cell: 2.0, other: 7.0}, {cell: 9.0}]) == {cell: 2.0, other: 7.0}


def test_a_table_leaves_out_who_was_not_measured() -> None:
    shown = times({Cell(2, who.GLOO.name, "", str(MANY)): 0.001}, 2, [ALL[0], MANY])
    assert shown.splitlines() == [
        "| 2 ranks | 4 B | 64 x 1 KiB |",
        "|---|---:|---:|",
        "| Gloo, TCP |  | 1.00 ms |",
    ]


def test_both_places_of_our_buffers_have_a_row() -> None:
    shown = times(everything(1e-5, 1e-4), 4, SIZES)
    assert shown.count("collectived") == 4
    assert all(shown.count(name) == 2 for name in (OWNED, ORDINARY))


def test_other_operations_are_shown_beside_each_library() -> None:
    cases = [parse(text) for text in ("broadcast 4 B", "broadcast 1 MiB", "barrier", "1 MiB")]
    assert others(everything(1e-5, 1e-4), 2, ORDINARY, cases).splitlines() == [
        "| 2 ranks, one worker | 4 B | 1 MiB |",
        "|---|---:|---:|",
        "| broadcast | 10.0 µs (10.0 / 10.0 / 10.0) | 10.0 µs (10.0 / 10.0 / 10.0) |",
        "| barrier | 10.0 µs (10.0 / 10.0 / 10.0) |  |",
    ]
    assert "(10.0) |" in others(everything(1e-5, 1e-4), 2, TCP, cases)
    assert others({}, 2, ORDINARY, cases) == ""


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(4.5e-5, "45.0 µs"), (1.5e-6, "1.50 µs"), (0.00123, "1.23 ms"), (0.62, "620 ms"), (2.5, "2.50 s")],
)
def test_durations_have_three_digits(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_small_numbers_keep_two_digits() -> None:
    assert [number(value) for value in (1234.5, 123.4, 12.34, 1.234, 0.1, 0.0123)] == [
        *("1234", "123", "12.3", "1.23", "0.10", "0.012")
    ]
