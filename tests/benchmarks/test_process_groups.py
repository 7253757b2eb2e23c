"""What process groups are held to beside Gloo's."""

from __future__ import annotations

from pathlib import Path

from benchmarks.page import between
from benchmarks.process_groups import HOST, TCP, Figure, lines, report

FIGURES = [
    Figure(HOST, 2, "all_reduce", "4 B", 50e-6, 150e-6, 3.0),
    Figure(HOST, 2, "all_reduce", "1 MiB", 1e-3, 1.5e-3, 1.5),
    Figure(TCP, 2, "all_reduce", "4 B", 200e-6, 220e-6, 1.1),
    Figure(HOST, 2, "DDP step, 8,320 parameters", "", 2e-3, 2.6e-3, 1.3),
    Figure(TCP, 2, "DDP step, 8,320 parameters", "", 3e-3, 2.7e-3, 0.9),
]


def test_an_operation_is_held_to_its_goal_at_the_size_where_it_is_slowest_beside_gloo() -> None:
    found = {line.what: line for line in lines(FIGURES)}
    assert len(found) == 4
    slowest = found["2 ranks, one host, all_reduce: Gloo / ours"]
    assert (slowest.measured, slowest.goal, slowest.note, slowest.met) == (1.5, 2.0, "1 MiB", False)
    assert found["2 ranks, loopback TCP, all_reduce: Gloo / ours"].met


def test_steps_of_training_have_goals_of_their_own() -> None:
    found = {line.what: line for line in lines(FIGURES)}
    step = "DDP step, 8,320 parameters: Gloo / ours"
    host, tcp = found[f"2 ranks, {HOST}, {step}"], found[f"2 ranks, {TCP}, {step}"]
    assert (host.goal, host.met, tcp.goal, tcp.met) == (1.2, True, 1.0, False)


def test_the_report_has_a_table_for_each_place_and_says_how_many_goals_are_met() -> None:
    text = report(FIGURES, "where and when")
    assert text.startswith("where and when")
    assert "| all_reduce | 50.0 µs (3.00) |  |  | 1.00 ms (1.50) |  |" in text
    assert "DDP step, 8,320 parameters 2.00 ms (1.30)." in text
    assert "2 of 4 goals are met." in text


def test_what_could_not_be_measured_is_told() -> None:
    assert "Not measured: 4 ranks, one host: it failed." in report(FIGURES, "", ["4 ranks, one host: it failed"])


def test_the_page_has_a_place_for_it() -> None:
    page = Path(__file__).parents[2] / "docs" / "internals" / "performance.md"
    assert "figures" in between(page.read_text(), "process groups", "figures")
